"""Text completions of prompts from Python, without a config, a run directory or rewards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxrl_llm.models.tokenizer import Tokenizer
from jaxrl_llm.rollout import ring_decode, slot_loop
from jaxrl_llm.rollout.decode_records import DecodeInputs, DecodeSettings
from jaxrl_llm.rollout.sampling import TokenFilter
from jaxrl_llm.types import UNFINISHED, Model, ModelConfig, Prompts, UserError

_BUCKET = 64  # prompt lengths are rounded up to a multiple: each length compiles once


def sample(
  model: Model, prompts: Sequence[str | list[dict[str, str]]], **settings: Any
) -> list[list[str]]:
  """`list(stream(...))`: the n completions of each prompt."""
  return list(stream(model, prompts, **settings))


def stream(
  model: Model,
  prompts: Sequence[str | list[dict[str, str]]],
  *,
  n: int = 1,
  max_tokens: int = 128,
  temperature: float = 1.0,
  top_k: int = 0,
  top_p: float = 1.0,
  min_p: float = 0.0,
  seed: int = 0,
  chat: bool = True,
  at_once: int = 8,
) -> Iterator[list[str]]:
  """Yields the n completions of one prompt after another, decoding `at_once` prompts together.

  A prompt is text, or a list of messages with role and content. With `chat`, text becomes a user message under the
  model's chat template; without, it is continued as it is. Temperature 0 is greedy. Noise is keyed by (seed, number of
  the prompt, completion, position). Raises UserError for an empty prompt or one that does not fit the model.
  """
  tokenizer, config = model.tokenizer, model.config
  encoded = [_encode(tokenizer, prompt, chat) for prompt in prompts]
  for number, tokens in enumerate(encoded):
    _check_length(config, number, len(tokens), max_tokens)
  settings = DecodeSettings(
    n,
    max_tokens,
    temperature,
    tuple(tokenizer.end_ids),
    'float32',
    token_filter=TokenFilter(top_k, top_p, min_p),
  )
  key = jax.random.key(seed)
  run = jax.jit(
    lambda params, p: ring_decode.generate(config, settings, DecodeInputs(params, p, key, 0))[0]
  )
  for start in range(0, len(encoded), at_once):
    part = encoded[start : start + at_once]
    padded = part + [part[0]] * (min(at_once, len(encoded)) - len(part))
    rollout = jax.tree.map(np.asarray, run(model.params, _prompts(padded, start)))
    for p in range(len(part)):
      rows = range(p * n, (p + 1) * n)
      yield [tokenizer.decode(rollout.tokens_BxT[b, : rollout.length_B[b]].tolist()) for b in rows]


class CompletionStreamer:
  """One completion at a time, as text pieces while it is sampled.

  The joined pieces equal the result of `sample` for that prompt alone, with the same settings.
  """

  def __init__(
    self,
    model: Model,
    *,
    max_tokens: int = 128,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    chat: bool = True,
    piece_tokens: int = 8,
  ):
    """`piece_tokens`: tokens per piece; each piece encodes the earlier ones again."""
    self._model, self._chat, self._piece = model, chat, piece_tokens
    self._settings = settings = DecodeSettings(
      1,
      max_tokens,
      temperature,
      tuple(model.tokenizer.end_ids),
      'float32',
      token_filter=TokenFilter(top_k, top_p, min_p),
    )
    self._run = jax.jit(
      lambda params, prompts, key, continued, pause: ring_decode.generate(
        model.config,
        settings,
        DecodeInputs(params, prompts, key, 0, continued=continued, pause=pause),
      )[0]
    )

  def prompt_tokens(self, prompt: str | list[dict[str, str]]) -> int:
    """The length of the prompt in tokens, the chat template included."""
    return len(_encode(self._model.tokenizer, prompt, self._chat))

  def stream(self, prompt: str | list[dict[str, str]], seed: int = 0) -> Iterator[str]:
    """Yields the completion in pieces. Raises UserError for an empty prompt or one that does not fit the model."""
    model, T = self._model, self._settings.max_tokens
    encoded = _encode(model.tokenizer, prompt, self._chat)
    _check_length(model.config, 0, len(encoded), T)
    prompts, key = _prompts([encoded], 0), jax.random.key(seed)
    rollout, yielded = slot_loop.empty_rollout(1, T), ''
    for pause in range(self._piece, T + self._piece, self._piece):
      rollout = self._run(model.params, prompts, key, rollout, min(pause, T))
      length, over = int(rollout.length_B[0]), int(rollout.reason_B[0]) != UNFINISHED
      text = model.tokenizer.decode(np.asarray(rollout.tokens_BxT[0, :length]).tolist())
      # The decoder turns an incomplete character into U+FFFD, which waits for its remaining bytes.
      complete = text if over else text.rstrip('\ufffd')
      yield complete[len(yielded) :]
      yielded = complete
      if over:
        return


def _check_length(config: ModelConfig, number: int, tokens: int, max_tokens: int) -> None:
  if not tokens or tokens + max_tokens > config.max_tokens:
    raise UserError(
      f'prompt {number} has {tokens} tokens: it needs at least one, and with max_tokens={max_tokens} at '
      f'most {config.max_tokens - max_tokens} for this model; change it, or lower max_tokens.'
    )


def _encode(tokenizer: Tokenizer, prompt: str | list[dict[str, str]], chat: bool) -> list[int]:
  if isinstance(prompt, str):
    if not chat:
      return tokenizer.encode(prompt)
    prompt = [dict(role='user', content=prompt)] if prompt else []
  return tokenizer.encode_chat(prompt) if prompt else []


def _prompts(encoded: list[list[int]], start: int) -> Prompts:
  """Prompts numbered from `start`, right-padded to a multiple of the bucket."""
  P, longest = len(encoded), max(map(len, encoded))
  tokens_PxL = np.zeros((P, -(-longest // _BUCKET) * _BUCKET), np.int32)
  for row, tokens in zip(tokens_PxL, encoded, strict=True):
    row[: len(tokens)] = tokens
  length_P = np.array([len(tokens) for tokens in encoded], np.int32)
  index_P = np.arange(start, start + P, dtype=np.int32)
  return Prompts(tokens_PxL, length_P, index_P, np.zeros(P, np.int32), np.zeros(P, np.float32))

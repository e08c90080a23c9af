"""Answers to prompts, from Python: no config, no run folder, no grading."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import jax
import numpy as np

from jaxrl_llm.generate import engine
from jaxrl_llm.generate.sampling import Filter
from jaxrl_llm.types import Model, Prompts, UserError

_BUCKET = 64  # prompt lengths are rounded up to a multiple: each length compiles once


def sample(model: Model, prompts: Sequence[str | list[dict]], **settings) -> list[list[str]]:
  """`list(stream(...))`: for each prompt its n answers. Source: none."""
  return list(stream(model, prompts, **settings))


def stream(
  model: Model,
  prompts: Sequence[str | list[dict]],
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
  """Yields the n answers of one prompt after another, `at_once` prompts a pass; temperature 0 is greedy.

  A prompt is text, or a list of messages with role and content. With `chat` text becomes a user's
  message under the model's template; without, it is continued as it is. Noise is keyed by (seed, number
  of the prompt, answer, position). Raises UserError for an empty prompt or one that does not fit
  the model. Source: none.
  """
  tokenizer, config = model.tokenizer, model.config
  encoded = [_encode(tokenizer, prompt, chat) for prompt in prompts]
  for number, tokens in enumerate(encoded):
    if not tokens or len(tokens) + max_tokens > config.max_tokens:
      raise UserError(
        f'prompt {number} has {len(tokens)} tokens: it needs at least one, and with max_tokens={max_tokens} at '
        f'most {config.max_tokens - max_tokens} for this model; change it, or lower max_tokens.'
      )
  keep = Filter(top_k, top_p, min_p)
  spec = engine.Spec(n, max_tokens, temperature, tuple(tokenizer.end_ids), 'float32', keep=keep)
  key = jax.random.key(seed)
  run = jax.jit(lambda params, p: engine.generate(config, params, p, key, 0, spec)[0])
  for start in range(0, len(encoded), at_once):
    part = encoded[start : start + at_once]
    padded = part + [part[0]] * (min(at_once, len(encoded)) - len(part))
    rollout = jax.tree.map(np.asarray, run(model.params, _prompts(padded, start)))
    for p in range(len(part)):
      rows = range(p * n, (p + 1) * n)
      yield [tokenizer.decode(rollout.tokens_BxT[b, : rollout.length_B[b]].tolist()) for b in rows]


def _encode(tokenizer, prompt: str | list[dict], chat: bool) -> list[int]:
  if isinstance(prompt, str):
    if not chat:
      return tokenizer.encode(prompt)
    prompt = [dict(role='user', content=prompt)] if prompt else []
  return tokenizer.encode_chat(prompt) if prompt else []


def _prompts(encoded: list[list[int]], start: int) -> Prompts:
  P, longest = len(encoded), max(map(len, encoded))
  tokens_PxL = np.zeros((P, -(-longest // _BUCKET) * _BUCKET), np.int32)
  for row, tokens in zip(tokens_PxL, encoded, strict=True):
    row[: len(tokens)] = tokens
  length_P = np.array([len(tokens) for tokens in encoded], np.int32)
  index_P = np.arange(start, start + P, dtype=np.int32)
  return Prompts(tokens_PxL, length_P, index_P, np.zeros(P, np.int32), np.zeros(P, np.float32))

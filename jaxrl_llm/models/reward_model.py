"""A reward model as a grader: a Hugging Face folder of a decoder with one number for a whole conversation.

--config.rewards="{'fn': 'jaxrl_llm.models.reward_model:score', 'folder': 'FOLDER', 'batched': 'step'}"
It is called as TRL calls a reward function. Grading workers have the host's CPU alone, so that it runs there, with
config.mode='lag' beside the device's step; each worker holds its own copy of the weights: give one worker, memory_mb
for the weights in float32, and a deadline and cpu_s for a whole step.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.models import decoder, huggingface, size_limits, tokenizer
from jaxrl_llm.types import ModelConfig, UserError

_HEAD = 'score.weight'
_ROWS = 8  # at once
_LEAST = 32  # tokens of a row; above, a power of two, so that few shapes are compiled


class RewardModel(NamedTuple):
  """A decoder without a head for tokens, and a row for the number."""

  config: ModelConfig
  params: Any
  head_D: np.ndarray
  tokenizer: Any


def load(folder: str) -> RewardModel:
  """Of a folder of …ForSequenceClassification with one label, of a family that config.model may be of.

  Raises UserError for another architecture, several labels, and what is wrong with a model folder. Source: none.
  """
  bare = _bare(folder)
  return bare._replace(params=huggingface.load_params(folder, bare.config, (_HEAD,)))


def _bare(folder: str) -> RewardModel:
  """All of it but the decoder's weights, which take their time."""
  if not os.path.isfile(os.path.join(folder, 'config.json')):
    raise UserError(
      f'{folder!r} is no reward model: no folder here has a config.json of that name; give a local folder of '
      '…ForSequenceClassification with one label.'
    )
  config, raw = huggingface.read_config(folder)
  told = raw.get('architectures') or ['none']
  if not str(told[0]).endswith('ForSequenceClassification'):
    raise UserError(
      f'{folder!r} holds {told[0]}, no reward model; give a folder of …ForSequenceClassification with one label.'
    )
  # Tied: there is no head for tokens to look for.
  config = dataclasses.replace(config, tied=True)
  size_limits.check_memory(config, repr(folder))
  head_1xD = huggingface.load_tensor(folder, _HEAD, (1, config.width))
  return RewardModel(config, None, head_1xD[0], tokenizer.from_folder(folder, raw))


def score_token_ids(model: RewardModel, rows: Sequence[Sequence[int]]) -> list[float]:
  """w·h of the last token of each row of ids, h its final hidden state, in float32. Source: none.

  Raises ValueError for a row without a token, or longer than the model reads.
  """
  longest = max(map(len, rows), default=0)
  if longest > model.config.max_tokens or not all(map(len, rows)):
    raise ValueError(
      f'a conversation of {longest} tokens, where the reward model reads 1 to {model.config.max_tokens}'
    )
  found: list[float] = []
  for at in range(0, len(rows), _ROWS):
    some = rows[at : at + _ROWS]
    width = max(_LEAST, 2 ** math.ceil(math.log2(max(map(len, some)))))
    tokens_BxS, length_B = np.zeros((_ROWS, width), np.int32), np.ones(_ROWS, np.int32)
    for b, ids in enumerate(some):
      tokens_BxS[b, : len(ids)], length_B[b] = ids, len(ids)
    rated_B = _rated(model.config, model.params, model.head_D, tokens_BxS, length_B)
    found += np.asarray(rated_B)[: len(some)].tolist()
  return found


def score(prompts: Sequence[Any], completions: Sequence[Any], *, folder: str) -> list[float]:
  """The reward model's number for each conversation, prompts and completions as messages or as text. Source: none.

  Messages go through the folder's own chat template, text is one after the other. Raises as `load` and `rate`.
  """
  model = _kept(folder)
  words = model.tokenizer
  whole = [
    prompt + _plain(words, said)
    if isinstance(said, str)
    else words.chat(
      [*prompt, *(dict(m, content=_plain(words, m['content'])) for m in said)],
      add_generation_prompt=False,
    )
    for prompt, said in zip(prompts, completions, strict=True)
  ]
  return score_token_ids(model, [words.encode(text) for text in whole])


def _check(settings: Mapping[str, Any], where: str) -> None:
  """What is wrong with the folder, but for its weights, is told before a run and not by its grading workers."""
  folder = settings.get('folder')
  if not isinstance(folder, str) or not folder:
    raise UserError(f'{where}.folder={folder!r} must name the folder of a reward model.')
  try:
    _bare(folder)
  except UserError as error:
    raise UserError(f'{where}.folder: {str(error).replace("config.model=", "")}') from error


score.check = _check


def _plain(words: Any, text: str) -> str:
  """A reply without what it spells of special tokens: it must not end its turn and praise itself in another's."""
  while words.encode(text) != words.encode_plain(text):
    text = words.decode(words.encode(text))
  return text


_kept = functools.lru_cache(maxsize=1)(load)


@functools.partial(jax.jit, static_argnums=0)
def _rated(config: ModelConfig, params, head_D, tokens_BxS, length_B) -> jax.Array:
  B, S = tokens_BxS.shape
  positions_BxS = jnp.broadcast_to(jnp.arange(S), (B, S))
  mask_BxSxS = decoder.causal(positions_BxS < length_B[:, None])
  hidden_BxSxD, *_ = decoder.apply(config, params, tokens_BxS, positions_BxS, mask_BxSxS)
  last_BxD = jnp.take_along_axis(hidden_BxSxD, length_B[:, None, None] - 1, axis=1)[:, 0]
  return last_BxD @ head_D

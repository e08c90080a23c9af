"""Reward models as reward functions: a Hugging Face folder of a decoder with one score per conversation.

--config.rewards="{'fn': 'jaxrl_llm.models.reward_model:score', 'folder': 'FOLDER', 'batched': 'step'}"
`score` has the signature of TRL's reward functions. It runs in the grading workers on the host's CPU; with
config.mode='lag' it overlaps with the device's step. Each worker holds a copy of the weights: set one worker, memory_mb
for the float32 weights, and deadline_s and cpu_s for a whole step.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.models import decoder, export, huggingface, size_limits, tokenizer
from jaxrl_llm.types import Array, Model, ModelConfig, Params, Settings, UserError

_HEAD = 'score.weight'
_BATCH_ROWS = 8
_MIN_TOKENS = 32  # of a padded row


class RewardModel(NamedTuple):
  """A decoder with a linear head for one score in place of the language head."""

  config: ModelConfig
  params: Params
  head_D: np.ndarray
  tokenizer: tokenizer.Tokenizer


def load(folder: str) -> RewardModel:
  """Load a folder of …ForSequenceClassification with one label, of a family that config.model supports.

  Raises UserError for another architecture, several labels, and any problem of a model folder.
  """
  model = _load_without_params(folder)
  return model._replace(params=huggingface.load_params(folder, model.config, (_HEAD,)))


def _load_without_params(folder: str) -> RewardModel:
  """The reward model without the decoder's weights, which are slow to load."""
  if not os.path.isfile(os.path.join(folder, 'config.json')):
    raise UserError(
      f'{folder!r} is no reward model: no folder here has a config.json of that name; give a local folder of '
      '…ForSequenceClassification with one label.'
    )
  config, raw = huggingface.read_config(folder)
  architectures = raw.get('architectures') or ['none']
  if not str(architectures[0]).endswith('ForSequenceClassification'):
    raise UserError(
      f'{folder!r} holds {architectures[0]}, no reward model; give a folder of …ForSequenceClassification with one '
      'label.'
    )
  # Tied embeddings need no tensor for a language head, which a reward model lacks.
  config = dataclasses.replace(config, tied=True)
  size_limits.check_memory(config, repr(folder))
  head_1xD = huggingface.load_tensor(folder, _HEAD, (1, config.width))
  return RewardModel(config, {}, head_1xD[0], tokenizer.from_folder(folder, raw))


def save(
  folder: str,
  model: Model,
  head_D: np.ndarray,
  *,
  dtype: str,
  last_ids: Container[int] = (),
  card: str = '',
) -> None:
  """Write a decoder and its head for one score as a folder of …ForSequenceClassification, which `load` reads.

  `last_ids` are tokens with which conversations end. Raises UserError as `export.staged_folder` does.
  """
  raw = export.config_json(model, dtype)
  architecture = raw['architectures'][0].replace('ForCausalLM', 'ForSequenceClassification')
  # transformers reads the score at the last token that is no padding, or without a padding token at the last one, of
  # one conversation at a time. It counts labels by their names.
  pad = model.tokenizer.pad_id
  raw |= dict(architectures=[architecture], pad_token_id=None if pad in last_ids else pad)
  raw |= dict(id2label={'0': 'LABEL_0'}, label2id={'LABEL_0': 0})
  with export.staged_folder(folder, dtype, card) as part:
    export.write_json(part, 'config.json', raw)
    tensors = (*export.named_tensors(model), (_HEAD, np.asarray(head_D)[None]))
    export.write_weights(part, tensors, dtype)
    export.write_tokenizer(part, model)


def without_language_head(model: Model) -> Model:
  """The decoder of a reward model: tied embeddings need no tensor for a language head, which it lacks."""
  params = {name: part for name, part in model.params.items() if name != 'head'}
  return model._replace(config=dataclasses.replace(model.config, tied=True), params=params)


def score_token_ids(model: RewardModel, rows: Sequence[Sequence[int]]) -> list[float]:
  """w·h per row of token ids, with h the final hidden state of the row's last token, in float32.

  Raises ValueError for an empty row and for one longer than the model's context.
  """
  longest = max(map(len, rows), default=0)
  if longest > model.config.max_tokens or not all(map(len, rows)):
    raise ValueError(
      f'a conversation of {longest} tokens, where the reward model reads 1 to {model.config.max_tokens}'
    )
  scores: list[float] = []
  for start in range(0, len(rows), _BATCH_ROWS):
    batch = rows[start : start + _BATCH_ROWS]
    width = padded_tokens(batch)
    tokens_BxS = np.zeros((_BATCH_ROWS, width), np.int32)
    length_B = np.ones(_BATCH_ROWS, np.int32)
    for b, ids in enumerate(batch):
      tokens_BxS[b, : len(ids)], length_B[b] = ids, len(ids)
    score_B = _score_batch(model.config, model.params, model.head_D, tokens_BxS, length_B)
    scores += np.asarray(score_B)[: len(batch)].tolist()
  return scores


def padded_tokens(rows: Sequence[Sequence[int] | np.ndarray]) -> int:
  """The width that rows are padded to: a power of two, which compiles few shapes."""
  return max(_MIN_TOKENS, 2 ** math.ceil(math.log2(max(map(len, rows)))))


def score(prompts: Sequence[Any], completions: Sequence[Any], *, folder: str) -> list[float]:
  """The reward model's score of each conversation, with prompts and completions as messages or as text.

  Messages are rendered with the folder's chat template; texts are concatenated. Raises as `load` and
  `score_token_ids`.
  """
  model = _load_cached(folder)
  texts = [
    conversation(model.tokenizer, prompt, completion)
    for prompt, completion in zip(prompts, completions, strict=True)
  ]
  return score_token_ids(model, [model.tokenizer.encode(text) for text in texts])


def conversation(codec: tokenizer.Tokenizer, prompt: Any, completion: Any) -> str:
  """The text that is scored: both messages or both text; special tokens that the completion spells are removed."""
  if isinstance(completion, str):
    return prompt + _without_special_tokens(codec, completion)
  messages = [dict(m, content=_without_special_tokens(codec, m['content'])) for m in completion]
  return codec.chat([*prompt, *messages], add_generation_prompt=False)


def _check(settings: Settings, where: str) -> None:
  """Raise UserError for a bad folder when a run starts; its weights are checked by the grading workers."""
  folder = settings.get('folder')
  if not isinstance(folder, str) or not folder:
    raise UserError(f'{where}.folder={folder!r} must name the folder of a reward model.')
  try:
    _load_without_params(folder)
  except UserError as error:
    raise UserError(f'{where}.folder: {str(error).replace("config.model=", "")}') from error


score.check = _check


def _without_special_tokens(codec: tokenizer.Tokenizer, text: str) -> str:
  """The text without the special tokens that it spells.

  Otherwise a completion could end its turn and continue with a favorable turn of another role.
  """
  while codec.encode(text) != codec.encode_plain(text):
    text = codec.decode(codec.encode(text))
  return text


_load_cached = functools.lru_cache(maxsize=1)(load)


def scores(
  config: ModelConfig,
  params: Params,
  head_D: Array,
  tokens_BxS: Array,
  length_B: Array,
  *,
  dtype: str = 'float32',
  remat: bool = False,
  gather: Callable[[Params], Params] | None = None,
) -> jax.Array:
  """The scores [B] in float32 of rows padded on the right; `dtype`, `remat` and `gather` as for `decoder.apply`."""
  B, S = tokens_BxS.shape
  positions_BxS = jnp.broadcast_to(jnp.arange(S), (B, S))
  mask_BxSxS = decoder.causal(positions_BxS < length_B[:, None])
  hidden_BxSxD, *_ = decoder.apply(
    config,
    params,
    tokens_BxS,
    positions_BxS,
    mask_BxSxS,
    dtype=dtype,
    remat=remat,
    gather=gather,
  )
  last_BxD = jnp.take_along_axis(hidden_BxSxD, length_B[:, None, None] - 1, axis=1)[:, 0]
  return last_BxD.astype(jnp.float32) @ head_D


_score_batch = jax.jit(scores, static_argnums=0)

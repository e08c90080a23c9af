"""Hugging Face folders: config.json and safetensors to a ModelConfig and a parameter tree. Never pickle."""

from __future__ import annotations

import glob
import os
from typing import Any

import jax
import numpy as np
import safetensors

from jaxrl_llm.models import decoder, rotary
from jaxrl_llm.models.tokenizer import read_json
from jaxrl_llm.types import ModelConfig, UserError

FAMILIES = ('llama', 'mistral', 'qwen2', 'qwen3')

# Our path → theirs. Kernels are [in, out] here and [out, in] there.
_LAYER = {
  'attn_norm/scale': 'input_layernorm.weight',
  'mlp_norm/scale': 'post_attention_layernorm.weight',
  'q_norm/scale': 'self_attn.q_norm.weight',
  'k_norm/scale': 'self_attn.k_norm.weight',
  **{
    f'{n}/{k}': f'self_attn.{n}_proj.{t}'
    for n in 'qkvo'
    for k, t in (('kernel', 'weight'), ('bias', 'bias'))
  },
  **{
    f'{n}/{k}': f'mlp.{n}_proj.{t}'
    for n in ('gate', 'up', 'down')
    for k, t in (('kernel', 'weight'), ('bias', 'bias'))
  },
}
_OUTSIDE = {
  'embed/embedding': 'model.embed_tokens.weight',
  'norm/scale': 'model.norm.weight',
  'head/kernel': 'lm_head.weight',
}


def read_config(folder: str) -> tuple[ModelConfig, dict[str, Any]]:
  """config.json as a ModelConfig, and as it stands. Raises UserError for what is not supported.

  Source: none.
  """
  raw = read_json(folder, 'config.json')
  kind = raw.get('model_type')
  if kind not in FAMILIES:
    raise UserError(
      f'config.model={folder!r}: model_type {kind!r} is not supported; supported: {", ".join(FAMILIES)}.'
    )
  _refuse_windows(folder, raw)
  try:
    return _model_config(raw, kind), raw
  except KeyError as error:
    raise UserError(
      f'config.model={folder!r}: config.json lacks {error}; copy it again.'
    ) from error


def _model_config(raw: dict[str, Any], kind: str) -> ModelConfig:
  # transformers 5 writes rope_parameters, older ones rope_theta and rope_scaling.
  rope = dict(raw.get('rope_parameters') or raw.get('rope_scaling') or {})
  theta = rope.pop('rope_theta', None) or raw.get('rope_theta') or 10000.0
  heads = raw['num_attention_heads']
  llama = kind == 'llama'
  attention_bias = kind == 'qwen2' or bool(raw.get('attention_bias', False))
  config = ModelConfig(
    vocab=raw['vocab_size'],
    width=raw['hidden_size'],
    layers=raw['num_hidden_layers'],
    heads=heads,
    kv_heads=raw.get('num_key_value_heads') or heads,
    head_dim=raw.get('head_dim') or raw['hidden_size'] // heads,
    mlp=raw['intermediate_size'],
    max_tokens=raw['max_position_embeddings'],
    rope_theta=float(theta),
    rope_scaling=tuple(sorted((k, v) for k, v in rope.items() if not isinstance(v, dict | list))),
    norm_eps=raw.get('rms_norm_eps', 1e-6),
    qkv_bias=attention_bias,
    out_bias=attention_bias and kind in ('llama', 'qwen3'),
    mlp_bias=llama and bool(raw.get('mlp_bias', False)),
    qk_norm=kind == 'qwen3',
    tied=bool(raw.get('tie_word_embeddings', False)),
  )
  rotary.frequencies(config)
  return config


def _refuse_windows(folder: str, raw: dict[str, Any]) -> None:
  sliding = raw.get('model_type') == 'mistral' and raw.get('sliding_window')
  if sliding or raw.get('use_sliding_window'):
    raise UserError(
      f'config.model={folder!r}: sliding-window attention (sliding_window={raw.get("sliding_window")}) '
      'is not supported; choose a model with full attention.'
    )


def load_params(folder: str, config: ModelConfig) -> Any:
  """The parameter tree in float32 from *.safetensors of `folder`. Source: none.

  Raises UserError, naming tensor or file, when one is missing, of another shape, or truncated.
  """
  where = _index(folder)
  opened: dict[str, Any] = {}

  def read(path, wanted):
    ours = '/'.join(str(k.key) for k in path)
    theirs = their_name(ours)
    if theirs not in where:
      raise UserError(
        f'config.model={folder!r}: tensor {theirs!r} is missing from the weights; download them again.'
      )
    value = _tensor(opened, where[theirs], theirs)
    value = value.T if ours.endswith('kernel') else value
    if value.shape != wanted.shape:
      raise UserError(
        f'config.model={folder!r}: tensor {theirs!r} has shape {value.shape} where config.json asks for '
        f'{wanted.shape}; the files are of different models.'
      )
    return np.ascontiguousarray(value, np.float32)

  return jax.tree_util.tree_map_with_path(read, decoder.abstract_params(config))


def their_name(path: str) -> str:
  """'layers/3/q/kernel' → 'model.layers.3.self_attn.q_proj.weight'. Source: none."""
  if path in _OUTSIDE:
    return _OUTSIDE[path]
  _, layer, rest = path.split('/', 2)
  return f'model.layers.{layer}.{_LAYER[rest]}'


def _index(folder: str) -> dict[str, str]:
  """Tensor name → file."""
  files = sorted(glob.glob(os.path.join(folder, '*.safetensors')))
  shards = read_json(folder, 'model.safetensors.index.json').get('weight_map', {})
  missing = sorted({f for f in shards.values() if not os.path.exists(os.path.join(folder, f))})
  if missing:
    raise UserError(f'config.model={folder!r}: {missing[0]} is missing; download it again.')
  if shards:
    return {name: os.path.join(folder, file) for name, file in shards.items()}
  if not files:
    pickled = glob.glob(os.path.join(folder, '*.bin')) + glob.glob(os.path.join(folder, '*.pt'))
    told = (
      'only pickled weights, which are never loaded' if pickled else 'no weights (*.safetensors)'
    )
    raise UserError(f'config.model={folder!r} holds {told}; save the model as safetensors.')
  return {name: file for file in files for name in _open(file).keys()}


def _tensor(opened: dict[str, Any], file: str, name: str) -> np.ndarray:
  if file not in opened:
    opened[file] = _open(file)
  try:
    return opened[file].get_tensor(name)
  except Exception as error:  # the library raises its own and bare ones
    raise UserError(
      f'config.model: tensor {name!r} cannot be read from {file} ({error}).'
    ) from error


def _open(file: str):
  try:
    # 'flax' and not 'numpy': numpy has no bfloat16.
    return safetensors.safe_open(file, framework='flax')
  except Exception as error:
    raise UserError(
      f'config.model: {file} is truncated or not a safetensors file ({error}); download it again.'
    ) from error

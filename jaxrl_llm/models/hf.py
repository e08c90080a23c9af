"""Hugging Face folders: config.json and safetensors to a ModelConfig and a parameter tree. Never pickle."""

from __future__ import annotations

import glob
import os
from typing import Any

import jax
import numpy as np
import safetensors

from jaxrl_llm.models import decoder, sizes
from jaxrl_llm.models.folder import locate, read_json
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
  return _model_config(raw, kind, f'config.model={folder!r}: config.json'), raw


def _model_config(raw: dict[str, Any], kind: str, where: str) -> ModelConfig:
  def size(name: str, default: int | None = None) -> int:
    told = raw.get(name)
    if told is None and default is None:
      raise UserError(f'{where} lacks {name!r}; copy it again.')
    return sizes.whole(default if told is None else told, f'{where}: {name}')

  # transformers 5 writes rope_parameters, older ones rope_theta and rope_scaling.
  rope = raw.get('rope_parameters') or raw.get('rope_scaling') or {}
  if not isinstance(rope, dict):
    raise UserError(f'{where}: rope_scaling={rope!r} must be an object; copy it again.')
  theta = rope.get('rope_theta') or raw.get('rope_theta') or 10000.0
  plain = {k: v for k, v in rope.items() if not isinstance(v, dict | list) and k != 'rope_theta'}
  heads, width = size('num_attention_heads'), size('hidden_size')
  llama = kind == 'llama'
  attention_bias = kind == 'qwen2' or bool(raw.get('attention_bias', False))
  config = ModelConfig(
    vocab=size('vocab_size'),
    width=width,
    layers=size('num_hidden_layers'),
    heads=heads,
    kv_heads=size('num_key_value_heads', heads),
    head_dim=size('head_dim', width // heads),
    mlp=size('intermediate_size'),
    max_tokens=size('max_position_embeddings'),
    rope_theta=sizes.number(theta, f'{where}: rope_theta'),
    rope_scaling=tuple(sorted(plain.items())),
    norm_eps=sizes.number(raw.get('rms_norm_eps', 1e-6), f'{where}: rms_norm_eps'),
    qkv_bias=attention_bias,
    out_bias=attention_bias and kind in ('llama', 'qwen3'),
    mlp_bias=llama and bool(raw.get('mlp_bias', False)),
    qk_norm=kind == 'qwen3',
    tied=bool(raw.get('tie_word_embeddings', False)),
  )
  return sizes.checked(config, where)


def _refuse_windows(folder: str, raw: dict[str, Any]) -> None:
  sliding = raw.get('model_type') == 'mistral' and raw.get('sliding_window')
  if sliding or raw.get('use_sliding_window'):
    raise UserError(
      f'config.model={folder!r}: sliding-window attention (sliding_window={raw.get("sliding_window")}) '
      'is not supported; choose a model with full attention.'
    )


def load_params(folder: str, config: ModelConfig) -> Any:
  """The parameter tree in float32 from *.safetensors of `folder`. Source: none.

  Raises UserError, naming tensor or file, when one is missing or too many, of another shape or type, not finite, or
  truncated. A finite number that is wrong cannot be told: the format has no checksum.
  """
  where = _index(folder)
  opened: dict[str, Any] = {}
  read: set[str] = set()

  def load(path, wanted):
    ours = '/'.join(str(k.key) for k in path)
    theirs = their_name(ours)
    if theirs not in where:
      raise UserError(
        f'config.model={folder!r}: tensor {theirs!r} is missing from the weights; download them again.'
      )
    read.add(theirs)
    kernel = ours.endswith('kernel')
    shape = wanted.shape[::-1] if kernel else wanted.shape
    value = _tensor(opened, where[theirs], theirs, shape)
    return np.ascontiguousarray(value.T if kernel else value, np.float32)

  params = jax.tree_util.tree_map_with_path(load, decoder.abstract_params(config))
  extra = sorted(name for name in where.keys() - read if not name.endswith(_UNUSED))
  if extra:
    raise UserError(
      f'config.model={folder!r}: the weights hold {extra[0]!r} ({len(extra)} such), which config.json does not ask '
      'for; the files are of different models.'
    )
  return params


# What older files hold beside the weights: a head that is the embedding, and a table made of config.json.
_UNUSED = ('lm_head.weight', 'rotary_emb.inv_freq')


def their_name(path: str) -> str:
  """'layers/3/q/kernel' → 'model.layers.3.self_attn.q_proj.weight'. Source: none."""
  if path in _OUTSIDE:
    return _OUTSIDE[path]
  _, layer, rest = path.split('/', 2)
  return f'model.layers.{layer}.{_LAYER[rest]}'


def _index(folder: str) -> dict[str, str]:
  """Tensor name → file."""
  index = read_json(folder, 'model.safetensors.index.json')
  shards = index.get('weight_map', {})
  if not isinstance(shards, dict) or (index and not shards):
    raise UserError(
      f'config.model={folder!r}: model.safetensors.index.json has no weight_map; download it again.'
    )
  if shards:
    files = {file: locate(folder, file) for file in sorted(set(map(str, shards.values())))}
    for file, path in files.items():
      if not file.endswith('.safetensors'):
        raise UserError(
          f'config.model={folder!r}: model.safetensors.index.json names {file!r}, which is no safetensors file; '
          'save the model as safetensors.'
        )
      if not os.path.exists(path):
        raise UserError(f'config.model={folder!r}: {file} is missing; download it again.')
    return {name: files[str(file)] for name, file in shards.items()}
  names = sorted(
    map(os.path.basename, glob.glob(os.path.join(glob.escape(folder), '*.safetensors')))
  )
  if 'model.safetensors' in names:
    names = ['model.safetensors']
  if not names:
    held = os.listdir(folder)
    pickled = any(name.endswith(('.bin', '.pt', '.pth', '.ckpt', '.pkl')) for name in held)
    told = (
      'only pickled weights, which are never loaded' if pickled else 'no weights (*.safetensors)'
    )
    raise UserError(f'config.model={folder!r} holds {told}; save the model as safetensors.')
  files = [locate(folder, name) for name in names]
  return {name: file for file in files for name in _open(file).keys()}


_FLOATS = ('F64', 'F32', 'F16', 'BF16')


def _tensor(opened: dict[str, Any], file: str, name: str, shape: tuple[int, ...]) -> np.ndarray:
  """The tensor as it is stored. Its shape and type are looked at before anything is read."""
  if file not in opened:
    opened[file] = _open(file)
  try:
    stored = opened[file].get_slice(name)
    found, kind = tuple(stored.get_shape()), stored.get_dtype()
    value = opened[file].get_tensor(name) if found == shape and kind in _FLOATS else None
  except Exception as error:  # the library raises its own and bare ones
    raise UserError(
      f'config.model: tensor {name!r} cannot be read from {file} ({error}); download it again.'
    ) from error
  where = f'config.model={os.path.dirname(file)!r}: tensor {name!r}'
  if found != shape:
    raise UserError(
      f'{where} has shape {found} where config.json asks for {shape}; the files are of different models.'
    )
  if kind not in _FLOATS:
    raise UserError(f'{where} is of type {kind}; save the weights as one of {", ".join(_FLOATS)}.')
  if not np.isfinite(value).all():
    raise UserError(f'{where} holds what is no finite number; download {file} again.')
  return value


def _open(file: str):
  try:
    # 'flax' and not 'numpy': numpy has no bfloat16.
    return safetensors.safe_open(file, framework='flax')
  except Exception as error:
    raise UserError(
      f'config.model: {file} is truncated or not a safetensors file ({error}); download it again.'
    ) from error

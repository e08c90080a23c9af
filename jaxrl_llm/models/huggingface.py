"""Hugging Face folders: config.json and safetensors to a ModelConfig and a parameter tree. Pickle is never loaded."""

from __future__ import annotations

import glob
import os
import re

import jax
import numpy as np
import safetensors

from jaxrl_llm.checkpointing import safe_files
from jaxrl_llm.models import decoder, families
from jaxrl_llm.models.model_folder import locate, read_json
from jaxrl_llm.types import JsonObject, ModelConfig, Params, UserError

# Path within a layer → Hugging Face's name. Kernels are [in, out] in our trees and [out, in] in these files.
_LAYER = {
  'q_norm/scale': 'self_attn.q_norm.weight',
  'k_norm/scale': 'self_attn.k_norm.weight',
  'experts/router/kernel': 'mlp.gate.weight',
  **{f'experts/{n}/kernel': f'mlp.experts.{{}}.{n}_proj.weight' for n in ('gate', 'up', 'down')},
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
# By ModelConfig.norms. With 'before', Hugging Face names the norm in front of the MLP 'post_attention'.
_NORMS = {
  'before': dict(attn_norm='input', mlp_norm='post_attention'),
  'after': dict(attn_post_norm='post_attention', mlp_post_norm='post_feedforward'),
  'both': dict(
    attn_norm='input',
    attn_post_norm='post_attention',
    mlp_norm='pre_feedforward',
    mlp_post_norm='post_feedforward',
  ),
}
_OUTSIDE_LAYERS = {
  'embed/embedding': 'model.embed_tokens.weight',
  'norm/scale': 'model.norm.weight',
  'head/kernel': 'lm_head.weight',
}


# Safetensors files by path, opened once.
OpenFiles = dict[str, safetensors.safe_open]

_FLOATS = ('F64', 'F32', 'F16', 'BF16')
# Tensors of older files that are not needed: a head tied to the embedding, and a table derived from config.json.
_UNUSED = ('lm_head.weight', 'rotary_emb.inv_freq')
# Of the text decoder in multimodal files; transformers has used both spellings.
_PREFIX = re.compile(r'^language_model\.(?=model\.|lm_head\.)|(?<=^model\.)language_model\.')
_VISION_PARTS = ('vision_tower.', 'multi_modal_projector.')


def read_config(folder: str) -> tuple[ModelConfig, JsonObject]:
  """config.json as a ModelConfig, and as parsed JSON. Raises UserError for unsupported models."""
  raw = read_json(folder, 'config.json')
  return families.read(raw, f'config.model={folder!r}'), raw


def load_params(folder: str, config: ModelConfig, ignored: tuple[str, ...] = ()) -> Params:
  """The parameter tree in float32 from the *.safetensors of `folder`; `ignored` tensors may exist and are not read.

  Raises UserError that names the tensor or file, for tensors that are missing, unexpected, of another shape or type,
  not finite, or truncated. Wrong finite numbers are not detected: the format has no checksum.
  """
  locations = _decoder_locations(_index(folder), config)
  opened: OpenFiles = {}
  read: set[str] = set()

  def read_one(name: str, shape: tuple[int, ...], transposed: bool) -> np.ndarray:
    if name not in locations:
      raise UserError(
        f'config.model={folder!r}: tensor {name!r} is missing from the weights; download them again.'
      )
    read.add(name)
    value = read_tensor(opened, *locations[name], shape[::-1] if transposed else shape)
    return np.ascontiguousarray(value.T if transposed else value, np.float32)

  def load(tree_path, expected):
    path = '/'.join(str(k.key) for k in tree_path)
    name, transposed = hugging_face_name(path, config), path.endswith('kernel')
    if '{}' in name:
      count, *shape = expected.shape
      return np.stack([read_one(name.format(e), tuple(shape), transposed) for e in range(count)])
    value = read_one(name, expected.shape, transposed)
    return value + families.norm_offset(config) if path.endswith('scale') else value

  params = jax.tree_util.tree_map_with_path(load, decoder.abstract_params(config))
  extra = locations.keys() - read - set(ignored)
  extra = sorted(name for name in extra if not name.endswith(_UNUSED))
  if extra:
    raise UserError(
      f'config.model={folder!r}: the weights hold {extra[0]!r} ({len(extra)} such), which config.json does not '
      'describe; the files are of different models.'
    )
  return params


def load_tensor(folder: str, name: str, shape: tuple[int, ...]) -> np.ndarray:
  """One tensor in float32, in the file's layout. Raises UserError if it is missing or has another shape or type."""
  files = _index(folder)
  if name not in files:
    raise UserError(f'config.model={folder!r}: tensor {name!r} is missing from the weights.')
  return np.asarray(read_tensor({}, files[name], name, shape), np.float32)


def hugging_face_name(path: str, config: ModelConfig) -> str:
  """'layers/3/q/kernel' → 'model.layers.3.self_attn.q_proj.weight'; names of experts have {} for the index."""
  if path in _OUTSIDE_LAYERS:
    return _OUTSIDE_LAYERS[path]
  _, layer, rest = path.split('/', 2)
  norm = _NORMS[config.norms].get(rest.removesuffix('/scale'))
  return f'model.layers.{layer}.' + (f'{norm}_layernorm.weight' if norm else _LAYER[rest])


def _decoder_locations(files: dict[str, str], config: ModelConfig) -> dict[str, tuple[str, str]]:
  """Name in a text-only model → (file, name in the file). Multimodal Gemma 3 prefixes its decoder's names."""
  locations = {name: (file, name) for name, file in files.items()}
  if config.family != 'gemma3':
    return locations
  return {
    _PREFIX.sub('', name): location
    for name, location in locations.items()
    if not any(part in name for part in _VISION_PARTS)
  }


def _index(folder: str) -> dict[str, str]:
  """Tensor name → file."""
  index = read_json(folder, 'model.safetensors.index.json')
  weight_map = index.get('weight_map', {})
  if not isinstance(weight_map, dict) or (index and not weight_map):
    raise UserError(
      f'config.model={folder!r}: model.safetensors.index.json has no weight_map; download it again.'
    )
  if weight_map:
    return _indexed_files(folder, weight_map)
  names = sorted(
    map(os.path.basename, glob.glob(os.path.join(glob.escape(folder), '*.safetensors')))
  )
  if 'model.safetensors' in names:
    names = ['model.safetensors']
  if not names:
    suffixes = ('.bin', '.pt', '.pth', '.ckpt', '.pkl')
    has_pickle = any(name.endswith(suffixes) for name in os.listdir(folder))
    content = (
      'only pickled weights, which are never loaded' if has_pickle else 'no weights (*.safetensors)'
    )
    raise UserError(f'config.model={folder!r} holds {content}; save the model as safetensors.')
  files = [locate(folder, name) for name in names]
  return {name: file for file in files for name in open_file(file).keys()}


def _indexed_files(folder: str, weight_map: JsonObject) -> dict[str, str]:
  paths = {file: locate(folder, file) for file in sorted(set(map(str, weight_map.values())))}
  for file, path in paths.items():
    if not file.endswith('.safetensors'):
      raise UserError(
        f'config.model={folder!r}: model.safetensors.index.json names {file!r}, which is no safetensors file; '
        'save the model as safetensors.'
      )
    if not os.path.exists(path):
      raise UserError(f'config.model={folder!r}: {file} is missing; download it again.')
  return {name: paths[str(file)] for name, file in weight_map.items()}


def read_tensor(opened: OpenFiles, file: str, name: str, shape: tuple[int, ...]) -> np.ndarray:
  """The tensor `name` in the file's layout and dtype. Opens `file` unless it is in `opened`, and adds it there.

  Shape and dtype are checked before data is read. Raises UserError for others, and for unreadable or infinite values.
  """
  if file not in opened:
    opened[file] = open_file(file)
  try:
    stored = opened[file].get_slice(name)
    stored_shape, dtype = tuple(stored.get_shape()), stored.get_dtype()
    is_valid = stored_shape == shape and dtype in _FLOATS
    value = opened[file].get_tensor(name) if is_valid else None
  except Exception as error:  # the library raises its own exceptions and bare ones
    raise UserError(
      f'config.model: tensor {name!r} cannot be read from {file} ({error}); download it again.'
    ) from error
  where = f'config.model={os.path.dirname(file)!r}: tensor {name!r}'
  if stored_shape != shape:
    raise UserError(
      f'{where} has shape {stored_shape} where config.json requires {shape}; the files are of different models.'
    )
  if dtype not in _FLOATS:
    raise UserError(f'{where} is of type {dtype}; save the weights as one of {", ".join(_FLOATS)}.')
  if not np.isfinite(value).all():
    raise UserError(f'{where} contains a number that is not finite; download {file} again.')
  return value


def open_file(file: str) -> safetensors.safe_open:
  """Open a safetensors file without reading tensors. Raises UserError for any other file."""
  if kind := safe_files.kind(file):
    raise UserError(f'config.model: {file} is {kind}, not a file; copy it again.')
  try:
    # 'flax' and not 'numpy': numpy has no bfloat16.
    return safe_files.retry(safetensors.safe_open, file, framework='flax')
  except Exception as error:
    raise UserError(
      f'config.model: {file} is truncated or not a safetensors file ({error}); download it again.'
    ) from error

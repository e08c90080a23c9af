"""Hugging Face folders: config.json and safetensors to a ModelConfig and a parameter tree. Never pickle."""

from __future__ import annotations

import glob
import os
import re
from typing import Any

import jax
import numpy as np
import safetensors

from jaxrl_llm.checkpointing import safe_files
from jaxrl_llm.models import decoder, families
from jaxrl_llm.models.model_folder import locate, read_json
from jaxrl_llm.types import ModelConfig, UserError

# Our path → theirs. Kernels are [in, out] here and [out, in] there.
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
# By ModelConfig.norms. 'post_attention' is in front of the MLP where nothing norms what attention adds.
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
  return families.read(raw, f'config.model={folder!r}'), raw


def load_params(folder: str, config: ModelConfig, beside: tuple[str, ...] = ()) -> Any:
  """The parameter tree in float32 from *.safetensors of `folder`; `beside` are tensors of no decoder. Source: none.

  Raises UserError, naming tensor or file, when one is missing or too many, of another shape or type, not finite, or
  truncated. A finite number that is wrong cannot be told: the format has no checksum.
  """
  where = _text_only(_index(folder), config)
  opened: dict[str, Any] = {}
  read: set[str] = set()

  def one(theirs: str, shape: tuple[int, ...], turned: bool) -> np.ndarray:
    if theirs not in where:
      raise UserError(
        f'config.model={folder!r}: tensor {theirs!r} is missing from the weights; download them again.'
      )
    read.add(theirs)
    file, name = where[theirs]
    value = read_tensor(opened, file, name, shape[::-1] if turned else shape)
    return np.ascontiguousarray(value.T if turned else value, np.float32)

  def load(path, wanted):
    ours = '/'.join(str(k.key) for k in path)
    theirs, turned = hugging_face_name(ours, config), ours.endswith('kernel')
    if '{}' in theirs:
      each = (one(theirs.format(e), wanted.shape[1:], turned) for e in range(wanted.shape[0]))
      return np.stack(list(each))
    value = one(theirs, wanted.shape, turned)
    return value + families.norm_offset(config) if ours.endswith('scale') else value

  params = jax.tree_util.tree_map_with_path(load, decoder.abstract_params(config))
  extra = where.keys() - read - set(beside)
  extra = sorted(name for name in extra if not name.endswith(_UNUSED))
  if extra:
    raise UserError(
      f'config.model={folder!r}: the weights hold {extra[0]!r} ({len(extra)} such), which config.json does not ask '
      'for; the files are of different models.'
    )
  return params


def load_tensor(folder: str, name: str, shape: tuple[int, ...]) -> np.ndarray:
  """One tensor in float32 as it is stored. Raises UserError where it is missing or another. Source: none."""
  where = _index(folder)
  if name not in where:
    raise UserError(f'config.model={folder!r}: tensor {name!r} is missing from the weights.')
  return np.asarray(read_tensor({}, where[name], name, shape), np.float32)


# What older files hold beside the weights: a head that is the embedding, and a table made of config.json.
_UNUSED = ('lm_head.weight', 'rotary_emb.inv_freq')


def hugging_face_name(path: str, config: ModelConfig) -> str:
  """'layers/3/q/kernel' → 'model.layers.3.self_attn.q_proj.weight'; of experts, with {} for which. Source: none."""
  if path in _OUTSIDE:
    return _OUTSIDE[path]
  _, layer, rest = path.split('/', 2)
  norm = _NORMS[config.norms].get(rest.removesuffix('/scale'))
  return f'model.layers.{layer}.' + (f'{norm}_layernorm.weight' if norm else _LAYER[rest])


def _text_only(where: dict[str, str], config: ModelConfig) -> dict[str, tuple[str, str]]:
  """Name in a model of text alone → (file, name there). Gemma 3 with eyes keeps its decoder under another name."""
  found = {name: (file, name) for name, file in where.items()}
  if config.family != 'gemma3':
    return found
  seen = ('vision_tower.', 'multi_modal_projector.')
  text = {n: at for n, at in found.items() if not any(part in n for part in seen)}
  return {_PREFIX.sub('', name): at for name, at in text.items()}


# Both spellings that transformers has used.
_PREFIX = re.compile(r'^language_model\.(?=model\.|lm_head\.)|(?<=^model\.)language_model\.')


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
  return {name: file for file in files for name in open_file(file).keys()}


_FLOATS = ('F64', 'F32', 'F16', 'BF16')


def read_tensor(opened: dict[str, Any], file: str, name: str, shape: tuple[int, ...]) -> np.ndarray:
  """The tensor as it is stored, of a file that is kept in `opened`. Raises UserError where it is another.

  Shape and type are looked at before anything is read. Source: none.
  """
  if file not in opened:
    opened[file] = open_file(file)
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


def open_file(file: str) -> Any:
  """A safetensors file, of which nothing is read yet. Raises UserError where it is none. Source: none."""
  if found := safe_files.kind(file):
    raise UserError(f'config.model: {file} is {found}, not a file; copy it again.')
  try:
    # 'flax' and not 'numpy': numpy has no bfloat16.
    return safe_files.retry(safetensors.safe_open, file, framework='flax')
  except Exception as error:
    raise UserError(
      f'config.model: {file} is truncated or not a safetensors file ({error}); download it again.'
    ) from error

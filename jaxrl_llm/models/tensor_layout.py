"""Names and layouts of a model's tensors in Hugging Face's files."""

from __future__ import annotations

import re
from typing import NamedTuple

import jax
import numpy as np

from jaxrl_llm.models import decoder, families
from jaxrl_llm.types import ModelConfig

# Path within a layer → Hugging Face's name.
_LAYER = {
  'layer_scale/value': 'layer_scalar',
  'q_norm/scale': 'self_attn.q_norm.weight',
  'k_norm/scale': 'self_attn.k_norm.weight',
  'q_a_norm/scale': 'self_attn.q_a_layernorm.weight',
  'kv_a_norm/scale': 'self_attn.kv_a_layernorm.weight',
  'experts/router/kernel': 'mlp.gate.weight',
  **{f'experts/{n}/kernel': f'mlp.experts.{{}}.{n}_proj.weight' for n in ('gate', 'up', 'down')},
  **{
    f'{n}/{k}': f'self_attn.{n}_proj.{t}'
    for n in (*'qkvo', 'q_a', 'q_b', 'kv_b')
    for k, t in (('kernel', 'weight'), ('bias', 'bias'))
  },
  'kv_a/kernel': 'self_attn.kv_a_proj_with_mqa.weight',
  'kv_a/bias': 'self_attn.kv_a_proj_with_mqa.bias',
  'delta/taps': 'linear_attn.conv1d.weight',
  'delta/log_rate': 'linear_attn.A_log',
  'delta/rate_bias': 'linear_attn.dt_bias',
  'delta/gain': 'linear_attn.norm.weight',
  'delta_out/kernel': 'linear_attn.out_proj.weight',
  **{
    f'{n}/{k}': f'mlp.{n}_proj.{t}'
    for n in ('gate', 'up', 'down')
    for k, t in (('kernel', 'weight'), ('bias', 'bias'))
  },
}
_OF_LAYER = r'^model\.layers\.\d+\.'
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
  'layer_embed/embedding': 'model.embed_tokens_per_layer.weight',
  'layer_proj/kernel': 'model.per_layer_model_projection.weight',
  'layer_proj_norm/scale': 'model.per_layer_projection_norm.weight',
}


class StoredTensor(NamedTuple):
  """One tensor of the files, and the parameters that it holds."""

  name: str  # {} stands for the number of an expert
  paths: tuple[str, ...]  # of the parameters, in the order in which they are stored
  shapes: tuple[tuple[int, ...], ...]  # in our tree, where kernels are [in, out]
  # Blocks of columns, each of which holds a part of every parameter, one after the other: gate and up of gpt-oss
  # alternate column by column.
  blocks: int = 1
  transposed: bool = False  # matrices of torch's linear layers are stored as [out, in]

  @property
  def experts(self) -> int:
    """The number of experts with a tensor each; 0 = one tensor."""
    return self.shapes[0][0] if '{}' in self.name else 0

  @property
  def shape(self) -> tuple[int, ...]:
    """The shape in the file, of one expert where each has a tensor."""
    *head, last = self.shapes[0]
    shape = (*head, sum(shape[-1] for shape in self.shapes) if len(self.shapes) > 1 else last)
    shape = shape[1:] if self.experts else shape
    return (*shape[:-2], shape[-1], shape[-2]) if self.transposed else shape

  def split(self, value: np.ndarray) -> dict[str, np.ndarray]:
    """Path → parameter, of a tensor in the file's layout with all experts stacked."""
    value = value.swapaxes(-1, -2) if self.transposed else value
    if len(self.paths) == 1:
      return {self.paths[0]: value}
    value = value.reshape(*value.shape[:-1], self.blocks, -1)
    ends = np.cumsum([shape[-1] // self.blocks for shape in self.shapes])[:-1]
    parts = [x.reshape(*x.shape[:-2], -1) for x in np.split(value, ends, axis=-1)]
    return dict(zip(self.paths, parts, strict=True))

  def join(self, parts: list[np.ndarray]) -> np.ndarray:
    """The tensor in the file's layout, with all experts stacked."""
    value = parts[0]
    if len(parts) > 1:
      blocks = [x.reshape(*x.shape[:-1], self.blocks, -1) for x in parts]
      value = np.concatenate(blocks, axis=-1).reshape(*value.shape[:-1], -1)
    return value.swapaxes(-1, -2) if self.transposed else value


def stored_tensors(config: ModelConfig) -> list[StoredTensor]:
  """All tensors of a model."""
  groups: dict[str, dict[str, tuple[int, ...]]] = {}
  for tree_path, leaf in jax.tree_util.tree_leaves_with_path(decoder.abstract_params(config)):
    path = '/'.join(str(k.key) for k in tree_path)
    groups.setdefault(hugging_face_name(path, config), {})[path] = leaf.shape
  family = families.FAMILIES[config.family]
  order = list(family.names)
  rank = lambda path: order.index(path.split('/', 2)[2])  # noqa: E731
  tensors = []
  for name, shapes in groups.items():
    paths = tuple(sorted(shapes, key=rank) if len(shapes) > 1 else shapes)
    in_layer = re.sub(_OF_LAYER, '', name)
    is_transposed = name.endswith('.weight') or in_layer in family.transposed
    tensors.append(
      StoredTensor(
        name,
        paths,
        tuple(shapes[path] for path in paths),
        blocks=getattr(config, family.blocks.get(in_layer, ''), 1),
        transposed=paths[0].endswith('kernel') and is_transposed,
      )
    )
  return tensors


def hugging_face_name(path: str, config: ModelConfig) -> str:
  """'layers/3/q/kernel' → 'model.layers.3.self_attn.q_proj.weight'; names of experts have {} for the index."""
  if path in _OUTSIDE_LAYERS:
    return _OUTSIDE_LAYERS[path]
  _, layer, rest = path.split('/', 2)
  norm = _NORMS[config.norms].get(rest.removesuffix('/scale'))
  names = _LAYER | families.FAMILIES[config.family].names
  return f'model.layers.{layer}.' + (f'{norm}_layernorm.weight' if norm else names[rest])


def joined_names(config: ModelConfig) -> set[str]:
  """Matrices of a layer that share one tensor of the files with others: q, k, v, gate and up of Phi-3."""
  names = families.FAMILIES[config.family].names
  shared = [name for name in names.values() if [*names.values()].count(name) > 1]
  return {path.removesuffix('/kernel') for path, name in names.items() if name in shared}

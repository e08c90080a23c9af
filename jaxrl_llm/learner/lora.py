"""LoRA: a trained product of two thin matrices beside each frozen matrix. arXiv:2106.09685 (LoRA).

Per weight the state holds 2 bytes instead of 16 (float32 weight, gradient and two moments), and the backward pass
needs no ∂W, a third of its FLOPs. The adapter costs (D + F)·r / (D·F) of the layer's FLOPs.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.config.schema import LoraConfig
from jaxrl_llm.models import blockwise, decoder
from jaxrl_llm.types import ModelConfig, Params, UserError


class LoraSettings(NamedTuple):
  """The shape of an adapter, fixed when a step is compiled."""

  rank: int  # r
  alpha: float  # the product is scaled by alpha / r
  names: tuple[str, ...]  # matrices of a layer that have an adapter
  base_dtype: str = 'auto'  # of the frozen kernels: auto (that of compute), int8 or nf4


def settings(config: LoraConfig, model: ModelConfig) -> LoraSettings | None:
  """Settings by `config.lora`; None for rank 0. Raises UserError for matrices that cannot have an adapter."""
  if not config.rank:
    return None
  if config.rank > model.width:
    raise UserError(
      f'config.lora.rank={config.rank} must be at most the width of the model, {model.width}; 16 is a good start.'
    )
  layers = [*decoder.abstract_params(model)['layers'].values()]
  expert_names = sorted({f'experts/{n}' for layer in layers for n in layer.get('experts', ())})
  # A loop over layers requires that all have the same adapters. Routers stay as they are.
  common = set.intersection(*({n for n, part in x.items() if 'kernel' in part} for x in layers))
  dense_names = [n for n in layers[0] if n in common and not n.endswith('router')]
  matches = [name for name in dense_names + expert_names if re.search(config.targets, name)]
  flag = f'config.lora.targets={config.targets!r}'
  for name in matches:
    if name in expert_names:
      attention = sorted(
        (n for n in dense_names if n[0] in 'qkvo'), key=lambda n: 'qkvo'.index(n[0])
      )
      # Attention is not common to all layers where some are recurrent.
      others = ('of attention', attention) if attention else ('outside experts', dense_names)
      raise UserError(
        f'{flag} matches {name!r} of a mixture of experts, which takes no adapter; name the matrices {others[0]} '
        f'alone: ^({"|".join(others[1])})$.'
      )
  if not matches:
    raise UserError(
      f'{flag} matches no matrix of a layer; change it to match some of: {", ".join(dense_names)}.'
    )
  return LoraSettings(config.rank, config.alpha, tuple(matches), config.base_dtype)


def init(settings: LoraSettings, params: Params, seed: int) -> Params:
  """A new adapter {'layers': {0: {'q': {'a': A, 'b': B}, …}, …}}: A ~ N(0, 1/D), B = 0, both float32.

  Seed and path key each A, so that it does not depend on which other matrices have an adapter.
  """

  def pair(path: str, kernel: jax.Array) -> dict[str, jax.Array]:
    D, F = kernel.shape
    key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(path.encode()))
    a_Dxr = jax.random.normal(key, (D, settings.rank)) / jnp.sqrt(D)
    return dict(a=a_Dxr, b=jnp.zeros((settings.rank, F)))

  layers = {
    i: {name: pair(f'layers/{i}/{name}', layer[name]['kernel']) for name in settings.names}
    for i, layer in params['layers'].items()
  }
  return dict(layers=layers)


def freeze(params: Params, dtype: str) -> Params:
  """The base: matrices in the type of compute, everything else unchanged."""
  return jax.tree.map(lambda x: x.astype(jnp.dtype(dtype)) if x.ndim > 1 else x, params)


def join(base: Params, adapter: Params, alpha: float) -> Params:
  """One tree for `decoder.apply`, which computes x·W + (x·A)·(alpha/r·B). No matrix of W's size is created."""
  return _combine(base, adapter, lambda part, a, b: part | dict(a=a, b=alpha / a.shape[1] * b))


def merge(base: Params, adapter: Params, alpha: float) -> Params:
  """The same function as a tree without adapters: W + alpha/r · A·B, in float32."""

  def merge_matrix(part, a, b):
    return part | dict(
      kernel=part['kernel'] + alpha / a.shape[1] * jnp.matmul(a, b, precision='highest')
    )

  unpack = lambda x: blockwise.dequantize(x) if blockwise.is_blockwise(x) else x  # noqa: E731
  base = jax.tree.map(unpack, base, is_leaf=blockwise.is_blockwise)
  return _combine(base, adapter, merge_matrix)


def for_sampling(base: Params, adapter: Params, settings: LoraSettings, dtype: str) -> Params:
  """Weights to sample with: merged in float32, which decodes faster, else joined; a quantized base is only joined.

  A bfloat16 kernel loses what is below half of its last digit. A merged new adapter would vanish, and the sampler
  would differ from the policy that is trained.
  """
  merges = dtype == 'float32' and settings.base_dtype == 'auto'
  return (merge if merges else join)(base, adapter, settings.alpha)


def _combine(base: Params, adapter: Params, combine: Callable) -> Params:
  """The base with `combine(part, a, b)` in place of each part that has an adapter."""
  layers = {
    i: layer | {name: combine(layer[name], **ab) for name, ab in adapter['layers'][i].items()}
    for i, layer in base['layers'].items()
  }
  return base | dict(layers=layers)

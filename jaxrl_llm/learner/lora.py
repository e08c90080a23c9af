"""LoRA: beside each frozen matrix a product of two thin ones, and these alone are trained.

What is saved, by count: weights of 2 bytes instead of 16 in the state (float32 weights, gradient and two moments), and
in the backward pass no ∂W, a third of its FLOPs. What it costs: x·A and B, (D + F)·r / (D·F) of the layer.
"""

from __future__ import annotations

import re
import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.models import decoder
from jaxrl_llm.types import ModelConfig, UserError


class Settings(NamedTuple):
  """What of an adapter is fixed when a step is compiled."""

  rank: int  # r
  alpha: float  # the product counts alpha / r
  names: tuple[str, ...]  # of a layer's matrices, those that have one


def settings(config: Any, model: ModelConfig) -> Settings | None:
  """Reads `config.lora`; None where all weights are trained. Raises UserError for matrices that cannot have one.

  Source: arXiv:2106.09685 (LoRA).
  """
  if not config.rank:
    return None
  if config.rank > model.width:
    raise UserError(
      f'config.lora.rank={config.rank} must be at most the width of the model, {model.width}; 16 is a good start.'
    )
  layer = decoder.abstract_params(model)['layers'][0]
  inside = [f'experts/{name}' for name in layer.get('experts', ())]
  dense = [name for name, part in layer.items() if 'kernel' in part]
  found = [name for name in dense + inside if re.search(config.targets, name)]
  asks = f'config.lora.targets={config.targets!r}'
  for name in found:
    if name in inside:
      raise UserError(
        f'{asks} matches {name!r} of a mixture of experts, which takes no adapter; name the matrices of attention '
        'alone: ^(q|k|v|o)$.'
      )
  if not found:
    raise UserError(
      f'{asks} matches no matrix of a layer; change it to match some of: {", ".join(dense)}.'
    )
  return Settings(config.rank, config.alpha, tuple(found))


def init(settings: Settings, params: Any, seed: int) -> Any:
  """The adapter to begin with, {'layers': {0: {'q': {'a': A, 'b': B}, …}, …}}: A ~ N(0, 1/D), B = 0.

  Float32; A is keyed by the seed and its own path, so that other matrices with or without an adapter change nothing.
  Source: arXiv:2106.09685 (LoRA).
  """

  def one(path: str, kernel: Any) -> dict[str, jax.Array]:
    D, F = kernel.shape
    key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(path.encode()))
    a_Dxr = jax.random.normal(key, (D, settings.rank)) / jnp.sqrt(D)
    return dict(a=a_Dxr, b=jnp.zeros((settings.rank, F)))

  layers = {
    i: {name: one(f'layers/{i}/{name}', layer[name]['kernel']) for name in settings.names}
    for i, layer in params['layers'].items()
  }
  return dict(layers=layers)


def frozen(params: Any, dtype: str) -> Any:
  """The base: matrices in the type that they are multiplied in, all else as it is. Source: none."""
  return jax.tree.map(lambda x: x.astype(jnp.dtype(dtype)) if x.ndim > 1 else x, params)


def joined(base: Any, adapter: Any, alpha: float) -> Any:
  """One tree for `decoder.apply`, which computes x·W + (x·A)·(alpha/r·B). Nothing of W's size is made or learned.

  Source: arXiv:2106.09685 (LoRA).
  """
  return _with(base, adapter, lambda part, a, b: part | dict(a=a, b=alpha / a.shape[1] * b))


def merged(base: Any, adapter: Any, alpha: float) -> Any:
  """The same function as a plain tree: W + alpha/r · A·B, in float32. Source: arXiv:2106.09685 (LoRA)."""

  def merge(part, a, b):
    return part | dict(
      kernel=part['kernel'] + alpha / a.shape[1] * jnp.matmul(a, b, precision='highest')
    )

  return _with(base, adapter, merge)


def sampled(base: Any, adapter: Any, alpha: float, dtype: str) -> Any:
  """What tokens are drawn from: `merged` in float32, so that decoding pays nothing; in narrower types `joined`.

  A kernel in bfloat16 loses what is below half its last digit: an adapter that has just begun would be merged into
  nothing, and tokens drawn from another policy than the one that learns. Source: none.
  """
  return (merged if dtype == 'float32' else joined)(base, adapter, alpha)


def _with(base: Any, adapter: Any, change: Any) -> Any:
  layers = {
    i: layer | {name: change(layer[name], **ab) for name, ab in adapter['layers'][i].items()}
    for i, layer in base['layers'].items()
  }
  return base | dict(layers=layers)

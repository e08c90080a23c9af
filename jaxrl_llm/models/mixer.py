"""Interface of the part of a layer that exchanges information between tokens: parameters, function, and cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
from flax import nnx

from jaxrl_llm.models import linear
from jaxrl_llm.models.positions import LayerMasks
from jaxrl_llm.types import Array, ModelConfig


class Int8(NamedTuple):
  """x ≈ data · scale, rounded to nearest, scale = max|x| / 127 over the head's dimension."""

  data: jax.Array  # int8 [rows, K, S, d]
  scale: jax.Array  # float32 [rows, K, S]


CacheArray = jax.Array | Int8


# The cache of one layer: arrays [rows, K, S, d]. Decode loops share and reuse rows and columns of any such arrays.
LayerCache = tuple[CacheArray, ...]
# One LayerCache per layer; or, with `remat`, one of arrays [layers, rows, K, S, d].
Cache = list[LayerCache] | LayerCache
# Replaces `attention.attend`: `splash.attend` where rows are causal and no cache is written, while decoding
# `decode_attention.attend`.
Attend = Callable[..., jax.Array]


class Context(NamedTuple):
  """Inputs of a mixer besides x: masks, and the tokens outside x that it reads."""

  masks: LayerMasks
  shared: LayerCache | None = None  # of prompts, which the rows of a group share
  cache: LayerCache | None = None  # of the rows' own earlier tokens
  at: Array | None = None  # the column from which x is written into `cache`
  attend: Attend | None = None


class Mixer(nnx.Module):
  """A base class of a layer, so that the names of its parameters are those of the layer itself."""

  config: ModelConfig

  @staticmethod
  def cached_sizes(config: ModelConfig) -> tuple[tuple[int, int], ...]:
    """(K, d) of each array in a LayerCache."""
    raise NotImplementedError

  def add_mixer(self, dense: Callable[..., linear.Dense], norm: Callable[..., nnx.RMSNorm]) -> None:
    """Adds the parameters, made by `dense(inputs, outputs, use_bias=…)` and `norm(features)`."""
    raise NotImplementedError

  def mix(self, h_BxQxD: jax.Array, context: Context) -> tuple[jax.Array, LayerCache]:
    """The output [B, Q, D], and the cache: that of x, or `context.cache` with x written into it."""
    raise NotImplementedError

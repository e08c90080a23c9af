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


class RowStates(NamedTuple):
  """The cache of a recurrent layer after the tokens of each row. It has rows, and no columns."""

  # float32 [rows, window − 1, C], the newest inputs of its convolution, oldest first: of queries, keys and values
  inputs: tuple[jax.Array, ...]
  state: jax.Array  # float32 [rows, heads, d of keys, d of values]


# The cache of one layer: arrays [rows, K, S, d], or `RowStates`. Decode loops share and reuse rows of any such arrays,
# and columns S of those that have them.
LayerCache = tuple[CacheArray, ...] | RowStates
# One LayerCache per layer; or, with `remat` and without recurrent layers, one of arrays [layers, rows, K, S, d].
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
  # of an earlier layer, with x written into it, for a layer without keys and values
  source: LayerCache | None = None


class Mixer(nnx.Module):
  """A base class of a layer, so that the names of its parameters are those of the layer itself."""

  config: ModelConfig

  @staticmethod
  def cached_sizes(config: ModelConfig) -> tuple[tuple[int, int], ...]:
    """(K, d) of each array in a LayerCache; () where the layer has states instead, or reads another's cache."""
    raise NotImplementedError

  @staticmethod
  def empty_states(config: ModelConfig, rows: int) -> RowStates | None:
    """The states before the first token of `rows` rows; None where tokens are cached."""
    del config, rows

  def add_mixer(self, dense: Callable[..., linear.Dense], norm: Callable[..., nnx.RMSNorm]) -> None:
    """Adds the parameters, made by `dense(inputs, outputs, use_bias=…)` and `norm(features)`."""
    raise NotImplementedError

  def mix(self, h_BxQxD: jax.Array, context: Context) -> tuple[jax.Array, LayerCache]:
    """The output [B, Q, D], and the cache: that of x, or `context.cache` with x written into it."""
    raise NotImplementedError

"""Mixture of experts: top-k routing without capacity limits, so that no token is dropped."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from jaxrl_llm.distributed import sharding
from jaxrl_llm.models import expert_rows, linear, token_exchange
from jaxrl_llm.models.linear import Quantized, activate, multiplier
from jaxrl_llm.models.token_exchange import Tokens
from jaxrl_llm.types import ModelConfig

# Arrays on a device have a row for each token that it may get for an expert. More tokens are taken one part after the
# other.
_MOST_ROWS = 2**16


class Weights(NamedTuple):
  """The weights of all experts, or of those on one device. Biases of `down` are added after the sum."""

  gate: linear.Kernel  # [E, D, F]
  up: linear.Kernel  # [E, D, F]
  down: linear.Kernel  # [E, F, D]
  gate_bias: jax.Array | None = None  # [E, F]
  up_bias: jax.Array | None = None  # [E, F]


class Kernels(nnx.Module):
  """One matrix per expert, and optionally one bias."""

  def __init__(self, shape_ExAxB: tuple[int, int, int], use_bias: bool, rngs: nnx.Rngs):
    draw = nnx.initializers.lecun_normal(in_axis=1, out_axis=2, batch_axis=0)
    self.kernel = nnx.Param(draw(rngs.params(), shape_ExAxB, jnp.float32))
    if use_bias:
      E, _, B = shape_ExAxB
      self.bias = nnx.Param(jnp.zeros((E, B)))


class Experts(nnx.Module):
  """Σ over the top k experts e of w_e · down_e(act(gate_e x) · up_e x), w = softmax of the router."""

  def __init__(self, config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs):
    E, D, F = config.experts, config.width, config.mlp
    self.config, self.dtype = config, dtype
    self.router = nnx.Linear(D, E, use_bias=config.router_bias, dtype=dtype, rngs=rngs)
    if config.choice_bias:
      self.choice_bias = nnx.Param(jnp.zeros(E))
    if config.expert_norms:
      self.router_norm, self.norm, self.post_norm = (
        nnx.RMSNorm(D, epsilon=config.norm_eps, dtype=dtype, rngs=rngs) for _ in range(3)
      )
      self.gain = nnx.Param(jnp.ones(E))
    shapes, bias = ((E, D, F), (E, D, F), (E, F, D)), config.expert_bias
    self.gate, self.up, self.down = (Kernels(shape, bias, rngs) for shape in shapes)

  def __call__(
    self, x_BxQxD: jax.Array, expert_BxQxk: jax.Array | None = None
  ) -> tuple[jax.Array, jax.Array]:
    """The output [B, Q, D] and the experts [B, Q, k] of each token; `expert` replaces the router's choice."""
    if not self.config.expert_norms:
      weight_BxQxk, expert_BxQxk = self._route(x_BxQxD, expert_BxQxk)
      return self._mix(x_BxQxD, weight_BxQxk, expert_BxQxk)
    routed_BxQxD = self.router_norm(x_BxQxD) * self.config.width**-0.5
    weight_BxQxk, expert_BxQxk = self._route(routed_BxQxD, expert_BxQxk)
    weight_BxQxk *= self.gain[...][expert_BxQxk]
    out_BxQxD, expert_BxQxk = self._mix(self.norm(x_BxQxD), weight_BxQxk, expert_BxQxk)
    return self.post_norm(out_BxQxD), expert_BxQxk

  def _route(
    self, x_BxQxD: jax.Array, expert_BxQxk: jax.Array | None
  ) -> tuple[jax.Array, jax.Array]:
    choice_bias_E = self.choice_bias[...] if self.config.choice_bias else None
    return route(self.config, self.router(x_BxQxD), expert_BxQxk, choice_bias_E)

  def _mix(
    self, x_BxQxD: jax.Array, weight_BxQxk: jax.Array, expert_BxQxk: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """The weighted sum of the given experts, and their numbers as they are recorded."""
    kernels = [k.kernel.get_value() for k in (self.gate, self.up, self.down)]
    weights = Weights(*(k if isinstance(k, Quantized) else k.astype(self.dtype) for k in kernels))
    if not self.config.expert_bias:
      out_BxQxD = dispatch(self.config, x_BxQxD, weight_BxQxk, expert_BxQxk, weights)
      return out_BxQxD, expert_BxQxk.astype(index_dtype(self.config))
    biases = (k.bias[...].astype(self.dtype) for k in (self.gate, self.up, self.down))
    gate_bias, up_bias, down_bias_ExD = biases
    weights = weights._replace(gate_bias=gate_bias, up_bias=up_bias)
    out_BxQxD = dispatch(self.config, x_BxQxD, weight_BxQxk, expert_BxQxk, weights)
    out_BxQxD += _weighted_bias(weight_BxQxk, expert_BxQxk, down_bias_ExD)
    return out_BxQxD, expert_BxQxk.astype(index_dtype(self.config))


def _weighted_bias(
  weight_BxQxk: jax.Array, expert_BxQxk: jax.Array, bias_ExD: jax.Array
) -> jax.Array:
  """Σ over the chosen experts of weight·bias [B, Q, D], outside the sums over devices, which would repeat it."""
  E = bias_ExD.shape[0]
  one_hot_BxQxkxE = jax.nn.one_hot(expert_BxQxk, E, dtype=bias_ExD.dtype)
  weight_BxQxE = jnp.einsum('bqk,bqke->bqe', weight_BxQxk.astype(bias_ExD.dtype), one_hot_BxQxkxE)
  return weight_BxQxE @ bias_ExD


def index_dtype(config: ModelConfig) -> str:
  """The smallest dtype that holds the index of an expert."""
  return 'uint8' if config.experts <= 256 else 'uint16'


def route(
  config: ModelConfig,
  logits_BxQxE: jax.Array,
  expert_BxQxk: jax.Array | None = None,
  choice_bias_E: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """The k largest values of softmax(logits) and their experts; with `norm_top_k` the values sum to 1.

  With router_score='sigmoid' the values of σ(logits), chosen as `_choice_scores` states, times `weight_scale`.

  With `expert`, the softmax at these experts instead: the router then learns weights, and its choice is fixed, except
  where `expert` is −1.
  arXiv:1701.06538; arXiv:2505.09388 (Qwen3's); with fixed experts arXiv:2510.11370 (R3).
  """
  logits_BxQxE = logits_BxQxE.astype(jnp.float32)
  choice_BxQxE = _choice_scores(config, logits_BxQxE, choice_bias_E)
  _, largest_BxQxk = jax.lax.top_k(choice_BxQxE, config.experts_per_token)
  if expert_BxQxk is None:
    expert_BxQxk = largest_BxQxk
  else:
    expert_BxQxk = expert_BxQxk.astype(jnp.int32)
    expert_BxQxk = jnp.where(expert_BxQxk < 0, largest_BxQxk, expert_BxQxk)
  chosen_BxQxk = jnp.take_along_axis(logits_BxQxE, expert_BxQxk, axis=-1)
  if config.router_score == 'sigmoid':
    return _sigmoid_weights(config, chosen_BxQxk), expert_BxQxk
  if config.norm_top_k:
    return jax.nn.softmax(chosen_BxQxk), expert_BxQxk
  total_BxQx1 = jax.nn.logsumexp(logits_BxQxE, axis=-1, keepdims=True)
  return jnp.exp(chosen_BxQxk - total_BxQx1), expert_BxQxk


def _sigmoid_weights(config: ModelConfig, chosen_BxQxk: jax.Array) -> jax.Array:
  weight_BxQxk = jax.nn.sigmoid(chosen_BxQxk)
  if config.norm_top_k:
    weight_BxQxk /= weight_BxQxk.sum(-1, keepdims=True) + 1e-20
  return config.weight_scale * weight_BxQxk


def _choice_scores(
  config: ModelConfig, logits_BxQxE: jax.Array, choice_bias_E: jax.Array | None
) -> jax.Array:
  """The numbers whose k largest are chosen: logits, or σ(logits) + bias within the best groups. arXiv:2412.19437.

  They need no gradient. Training elsewhere balances the experts' load by the bias; here it is a constant.
  """
  is_biased = choice_bias_E is not None or config.chosen_groups != config.expert_groups
  if config.router_score != 'sigmoid' or not is_biased:
    return logits_BxQxE
  score = jax.nn.sigmoid(jax.lax.stop_gradient(logits_BxQxE))
  if choice_bias_E is not None:
    score = score + jax.lax.stop_gradient(choice_bias_E).astype(jnp.float32)[None, None]
  if config.chosen_groups == config.expert_groups:
    return score
  groups = score.reshape(*score.shape[:-1], config.expert_groups, -1)
  best_BxQxg = jax.lax.top_k(groups, 2)[0].sum(-1)
  last_BxQx1 = jax.lax.top_k(best_BxQxg, config.chosen_groups)[0][..., -1:]
  groups = jnp.where((best_BxQxg >= last_BxQx1)[..., None], groups, -jnp.inf)
  return groups.reshape(score.shape)


def dispatch(
  config: ModelConfig,
  x_BxQxD: jax.Array,
  weight_BxQxk: jax.Array,
  expert_BxQxk: jax.Array,
  weights: Weights,
) -> jax.Array:
  """`mixture` over the mesh axis of experts, where each device holds some rows and some experts.

  Each device sends its tokens to the devices of their experts and sums what comes back (`token_exchange`). Where these
  are nearly all devices, or tokens are few, it gathers the tokens of all instead, computes those routed to its experts,
  and receives the sum of all results for its rows: one all-gather and one reduce-scatter. Features that span devices
  add a sum over the tensor axis.
  """
  tokens = x_BxQxD, weight_BxQxk, expert_BxQxk

  # An enclosing shard_map has split rows and kernels already: these kernels are the device's own.
  if sharding.is_manual(sharding.EXPERTS):
    return _between_devices(config, tokens, weights)
  row_axes, token_axes, expert_axes = (
    sharding.axes_that_divide(axes, size)
    for axes, size in (
      (sharding.UPDATE_ROWS, len(x_BxQxD)),
      (sharding.TOKENS, x_BxQxD.shape[1]),
      (sharding.EXPERTS, config.experts),
    )
  )
  if not row_axes + token_axes + expert_axes:
    return _over_features(config, tokens, weights)

  def local(tokens, weights):
    if not expert_axes:
      return _over_features(config, tokens, weights)
    # Too few rows to split them over the experts' axis: every device has all of them.
    if sharding.EXPERTS[0] not in row_axes:
      local_tokens = _localize(*tokens, weights.gate)
      return jax.lax.psum(_over_features(config, local_tokens, weights), expert_axes)
    return _between_devices(config, tokens, weights)

  spec = PartitionSpec(row_axes or None, token_axes or None)
  return jax.shard_map(
    local,
    in_specs=(spec, _specs(weights, expert_axes or None, None)),
    out_specs=spec,
    axis_names=sharding.free_axes() - {*sharding.FEATURES},
    check_vma=False,
  )(tokens, weights)


def _between_devices(config: ModelConfig, tokens: Tokens, weights: Weights) -> jax.Array:
  """The mixture of this device's tokens by the experts of all devices of the axis."""
  devices, experts = jax.lax.axis_size(*sharding.EXPERTS), _expert_count(weights.gate)

  def exchange(tokens):
    mix = functools.partial(_over_features, config)
    return token_exchange.exchange(mix, tokens, weights, experts)

  def gather(tokens):
    gathered = jax.lax.all_gather(tokens, *sharding.EXPERTS, tiled=True)
    return _scatter_sum(_over_features(config, _localize(*gathered, weights.gate), weights))

  if token_exchange.is_worthwhile(tokens):
    return _in_parts(exchange, tokens, devices * token_exchange.rows_to_each(tokens))
  return _in_parts(gather, tokens, devices * tokens[1].size)


def _in_parts(fn: Callable[[Tokens], jax.Array], tokens: Tokens, rows: int) -> jax.Array:
  """fn(tokens), for which a device gets `rows` rows: of all columns at once, or of some after others.

  The gradient computes each part again, so that the arrays of one are in memory and not those of all.
  """
  B, Q, _ = tokens[0].shape
  count = min(Q, -(-rows // _MOST_ROWS))
  if count == 1:
    return fn(tokens)

  def split(x):
    x = jnp.pad(x, ((0, 0), (0, -Q % count), (0, 0)))  # with weights of 0
    return jnp.moveaxis(x.reshape(B, count, -1, x.shape[-1]), 1, 0)

  out = jax.lax.map(jax.checkpoint(fn), jax.tree.map(split, tokens))
  return jnp.moveaxis(out, 0, 1).reshape(B, -1, out.shape[-1])[:, :Q]


def _localize(x: jax.Array, weight: jax.Array, expert: jax.Array, gate: linear.Kernel) -> Tokens:
  """Tokens with experts numbered from 0 on this device; other devices' experts fall outside [0, E)."""
  first = jax.lax.axis_index(*sharding.EXPERTS) * _expert_count(gate)
  return x, weight, expert - first


def _scatter_sum(part_NxQxD: jax.Array) -> jax.Array:
  """The sum over all devices' experts, for the rows of this device."""
  return jax.lax.psum_scatter(part_NxQxD, *sharding.EXPERTS, scatter_dimension=0, tiled=True)


def _over_features(config: ModelConfig, tokens: Tokens, weights: Weights) -> jax.Array:
  """`mixture` with the features of each expert split over the tensor axis, where it divides them."""
  features = sharding.axes_that_divide(sharding.FEATURES, config.mlp)
  if not features:
    return mixture(config, *tokens, weights)
  replicated = PartitionSpec()
  return jax.shard_map(
    lambda tokens, weights: jax.lax.psum(mixture(config, *tokens, weights), features),
    in_specs=(replicated, _specs(weights, None, features)),
    out_specs=replicated,
    axis_names={*features},
    check_vma=False,
  )(tokens, weights)


def _specs(
  weights: Weights, experts: tuple[str, ...] | None, features: tuple[str, ...] | None
) -> Weights:
  """The specs of all weights, with experts and features split over the given axes."""
  e, f = experts, features
  bias = None if weights.gate_bias is None else PartitionSpec(e, f)
  wide, narrow = (e, None, f), (e, f, None)
  kernels = map(_kernel_spec, weights[:3], (wide, wide, narrow))
  return Weights(*kernels, bias, bias)


def _kernel_spec(
  kernel: linear.Kernel, axes: tuple[tuple[str, ...] | None, ...]
) -> PartitionSpec | Quantized:
  """The specs of a kernel [E, A, B] and of its scales [E, B], which lie beside their channels."""
  data = PartitionSpec(*axes)
  return Quantized(data, PartitionSpec(axes[0], axes[2])) if isinstance(kernel, Quantized) else data


def _expert_count(kernel_ExAxB: linear.Kernel) -> int:
  return len(jax.tree.leaves(kernel_ExAxB)[0])


def mixture(
  config: ModelConfig,
  x_BxQxD: jax.Array,
  weight_BxQxk: jax.Array,
  expert_BxQxk: jax.Array,
  weights: Weights,
) -> jax.Array:
  """The weighted sum [B, Q, D] of experts 0 … E − 1; experts outside this range belong to another device.

  Tokens are sorted by expert, so that the tokens of an expert form one block of a grouped matrix product.
  """
  (B, Q, D), E, k = x_BxQxD.shape, _expert_count(weights.gate), expert_BxQxk.shape[-1]
  expert_N = expert_BxQxk.reshape(-1)
  local_N = (expert_N >= 0) & (expert_N < E)
  expert_N = jnp.where(local_N, expert_N, E)  # sorted to the end
  order_N, place_N, size_G = expert_rows.sort_by_group(expert_N, E + 1)
  size_E = size_G[:E]
  local_Nx1 = local_N[order_N][:, None]

  def grouped(x_NxA, kernel_ExAxB, bias_ExB=None):
    # The grouped product leaves rows after the last group undefined, in results and in gradients.
    mask = lambda x: x if E == config.experts else jnp.where(local_Nx1, x, 0)  # noqa: E731
    data, scale_ExB = linear.read_kernel(kernel_ExAxB, x_NxA.dtype)
    if scale_ExB is not None and kernel_ExAxB.data.dtype == jnp.int8:
      # XLA for TPUs would copy a converted array here. It multiplies int8 directly, but not float8.
      data = kernel_ExAxB.data
    scale_NxB = None if scale_ExB is None else scale_ExB[jnp.minimum(expert_N[order_N], E - 1)]
    out = jax.lax.ragged_dot(mask(x_NxA), data, size_E, preferred_element_type=x_NxA.dtype)
    out = linear.apply_scale(out, scale_NxB)
    if bias_ExB is not None:
      out = out + bias_ExB[jnp.minimum(expert_N[order_N], E - 1)]
    return mask(out)

  rows = expert_rows.Rows(order_N, place_N.reshape(B * Q, k))
  x_NxD, weight_Txk = expert_rows.spread(x_BxQxD.reshape(-1, D), rows), weight_BxQxk.reshape(-1, k)
  if config.weighted_inputs:
    weight_Nx1 = expert_rows.spread(
      weight_Txk.reshape(-1, 1), rows._replace(slot_Nxk=place_N[:, None])
    )
    x_NxD, weight_Txk = x_NxD * weight_Nx1.astype(x_NxD.dtype), None
  gate_NxF = activate(config, grouped(x_NxD, weights.gate, weights.gate_bias))
  hidden_NxF = gate_NxF * multiplier(config, grouped(x_NxD, weights.up, weights.up_bias))
  return expert_rows.combine(grouped(hidden_NxF, weights.down), weight_Txk, rows).reshape(B, Q, D)

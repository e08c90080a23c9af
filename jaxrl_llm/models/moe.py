"""Mixture of experts: top-k routing without capacity limits, so that no token is dropped."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from jaxrl_llm.models import activation_sharding, quantized
from jaxrl_llm.models.activation import activate
from jaxrl_llm.models.quantized import Quantized
from jaxrl_llm.types import ModelConfig

# x [B, Q, D], weights [B, Q, k] and experts [B, Q, k] of tokens.
_Tokens = tuple[jax.Array, jax.Array, jax.Array]
# gate [E, D, F], up [E, D, F] and down [E, F, D].
_Kernels = tuple[quantized.Kernel, quantized.Kernel, quantized.Kernel]


class Kernels(nnx.Module):
  """One matrix per expert."""

  def __init__(self, shape_ExAxB: tuple[int, int, int], rngs: nnx.Rngs):
    draw = nnx.initializers.lecun_normal(in_axis=1, out_axis=2, batch_axis=0)
    self.kernel = nnx.Param(draw(rngs.params(), shape_ExAxB, jnp.float32))


class Experts(nnx.Module):
  """Σ over the top k experts e of w_e · down_e(act(gate_e x) · up_e x), w = softmax of the router."""

  def __init__(self, config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs):
    E, D, F = config.experts, config.width, config.mlp
    self.config, self.dtype = config, dtype
    self.router = nnx.Linear(D, E, use_bias=False, dtype=dtype, rngs=rngs)
    self.gate, self.up = Kernels((E, D, F), rngs), Kernels((E, D, F), rngs)
    self.down = Kernels((E, F, D), rngs)

  def __call__(
    self, x_BxQxD: jax.Array, expert_BxQxk: jax.Array | None = None
  ) -> tuple[jax.Array, jax.Array]:
    """The output [B, Q, D] and the experts [B, Q, k] of each token; `expert` replaces the router's choice."""
    weight_BxQxk, expert_BxQxk = route(self.config, self.router(x_BxQxD), expert_BxQxk)
    kernels = [k.kernel.get_value() for k in (self.gate, self.up, self.down)]
    kernels = [k if isinstance(k, Quantized) else k.astype(self.dtype) for k in kernels]
    out_BxQxD = dispatch(self.config, x_BxQxD, weight_BxQxk, expert_BxQxk, *kernels)
    return out_BxQxD, expert_BxQxk.astype(index_dtype(self.config))


def index_dtype(config: ModelConfig) -> str:
  """The smallest dtype that holds the index of an expert."""
  return 'uint8' if config.experts <= 256 else 'uint16'


def route(
  config: ModelConfig, logits_BxQxE: jax.Array, expert_BxQxk: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
  """The k largest values of softmax(logits) and their experts; with `norm_top_k` the values sum to 1.

  With `expert`, the softmax at these experts instead: the router then learns weights, and its choice is fixed, except
  where `expert` is −1.
  arXiv:1701.06538; arXiv:2505.09388 (Qwen3's); with fixed experts arXiv:2510.11370 (R3).
  """
  logits_BxQxE = logits_BxQxE.astype(jnp.float32)
  _, largest_BxQxk = jax.lax.top_k(logits_BxQxE, config.experts_per_token)
  if expert_BxQxk is None:
    expert_BxQxk = largest_BxQxk
  else:
    expert_BxQxk = expert_BxQxk.astype(jnp.int32)
    expert_BxQxk = jnp.where(expert_BxQxk < 0, largest_BxQxk, expert_BxQxk)
  chosen_BxQxk = jnp.take_along_axis(logits_BxQxE, expert_BxQxk, axis=-1)
  if config.norm_top_k:
    return jax.nn.softmax(chosen_BxQxk), expert_BxQxk
  total_BxQx1 = jax.nn.logsumexp(logits_BxQxE, axis=-1, keepdims=True)
  return jnp.exp(chosen_BxQxk - total_BxQx1), expert_BxQxk


def dispatch(
  config: ModelConfig,
  x_BxQxD: jax.Array,
  weight_BxQxk: jax.Array,
  expert_BxQxk: jax.Array,
  gate_ExDxF: quantized.Kernel,
  up_ExDxF: quantized.Kernel,
  down_ExFxD: quantized.Kernel,
) -> jax.Array:
  """`mixture` over the mesh axis of experts, where each device holds some rows and some experts.

  Each device gathers the tokens of all, computes those routed to its experts, and receives the sum of all results for
  its rows: one all-gather and one reduce-scatter. Features that span devices add a sum over the tensor axis.
  """
  tokens, kernels = (x_BxQxD, weight_BxQxk, expert_BxQxk), (gate_ExDxF, up_ExDxF, down_ExFxD)
  # An enclosing shard_map has split rows and kernels already: these kernels are the device's own.
  if activation_sharding.is_manual(activation_sharding.EXPERTS):
    gathered = jax.lax.all_gather(tokens, *activation_sharding.EXPERTS, tiled=True)
    return _scatter_sum(_over_features(config, _localize(*gathered, gate_ExDxF), kernels))
  row_axes, token_axes, expert_axes = (
    activation_sharding.axes_that_divide(axes, size)
    for axes, size in (
      (activation_sharding.ROWS, len(x_BxQxD)),
      (activation_sharding.TOKENS, x_BxQxD.shape[1]),
      (activation_sharding.EXPERTS, config.experts),
    )
  )
  if not row_axes + token_axes + expert_axes:
    return _over_features(config, tokens, kernels)

  def local(tokens, kernels):
    if not expert_axes:
      return _over_features(config, tokens, kernels)
    # Too few rows to split them over the experts' axis: every device has all of them.
    if activation_sharding.EXPERTS[0] not in row_axes:
      local_tokens = _localize(*tokens, kernels[0])
      return jax.lax.psum(_over_features(config, local_tokens, kernels), expert_axes)
    gathered = jax.lax.all_gather(tokens, *expert_axes, tiled=True)
    return _scatter_sum(_over_features(config, _localize(*gathered, kernels[0]), kernels))

  spec = PartitionSpec(row_axes or None, token_axes or None)
  return jax.shard_map(
    local,
    in_specs=(spec, tuple(_kernel_spec(k, (expert_axes or None, None, None)) for k in kernels)),
    out_specs=spec,
    axis_names=activation_sharding.free_axes() - {*activation_sharding.FEATURES},
    check_vma=False,
  )(tokens, kernels)


def _localize(
  x: jax.Array, weight: jax.Array, expert: jax.Array, gate: quantized.Kernel
) -> _Tokens:
  """Tokens with experts numbered from 0 on this device; other devices' experts fall outside [0, E)."""
  first = jax.lax.axis_index(*activation_sharding.EXPERTS) * _expert_count(gate)
  return x, weight, expert - first


def _scatter_sum(part_NxQxD: jax.Array) -> jax.Array:
  """The sum over all devices' experts, for the rows of this device."""
  return jax.lax.psum_scatter(
    part_NxQxD, *activation_sharding.EXPERTS, scatter_dimension=0, tiled=True
  )


def _over_features(config: ModelConfig, tokens: _Tokens, kernels: _Kernels) -> jax.Array:
  """`mixture` with the features of each expert split over the tensor axis, where it divides them."""
  features = activation_sharding.axes_that_divide(activation_sharding.FEATURES, config.mlp)
  if not features:
    return mixture(config, *tokens, *kernels)
  replicated, f = PartitionSpec(), features
  return jax.shard_map(
    lambda tokens, kernels: jax.lax.psum(mixture(config, *tokens, *kernels), features),
    in_specs=(
      replicated,
      tuple(map(_kernel_spec, kernels, ((None, None, f), (None, None, f), (None, f, None)))),
    ),
    out_specs=replicated,
    axis_names={*features},
    check_vma=False,
  )(tokens, kernels)


def _kernel_spec(
  kernel: quantized.Kernel, axes: tuple[tuple[str, ...] | None, ...]
) -> PartitionSpec | Quantized:
  """The specs of a kernel [E, A, B] and of its scales [E, B], which lie beside their channels."""
  data = PartitionSpec(*axes)
  return Quantized(data, PartitionSpec(axes[0], axes[2])) if isinstance(kernel, Quantized) else data


def _expert_count(kernel_ExAxB: quantized.Kernel) -> int:
  return len(jax.tree.leaves(kernel_ExAxB)[0])


def mixture(
  config: ModelConfig,
  x_BxQxD: jax.Array,
  weight_BxQxk: jax.Array,
  expert_BxQxk: jax.Array,
  gate_ExDxF: quantized.Kernel,
  up_ExDxF: quantized.Kernel,
  down_ExFxD: quantized.Kernel,
) -> jax.Array:
  """The weighted sum [B, Q, D] of experts 0 … E − 1; experts outside this range belong to another device.

  Tokens are sorted by expert, so that the tokens of an expert form one block of a grouped matrix product.
  """
  (B, Q, D), E, k = x_BxQxD.shape, _expert_count(gate_ExDxF), expert_BxQxk.shape[-1]
  expert_N = expert_BxQxk.reshape(-1)
  local_N = (expert_N >= 0) & (expert_N < E)
  expert_N = jnp.where(local_N, expert_N, E)  # sorted to the end, in no group
  order_N = jnp.argsort(expert_N)
  size_E = jnp.bincount(expert_N, length=E)
  local_Nx1 = local_N[order_N][:, None]

  def grouped(x_NxA, kernel_ExAxB):
    # The grouped product leaves rows after the last group undefined, in results and in gradients.
    mask = lambda x: x if E == config.experts else jnp.where(local_Nx1, x, 0)  # noqa: E731
    data, scale_ExB = quantized.read(kernel_ExAxB, x_NxA.dtype)
    if scale_ExB is not None and kernel_ExAxB.data.dtype == jnp.int8:
      # XLA for TPUs would copy a converted array here. It multiplies int8 directly, but not float8.
      data = kernel_ExAxB.data
    scale_NxB = None if scale_ExB is None else scale_ExB[jnp.minimum(expert_N[order_N], E - 1)]
    out = jax.lax.ragged_dot(mask(x_NxA), data, size_E, preferred_element_type=x_NxA.dtype)
    return mask(quantized.apply_scale(out, scale_NxB))

  x_NxD = x_BxQxD.reshape(-1, D)[order_N // k]
  hidden_NxF = activate(config, grouped(x_NxD, gate_ExDxF)) * grouped(x_NxD, up_ExDxF)
  out_BxQxkxD = grouped(hidden_NxF, down_ExFxD)[jnp.argsort(order_N)].reshape(B, Q, k, D)
  return jnp.einsum('bqkd,bqk->bqd', out_BxQxkxD, weight_BxQxk.astype(x_BxQxD.dtype))

"""A mixture of experts: each token goes through the few that its router likes best, and none is ever dropped."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from jaxrl_llm.models import activation_sharding, quantized
from jaxrl_llm.models.activation import activate
from jaxrl_llm.models.quantized import Quantized
from jaxrl_llm.types import ModelConfig


class Kernels(nnx.Module):
  """A matrix for each of E experts."""

  def __init__(self, shape_ExAxB: tuple[int, int, int], rngs: nnx.Rngs):
    draw = nnx.initializers.lecun_normal(in_axis=1, out_axis=2, batch_axis=0)
    self.kernel = nnx.Param(draw(rngs.params(), shape_ExAxB, jnp.float32))


class Experts(nnx.Module):
  """Σ over the top k experts e of w_e · down_e(act(gate_e x) · up_e x), w = softmax of the router."""

  def __init__(self, config: ModelConfig, dtype: Any, rngs: nnx.Rngs):
    E, D, F = config.experts, config.width, config.mlp
    self.config, self.dtype = config, dtype
    self.router = nnx.Linear(D, E, use_bias=False, dtype=dtype, rngs=rngs)
    self.gate, self.up = Kernels((E, D, F), rngs), Kernels((E, D, F), rngs)
    self.down = Kernels((E, F, D), rngs)

  def __call__(self, x_BxQxD: jax.Array, expert_BxQxk: jax.Array | None = None):
    """What is added to x [B, Q, D], and whose it is; `expert`: whose it shall be."""
    weight_BxQxk, expert_BxQxk = route(self.config, self.router(x_BxQxD), expert_BxQxk)
    kernels = [k.kernel.get_value() for k in (self.gate, self.up, self.down)]
    kernels = [k if isinstance(k, Quantized) else k.astype(self.dtype) for k in kernels]
    added_BxQxD = dispatch(self.config, x_BxQxD, weight_BxQxk, expert_BxQxk, *kernels)
    return added_BxQxD, expert_BxQxk.astype(index_dtype(self.config))


def index_dtype(config: ModelConfig) -> str:
  """The smallest type that the number of an expert fits. Source: none."""
  return 'uint8' if config.experts <= 256 else 'uint16'


def route(
  config: ModelConfig, logits_BxQxE: jax.Array, expert_BxQxk: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
  """The k largest of softmax(logits), which sum to 1 where the config says so, and whose they are.

  `expert` given: the softmax at these instead, so that the router learns weights and not the choice.
  Source: arXiv:1701.06538; arXiv:2505.09388 (Qwen3's); of a choice that is given arXiv:2510.11370 (R3).
  """
  logits_BxQxE = logits_BxQxE.astype(jnp.float32)
  if expert_BxQxk is None:
    _, expert_BxQxk = jax.lax.top_k(logits_BxQxE, config.experts_per_token)
  expert_BxQxk = expert_BxQxk.astype(jnp.int32)
  chosen_BxQxk = jnp.take_along_axis(logits_BxQxE, expert_BxQxk, axis=-1)
  if config.norm_top_k:
    return jax.nn.softmax(chosen_BxQxk), expert_BxQxk
  total_BxQx1 = jax.nn.logsumexp(logits_BxQxE, axis=-1, keepdims=True)
  return jnp.exp(chosen_BxQxk - total_BxQx1), expert_BxQxk


def dispatch(
  config: ModelConfig, x_BxQxD, weight_BxQxk, expert_BxQxk, gate_ExDxF, up_ExDxF, down_ExFxD
) -> jax.Array:
  """`mixture`, with tokens brought to the devices that hold the experts, and what these add brought back.

  Along the axis of experts every device has rows and experts of its own: it is given the tokens of all, works on
  those that chose its experts, and of what all have added each gets the sum for its rows. Two exchanges, no capacity,
  nothing dropped; features that span devices cost a sum besides. Source: none.
  """
  given, kernels = (x_BxQxD, weight_BxQxk, expert_BxQxk), (gate_ExDxF, up_ExDxF, down_ExFxD)
  if activation_sharding.is_manual(
    activation_sharding.EXPERTS
  ):  # by the loop around the model, with the rows: kernels are this device's
    told = jax.lax.all_gather(given, *activation_sharding.EXPERTS, tiled=True)
    return _returned(_featured(config, _offset(*told, gate_ExDxF), kernels))
  rows, tokens, experts = (
    activation_sharding.axes_that_divide(axes, size)
    for axes, size in (
      (activation_sharding.ROWS, len(x_BxQxD)),
      (activation_sharding.TOKENS, x_BxQxD.shape[1]),
      (activation_sharding.EXPERTS, config.experts),
    )
  )
  if not rows + tokens + experts:
    return _featured(config, given, kernels)

  def local(given, kernels):
    if not experts:
      return _featured(config, given, kernels)
    if (
      activation_sharding.EXPERTS[0] not in rows
    ):  # too few to be cut: every device has all of them
      return jax.lax.psum(_featured(config, _offset(*given, kernels[0]), kernels), experts)
    told = jax.lax.all_gather(given, *experts, tiled=True)
    return _returned(_featured(config, _offset(*told, kernels[0]), kernels))

  cut = PartitionSpec(rows or None, tokens or None)
  return jax.shard_map(
    local,
    in_specs=(cut, tuple(_cut(k, (experts or None, None, None)) for k in kernels)),
    out_specs=cut,
    axis_names=activation_sharding.free_axes() - {*activation_sharding.FEATURES},
    check_vma=False,
  )(given, kernels)


def _offset(x, weight, expert, gate):
  """Experts by their numbers on this device: those of others are below 0, or too large."""
  return x, weight, expert - jax.lax.axis_index(*activation_sharding.EXPERTS) * _count(gate)


def _returned(part_NxQxD: jax.Array) -> jax.Array:
  """The sum of what all experts have added to this device's rows."""
  return jax.lax.psum_scatter(
    part_NxQxD, *activation_sharding.EXPERTS, scatter_dimension=0, tiled=True
  )


def _featured(config: ModelConfig, given, kernels) -> jax.Array:
  """`mixture`, each device with some of the features of its experts."""
  features = activation_sharding.axes_that_divide(activation_sharding.FEATURES, config.mlp)
  if not features:
    return mixture(config, *given, *kernels)
  whole, f = PartitionSpec(), features
  return jax.shard_map(
    lambda given, kernels: jax.lax.psum(mixture(config, *given, *kernels), features),
    in_specs=(
      whole,
      tuple(map(_cut, kernels, ((None, None, f), (None, None, f), (None, f, None)))),
    ),
    out_specs=whole,
    axis_names={*features},
    check_vma=False,
  )(given, kernels)


def _cut(kernel: quantized.Kernel, axes: tuple) -> Any:
  """How one kernel [E, A, B] lies; its scales [E, B] lie beside their channels."""
  whole = PartitionSpec(*axes)
  return (
    Quantized(whole, PartitionSpec(axes[0], axes[2])) if isinstance(kernel, Quantized) else whole
  )


def _count(kernel_ExAxB: quantized.Kernel) -> int:
  return len(jax.tree.leaves(kernel_ExAxB)[0])


def mixture(
  config: ModelConfig, x_BxQxD, weight_BxQxk, expert_BxQxk, gate_ExDxF, up_ExDxF, down_ExFxD
) -> jax.Array:
  """What experts 0 … E − 1 add, for tokens that chose them; other numbers of experts are another device's.

  Tokens are sorted by expert, so that each expert's are one block of a grouped matrix product. Source: none.
  """
  (B, Q, D), E, k = x_BxQxD.shape, _count(gate_ExDxF), expert_BxQxk.shape[-1]
  expert_N = expert_BxQxk.reshape(-1)
  here_N = (expert_N >= 0) & (expert_N < E)
  expert_N = jnp.where(here_N, expert_N, E)  # the last in order, in no group
  order_N = jnp.argsort(expert_N)
  size_E = jnp.bincount(expert_N, length=E)
  sorted_Nx1 = here_N[order_N][:, None]

  def grouped(x_NxA, kernel_ExAxB):
    # Rows behind the last group are nobody's: in results and in gradients they need not even be finite.
    kept = lambda x: x if E == config.experts else jnp.where(sorted_Nx1, x, 0)  # noqa: E731
    data, scale_ExB = quantized.read(kernel_ExAxB, x_NxA.dtype)
    if scale_ExB is not None and kernel_ExAxB.data.dtype == jnp.int8:
      # Of a converted array XLA for TPUs makes a copy here; int8 it multiplies as it is, float8 it does not.
      data = kernel_ExAxB.data
    scale_NxB = None if scale_ExB is None else scale_ExB[jnp.minimum(expert_N[order_N], E - 1)]
    out = jax.lax.ragged_dot(kept(x_NxA), data, size_E, preferred_element_type=x_NxA.dtype)
    return kept(quantized.apply_scale(out, scale_NxB))

  x_NxD = x_BxQxD.reshape(-1, D)[order_N // k]
  hidden_NxF = activate(config, grouped(x_NxD, gate_ExDxF)) * grouped(x_NxD, up_ExDxF)
  out_BxQxkxD = grouped(hidden_NxF, down_ExFxD)[jnp.argsort(order_N)].reshape(B, Q, k, D)
  return jnp.einsum('bqkd,bqk->bqd', out_BxQxkxD, weight_BxQxk.astype(x_BxQxD.dtype))

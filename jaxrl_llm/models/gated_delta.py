"""The gated delta rule, a mixer with a state of fixed size in place of cached tokens. arXiv:2412.06464."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_llm.distributed import sharding
from jaxrl_llm.models import linear
from jaxrl_llm.models.mixer import Context, LayerCache, Mixer, RowStates
from jaxrl_llm.types import ModelConfig

_CHUNK = 64  # tokens whose updates of the state are taken together
_NORM_EPSILON = 1e-6  # of normalized queries and keys, which no config.json states
# TPUs otherwise round factors to bfloat16, and a state sums over all tokens of a row.
_PRECISION = jax.lax.Precision.HIGHEST
_BEFORE_ALL = -1e30  # logarithm of a decay between tokens that do not follow each other


class Tokens(NamedTuple):
  """How the tokens of rows follow each other. Padding leaves every state as it is."""

  is_real_BxQ: jax.Array
  starts_BxQ: jax.Array  # real tokens before which the state is empty; not the first column

  @property
  def end_B(self) -> jax.Array:
    """The column behind the last real token; 0 where there is none."""
    column_1xQ = jnp.arange(self.is_real_BxQ.shape[1])[None]
    return jnp.where(self.is_real_BxQ, column_1xQ + 1, 0).max(1)


class Recurrence(nnx.Module):
  """Parameters of a recurrent layer that are no linear maps."""

  def __init__(self, config: ModelConfig):
    channels, heads = sum(channel_counts(config)), config.delta_value_heads
    # At first, the convolution returns its newest input.
    self.taps = nnx.Param(jnp.zeros((channels, 1, config.delta_window)).at[..., -1].set(1.0))
    self.log_rate = nnx.Param(jnp.zeros(heads))
    self.rate_bias = nnx.Param(jnp.ones(heads))
    self.gain = nnx.Param(jnp.ones(config.delta_value_dim))


class GatedDelta(Mixer):
  """S ← α·S; S ← S + β·k·(v − kᵀS); out = Sᵀq, for each head, with decay α and step β of each token.

  Queries, keys and values pass a short causal convolution and a nonlinearity; queries and keys are then normalized,
  out is normed and gated.
  """

  @staticmethod
  def cached_sizes(config: ModelConfig) -> tuple[tuple[int, int], ...]:
    """None: it has states."""
    del config
    return ()

  @staticmethod
  def empty_states(config: ModelConfig, rows: int) -> RowStates:
    """As `Mixer.empty_states`."""
    heads = config.delta_value_heads, config.delta_key_dim, config.delta_value_dim
    inputs = tuple(
      jnp.zeros((rows, config.delta_window - 1, count), jnp.float32)
      for count in channel_counts(config)
    )
    return RowStates(inputs, jnp.zeros((rows, *heads), jnp.float32))

  def add_mixer(self, dense: Callable[..., linear.Dense], norm: Callable[..., nnx.RMSNorm]) -> None:
    """Projections to queries, keys, values, the gate, steps and decays; the recurrence; the last projection."""
    c = self.config
    keys, values = c.delta_key_heads * c.delta_key_dim, c.delta_value_heads * c.delta_value_dim
    self.delta_q, self.delta_k = (dense(c.width, keys, use_bias=False) for _ in range(2))
    self.delta_v, self.delta_gate = (dense(c.width, values, use_bias=False) for _ in range(2))
    self.delta_step, self.delta_decay = (
      dense(c.width, c.delta_value_heads, use_bias=False) for _ in range(2)
    )
    self.delta = Recurrence(c)
    self.delta_out = dense(values, c.width, use_bias=False)

  def mix(self, h_BxQxD: jax.Array, context: Context) -> tuple[jax.Array, LayerCache]:
    """As `Mixer.mix`. Without a cache, rows with a shared prompt begin in the first column."""
    c, h, (B, Q, _) = self.config, h_BxQxD, h_BxQxD.shape
    dtype, precise = self.delta_q.dtype, jnp.promote_types(self.delta_q.dtype, jnp.float32)
    first, tokens = self._first_states(context, B), _tokens(context, B, Q)
    (q, k, v), inputs = self._convolved(h, first.inputs, tokens, precise)
    q, k = (self._normalized(x) for x in (q, k))
    rate_1x1xH = jnp.exp(self.delta.log_rate[...].astype(precise))[None, None]
    bias_1x1xH = self.delta.rate_bias[...].astype(precise)[None, None]
    step_BxQxH = jax.nn.sigmoid(self.delta_step(h)).astype(precise)
    decay_BxQxH = -rate_1x1xH * jax.nn.softplus(self.delta_decay(h).astype(precise) + bias_1x1xH)
    rule = Rule(
      q * c.delta_key_dim**-0.5,
      k,
      v,
      jnp.where(tokens.is_real_BxQ[..., None], decay_BxQxH, 0),
      jnp.where(tokens.is_real_BxQ[..., None], step_BxQxH, 0),
    )
    out, state = delta_rule(rule, tokens.starts_BxQ, first.state.astype(precise))
    out = self._gated(out.astype(dtype), self.delta_gate(h).reshape(out.shape))
    states = jax.tree.map(lambda x: x.astype(jnp.float32), RowStates(inputs, state))
    return self.delta_out(out.reshape(B, Q, -1)), states

  def _convolved(
    self, h_BxQxD: jax.Array, inputs: tuple[jax.Array, ...], tokens: Tokens, precise: jnp.dtype
  ) -> tuple[list[jax.Array], tuple[jax.Array, ...]]:
    """Queries, keys and values [B, Q, heads, d] after the convolution; and the newest inputs of each.

    They are convolved apart: a concatenation of channels would have no shards of whole heads.
    """
    c, h, counts = self.config, h_BxQxD, channel_counts(self.config)
    heads = c.delta_key_heads, c.delta_key_heads, c.delta_value_heads
    taps_CxW = self.delta.taps[...][:, 0].astype(self.delta_q.dtype).astype(precise)
    parts, newest, first = [], [], 0
    for project, before, count, n in zip(
      (self.delta_q, self.delta_k, self.delta_v), inputs, counts, heads, strict=True
    ):
      x, last = convolve(project(h), taps_CxW[first : first + count], before, tokens)
      x = linear.ACTIVATIONS[c.activation](x).reshape(*h.shape[:2], n, -1)
      # Each device has all tokens of its rows and heads, since a state passes through them.
      parts.append(sharding.constrain(x, sharding.UPDATE_ROWS, (), sharding.FEATURES))
      newest.append(last)
      first += count
    return parts, tuple(newest)

  def _first_states(self, context: Context, rows: int) -> RowStates:
    """The states before the first column."""
    if isinstance(context.cache, RowStates):
      return context.cache
    if isinstance(context.shared, RowStates):
      shared = context.shared
      return jax.tree.map(lambda x: jnp.repeat(x, rows // len(x), axis=0), shared)
    return self.empty_states(self.config, rows)

  def _normalized(self, x_BxQxKxd: jax.Array) -> jax.Array:
    """Of length 1, and repeated for the value heads that each key head serves."""
    norm = jax.lax.rsqrt((x_BxQxKxd * x_BxQxKxd).sum(-1, keepdims=True) + _NORM_EPSILON)
    served = self.config.delta_value_heads // self.config.delta_key_heads
    return jnp.repeat(x_BxQxKxd * norm, served, axis=2)

  def _gated(self, x_BxQxHxd: jax.Array, gate_BxQxHxd: jax.Array) -> jax.Array:
    """x̂·gain·silu(gate), where x̂ is x divided by its root mean square."""
    dtype, x = x_BxQxHxd.dtype, x_BxQxHxd.astype(jnp.promote_types(x_BxQxHxd.dtype, jnp.float32))
    x = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + self.config.norm_eps)
    x = self.delta.gain[...][None, None, None] * x.astype(dtype)
    return (x * jax.nn.silu(gate_BxQxHxd.astype(x.dtype))).astype(dtype)


def channel_counts(config: ModelConfig) -> tuple[int, int, int]:
  """Channels of the convolution: features of queries, of keys, and of values."""
  keys = config.delta_key_heads * config.delta_key_dim
  return keys, keys, config.delta_value_heads * config.delta_value_dim


def _tokens(context: Context, B: int, Q: int) -> Tokens:
  """What the mask states: a token is real if it attends to itself, and goes on if it attends to the one before it."""
  if context.cache is not None:  # its mask is one of cached columns, and every token is real
    return Tokens(jnp.ones((B, Q), bool), jnp.zeros((B, Q), bool))
  mask_BxQxQ = context.masks.mask_BxQxS
  is_real_BxQ = jnp.diagonal(mask_BxQxQ, axis1=1, axis2=2)
  goes_on = jnp.diagonal(mask_BxQxQ, offset=-1, axis1=1, axis2=2)
  starts_BxQ = is_real_BxQ & ~jnp.pad(goes_on, ((0, 0), (1, 0)), constant_values=True)
  return Tokens(*(jnp.broadcast_to(x, (B, Q)) for x in (is_real_BxQ, starts_BxQ)))


def convolve(
  x_BxQxC: jax.Array, taps_CxW: jax.Array, inputs_BxIxC: jax.Array, tokens: Tokens
) -> tuple[jax.Array, jax.Array]:
  """Σ over j < W of tap W − 1 − j times the input j tokens earlier; and the newest I = W − 1 inputs of each row.

  Inputs before the first column are `inputs`. Those before a token that starts are 0.
  """
  (_, Q, _), W = x_BxQxC.shape, taps_CxW.shape[1]
  all_BxNxC = jnp.concatenate([inputs_BxIxC.astype(x_BxQxC.dtype), x_BxQxC], axis=1)
  end_Bx1 = tokens.end_B[:, None]
  reaches_BxQ = jnp.ones_like(
    tokens.starts_BxQ
  )  # whether the input j tokens earlier is of this row
  parts, newest = [], []
  for j in range(W):
    earlier = jax.lax.dynamic_slice_in_dim(all_BxNxC, W - 1 - j, Q, axis=1)
    taps_1x1xC = taps_CxW[None, None, :, W - 1 - j]
    parts.append(jnp.where(reaches_BxQ[..., None], earlier, 0) * taps_1x1xC)
    if j < W - 1:
      reaches_Bx1 = jnp.take_along_axis(reaches_BxQ, jnp.maximum(end_Bx1 - 1, 0), axis=1)
      newest_Bx1xC = jnp.take_along_axis(all_BxNxC, (end_Bx1 + W - 2 - j)[..., None], axis=1)
      newest.append(jnp.where(reaches_Bx1[..., None], newest_Bx1xC, 0))
    starts_BxQ = jnp.pad(tokens.starts_BxQ, ((0, 0), (j, 0)))[:, :Q]
    reaches_BxQ = reaches_BxQ & ~starts_BxQ
  return functools.reduce(jnp.add, parts), jnp.concatenate(newest[::-1], axis=1)


class Rule(NamedTuple):
  """Inputs of the delta rule. Step 0 and decay 0 leave the state as it is."""

  q: jax.Array  # [B, Q, H, d]
  k: jax.Array  # [B, Q, H, d]
  v: jax.Array  # [B, Q, H, e]
  decay: jax.Array  # [B, Q, H], log α ≤ 0
  step: jax.Array  # [B, Q, H], β


@jax.named_scope('delta_rule')
def delta_rule(
  rule: Rule, starts_BxQ: jax.Array, state_BxHxdxe: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """The outputs [B, Q, H, e], and the state after all tokens; before one that starts it is 0."""
  if starts_BxQ.shape[1] == 1:
    return _one_token(rule, state_BxHxdxe)
  return _chunks(rule, starts_BxQ, state_BxHxdxe)


def _one_token(rule: Rule, state_BxHxdxe: jax.Array) -> tuple[jax.Array, jax.Array]:
  """The rule itself. Sums over d are not products of matrices, which a row alone would not fill."""
  q, k, v, decay, step = (x[:, 0] for x in rule)
  state = state_BxHxdxe * jnp.exp(decay)[..., None, None]
  error_BxHxe = (v - (state * k[..., None]).sum(-2)) * step[..., None]
  state = state + k[..., None] * error_BxHxe[..., None, :]
  return (state * q[..., None]).sum(-2)[:, None], state


def _chunks(
  rule: Rule, starts_BxQ: jax.Array, state_BxHxdxe: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Chunks one after the other; within a chunk of n tokens, a triangular system in place of n steps.

  With Γ[i, j] the decay from token j to i, and γ[i] that from before the chunk, the errors u solve
  (1 + strictly lower part of β·k kᵀ⊙Γ) u = β·(v − γ·k S). Then out = γ·q S + (q kᵀ⊙Γ) u, and
  S ← γ[n]·S + Σ Γ[n, j]·k[j] u[j]. Γ and γ are 0 across a token that starts. arXiv:2412.06464, section 3.
  """
  (B, Q, H, _), n = rule.q.shape, min(_CHUNK, starts_BxQ.shape[1])

  def chunked(x):  # [chunks, B, H, n, …]
    x = jnp.pad(x, ((0, 0), (0, -Q % n)) + ((0, 0),) * (x.ndim - 2))
    x = x.reshape(B, -1, n, *x.shape[2:])
    return jnp.moveaxis(x, (1, 3), (0, 2)) if x.ndim > 3 else jnp.moveaxis(x, 1, 0)[:, :, None]

  q, k, v, decay, step = map(chunked, rule)
  segment = jnp.cumsum(chunked(starts_BxQ), axis=-1)  # [chunks, B, 1, n]
  total = jnp.cumsum(decay, axis=-1)
  same = segment[..., :, None] == segment[..., None, :]
  follows = same & jnp.tril(jnp.ones((1, 1, 1, n, n), bool))
  between = jnp.exp(jnp.where(follows, _sums_between(decay), _BEFORE_ALL))
  from_before = jnp.exp(jnp.where(segment == 0, total, _BEFORE_ALL))[..., None]
  system = _product('...id,...jd->...ij', k * step[..., None], k) * between
  known = jnp.concatenate([v, k * from_before], axis=-1) * step[..., None]
  solved = jax.lax.platform_dependent(system, known, cpu=_solve_in_turns, default=_solve_all)
  u, seen = jnp.split(solved, [v.shape[-1]], axis=-1)
  scores = _product('...id,...jd->...ij', q, k) * between
  k_to_end, decay_of_chunk = k * between[..., -1, :, None], from_before[..., -1:, :]

  def body(state, chunk):
    u, seen, scores, q, k_to_end, decay_of_chunk = chunk
    u = u - _product('...nd,...de->...ne', seen, state)
    out = _product('...nd,...de->...ne', q, state) + _product('...ij,...je->...ie', scores, u)
    return state * decay_of_chunk + _product('...nd,...ne->...de', k_to_end, u), out

  state, out = jax.lax.scan(
    body, state_BxHxdxe, (u, seen, scores, q * from_before, k_to_end, decay_of_chunk)
  )
  out = jnp.moveaxis(out, (0, 2), (1, 3)).reshape(B, -1, H, v.shape[-1])
  return out[:, :Q], state


def _sums_between(x_Nxn: jax.Array) -> jax.Array:
  """[…, n, n]: at i, j the sum of x over tokens j + 1 … i; 0 where there are none.

  The difference of two sums from the first token on would have their rounding errors, however small itself: weak decays
  after strong ones would lose their digits.
  """
  n = x_Nxn.shape[-1]
  lower_nxn = jnp.tril(jnp.ones((n, n), x_Nxn.dtype))
  is_later = (lower_nxn > lower_nxn.T).reshape((1,) * (x_Nxn.ndim - 1) + (n, n))
  return _product('im,...mj->...ij', lower_nxn, jnp.where(is_later, x_Nxn[..., None], 0))


def _solve(system: jax.Array, known: jax.Array) -> jax.Array:
  """x with system·x = known [..., n, m], where the system [..., n, n] is lower triangular with a diagonal of 1."""
  return jax.lax.linalg.triangular_solve(
    system, known, left_side=True, lower=True, unit_diagonal=True
  )


def _solve_all(system: jax.Array, known: jax.Array) -> jax.Array:
  """`_solve` of [chunks, B, H, n, n] at once.

  XLA's solver for TPUs lays the largest batch dimension of the whole program into lanes, and pads what a device has of
  it to 128. The rows of all devices would be that dimension, and a device may have one: they are joined with chunks.
  """
  (N, B), joined = (
    system.shape[:2],
    [x.swapaxes(0, 1).reshape(-1, *x.shape[2:]) for x in (system, known)],
  )
  return _solve(*joined).reshape(B, N, *known.shape[2:]).swapaxes(0, 1)


def _solve_in_turns(system: jax.Array, known: jax.Array) -> jax.Array:
  """`_solve`, one system after the other.

  jaxlib's kernel for a batch waits in a thread of the pool for other threads of it: with as many virtual devices as
  threads all of them wait, for ever.
  """
  flat = (x.reshape(-1, *x.shape[-2:]) for x in (system, known))
  return jax.lax.map(lambda pair: _solve(*pair), tuple(flat)).reshape(known.shape)


def _product(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
  return jnp.einsum(spec, a, b, precision=_PRECISION)

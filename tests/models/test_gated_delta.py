"""The gated delta rule and its convolution: against transformers, by chunks and token by token, in packed bins."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.learner import microbatch
from jaxrl_llm.models import decoder, gated_delta
from jaxrl_llm.types import ModelConfig

B, H, D, E, C, W = 2, 3, 5, 4, 6, 4
# Columns before which the state is empty, by row; row 1 ends in padding.
STARTS = (0, 3, 8, 66, 67), (0,)
MODEL = ModelConfig(
  vocab=24, width=16, layers=3, heads=2, kv_heads=1, head_dim=8, mlp=24, max_tokens=256, qk_norm='head',
  output_gate=True, rotary_dim=4, recurrent_layers=(True, False, True), delta_key_heads=1, delta_value_heads=2,
  delta_key_dim=6, delta_value_dim=4, delta_window=W,
)  # fmt: skip


@functools.cache
def case(Q):
  """Inputs of the rule, of which row 1 has padding at its end, and how its tokens follow each other."""
  r = np.random.default_rng(0)
  draw = lambda *shape: r.normal(size=shape).astype(np.float32)  # noqa: E731
  real = np.arange(Q) < np.array([[Q], [max(Q - 9, 0)]])
  starts = np.zeros((B, Q), bool)
  for row, columns in enumerate(STARTS):
    starts[row, [c for c in columns if 0 < c < Q]] = True
  k = draw(B, Q, H, D)
  rule = gated_delta.Rule(
    draw(B, Q, H, D),
    k / np.linalg.norm(k, axis=-1, keepdims=True),
    draw(B, Q, H, E),
    np.where(real[..., None], -np.exp(draw(B, Q, H)), 0),
    np.where(real[..., None], 1 / (1 + np.exp(draw(B, Q, H))), 0),
  )
  return rule, gated_delta.Tokens(real, starts), draw(B, H, D, E)


def token_by_token(rule, starts, state):
  """The recurrence itself, written as `_one_token` for each token."""

  def body(state, token):
    rule, starts_B = token
    state = jnp.where(starts_B[:, None, None, None], 0, state)
    one = gated_delta.Rule(*(x[:, None] for x in rule))
    out, state = gated_delta.delta_rule(one, starts_B[:, None], state)
    return state, out[:, 0]

  by_token = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (rule, starts))
  state, out = jax.lax.scan(body, state, by_token)
  return jnp.moveaxis(out, 0, 1), state


@pytest.mark.parametrize('Q', [2, 150])
def test_chunks_and_their_gradient_equal_the_rule_token_by_token(Q):
  rule, tokens, state = case(Q)
  weight = np.random.default_rng(1).normal(size=(B, Q, H, E)).astype(np.float32)

  def outputs(fn):
    def loss(rule, state):
      out, last = fn(rule, tokens.starts_BxQ, state)
      return (out * weight).sum() + last.sum(), (out, last)

    return jax.jit(jax.grad(loss, (0, 1), has_aux=True))(rule, state)

  got, want = outputs(gated_delta.delta_rule), outputs(token_by_token)
  for ours, plain in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_allclose(ours, plain, atol=2e-4, rtol=2e-4)


def test_weak_decays_after_strong_ones_keep_their_digits():
  """Sampling multiplies single decays; the sum of those of a chunk has rounding errors as large as a weak decay."""
  rule, tokens, state = case(150)
  is_strong = np.arange(150)[None, :, None] % 40 == 5
  rule = rule._replace(decay=np.where(is_strong, np.float32(-900), rule.decay / 20))
  out, last = jax.jit(gated_delta.delta_rule)(rule, tokens.starts_BxQ, state)
  with jax.enable_x64():
    wide = jax.tree.map(np.float64, (rule, state))
    out64, last64 = jax.jit(token_by_token)(wide[0], tokens.starts_BxQ, wide[1])
  np.testing.assert_allclose(out, out64, atol=3e-6)
  np.testing.assert_allclose(last, last64, atol=3e-6)


@pytest.mark.timeout(120)
def test_as_many_devices_as_threads_do_not_wait_for_each_other():
  """Batched triangular systems of jaxlib did, for ever."""
  rule, tokens, _ = case(150)
  rule = jax.tree.map(lambda x: np.tile(x, (64, *[1] * (x.ndim - 1))), rule)
  starts_BxQ = np.tile(tokens.starts_BxQ, (64, 1))
  state = np.zeros((len(starts_BxQ), H, D, E), np.float32)
  mesh = jax.make_mesh((8,), ('rows',), axis_types=(jax.sharding.AxisType.Auto,))
  rows = jax.sharding.PartitionSpec('rows')
  sharded = jax.shard_map(gated_delta.delta_rule, mesh=mesh, in_specs=rows, out_specs=rows)
  for got, want in zip(
    jax.jit(sharded)(rule, starts_BxQ, state),
    jax.jit(gated_delta.delta_rule)(rule, starts_BxQ, state),
    strict=True,
  ):
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_both_forms_equal_those_of_transformers():
  torch = pytest.importorskip('torch')
  theirs = pytest.importorskip('transformers.models.qwen3_next.modeling_qwen3_next')
  rule, tokens, state = case(150)
  out, last = jax.jit(gated_delta.delta_rule)(rule, tokens.starts_BxQ, state)
  for row, starts in enumerate(STARTS):
    first = torch.tensor(state[row : row + 1])
    for start, end in zip(starts, [*starts[1:], 150], strict=True):
      q, k, v, g, beta = (torch.tensor(x[row : row + 1, start:end]) for x in rule)
      for fn in (theirs.torch_recurrent_gated_delta_rule, theirs.torch_chunk_gated_delta_rule):
        want, final = fn(
          q * D**0.5, k, v, g=g, beta=beta, initial_state=first if start == 0 else None,
          output_final_state=True,
        )  # fmt: skip
        np.testing.assert_allclose(out[row, start:end], want[0].numpy(), atol=2e-5)
    np.testing.assert_allclose(last[row], final[0].numpy(), atol=2e-5)


@pytest.mark.parametrize('Q', [1, 2, 9])
def test_the_convolution_reads_its_own_row_and_returns_the_newest_inputs(Q):
  r = np.random.default_rng(2)
  x, inputs = r.normal(size=(B, Q, C)), r.normal(size=(B, W - 1, C))
  taps, tokens = r.normal(size=(C, W)), case(Q)[1]
  out, newest = gated_delta.convolve(*map(jnp.asarray, (x, taps, inputs)), tokens)
  for row in range(B):
    history = inputs[row]
    for t in range(Q):
      history = np.zeros((W - 1, C)) if tokens.starts_BxQ[row, t] else history
      seen = np.concatenate([history, x[row, t : t + 1]])
      if tokens.is_real_BxQ[row, t]:
        np.testing.assert_allclose(out[row, t], (seen * taps.T).sum(0), atol=1e-5)
        history = seen[1:]
    np.testing.assert_allclose(newest[row], history, atol=1e-6)


def test_rows_of_a_bin_are_separate_and_padding_changes_nothing():
  """Bins as the update packs them: each row behind a prompt of its own, the rest is padding."""
  r = np.random.default_rng(3)
  draw = lambda x: (0.5 * r.normal(size=x.shape)).astype(np.float32)  # noqa: E731
  params = jax.tree.map(draw, decoder.abstract_params(MODEL))
  lengths, S = ((3, 4), (5, 1), (2, 6)), 24
  rows = [r.integers(0, 24, sum(pair)) for pair in lengths]
  tokens, position, copy, part = (np.zeros((1, S), np.int32) for _ in range(4))
  start = 0
  for number, ((L, T), row) in enumerate(zip(lengths, rows, strict=True)):
    at = slice(start, start + L + T)
    tokens[0, at], position[0, at], copy[0, at] = row, np.arange(L + T), number + 1
    part[0, start + L : start + L + T] = number + 1
    start += L + T
  mask = microbatch.attention_mask(jnp.asarray(copy), jnp.asarray(part))

  @functools.partial(jax.jit, static_argnames='remat')
  def hidden(tokens, position, mask, remat):
    return decoder.apply(MODEL, params, tokens, position, mask, remat=remat)[0]

  packed = hidden(tokens, position, mask, remat=True)
  start = 0
  for row in rows:
    whole = np.pad(row, (S - len(row), 0))[None]  # padded on the left
    at = np.arange(S) >= S - len(row)
    alone = hidden(
      whole, np.maximum(at.cumsum() - 1, 0)[None], decoder.causal(at[None]), remat=False
    )
    np.testing.assert_allclose(packed[0, start : start + len(row)], alone[0, at], atol=2e-5)
    start += len(row)


def test_all_systems_at_once_have_the_solutions_of_each():
  r = np.random.default_rng(0)
  system, known = r.normal(size=(3, 2, 4, 5, 5)), r.normal(size=(3, 2, 4, 5, 6))
  lower = np.tril(system, -1) + np.eye(5)
  with jax.enable_x64(True):
    got = gated_delta._solve_all(jnp.array(system), jnp.array(known))
  np.testing.assert_allclose(np.asarray(got), np.linalg.solve(lower, known), rtol=1e-9)

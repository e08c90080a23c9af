"""Deviations of latents from a flow: those of whole rows by definition, however rows are packed."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from objective_table import METHODS

from jaxrl_llm.distributed import sharding
from jaxrl_llm.learner import auxiliary_model
from jaxrl_llm.models import decoder, flow_head
from jaxrl_llm.objective import auxiliary_loss
from jaxrl_llm.types import UserError
from tests.learner import plain_gradient
from tests.learner.packed_jobs import (
  MODEL,
  SEVERAL,
  SINGLE,
  B,
  T,
  make,
  make_batch,
  make_state,
  weights,
  with_method,
)

LAYERS = 4
DEEPER = dataclasses.replace(MODEL, layers=LAYERS)
NUMBERS = (1, 2, 3)


def job(devices=1, mesh=None, remat=False):
  spec = with_method(make(DEEPER, devices, mesh), **METHODS['rlfr'].settings)
  objective = spec.objective._replace(auxiliary_optimizer=optax.sgd(0.1))
  return spec._replace(update=spec.update._replace(remat=remat), objective=objective)


def network(seed=2):
  """Weights of a flow, of which none is 0."""
  like = jax.eval_shape(lambda: flow_head.init(MODEL.width, 4, 0))
  r = np.random.default_rng(seed)
  return jax.tree.map(lambda x: jnp.asarray(r.normal(size=x.shape) / 4, jnp.float32), like)


def latents(batch, params):
  """Outputs [B, T, D] of three layers at the tokens that predict those of completions, a layer after the other."""
  tokens, start_Bx1, identity = plain_gradient.whole_rows(job(), batch)
  column = jnp.arange(tokens.shape[1])[None]
  end_Bx1 = start_Bx1 + jnp.asarray(batch.rollout.length_B)[:, None]
  before = jnp.clip(start_Bx1 - 1 + jnp.arange(T)[None], 0, tokens.shape[1] - 1)
  pick = lambda x: jnp.take_along_axis(x, before[..., None], axis=1)  # noqa: E731
  found = []
  for number in NUMBERS:
    # The first layers alone, without the final norm: its input is what they add up to.
    short = dataclasses.replace(DEEPER, layers=number + 1)
    first = params | dict(layers={n: params['layers'][n] for n in range(number + 1)})
    hidden, *_ = decoder.apply(
      short, first, tokens, jnp.broadcast_to(column, tokens.shape), decoder.causal(column < end_Bx1),
      shown=(number,),
    )  # fmt: skip
    normed, *_ = decoder.apply(
      short, first, tokens, jnp.broadcast_to(column, tokens.shape), decoder.causal(column < end_Bx1)
    )
    scale = jax.lax.rsqrt((hidden**2).mean(-1, keepdims=True) + DEEPER.norm_eps)
    np.testing.assert_allclose(
      hidden * scale * params['norm']['scale'][None, None], normed, atol=1e-4
    )
    found.append(pick(hidden))
  identity_BxT = jnp.take_along_axis(
    identity, jnp.clip(start_Bx1 + jnp.arange(T)[None], 0, tokens.shape[1] - 1), 1
  )
  return found, identity_BxT


@pytest.mark.parametrize('remat', [False, True])
def test_deviations_are_those_of_whole_rows(remat):
  """Every token but the last is read; its noise depends on seed, step and token, and on no layout."""
  batch, spec, flow = make_batch(), job(remat=remat), network()
  state = make_state(spec, weights(0, DEEPER))
  found, identity_BxT = latents(batch, state.params)
  key = jax.random.fold_in(jax.random.key(state.seed), state.step)
  draw = lambda i: jax.random.normal(jax.random.fold_in(key, i), (3 * MODEL.width,))  # noqa: E731
  noise = jnp.split(jax.vmap(jax.vmap(draw))(identity_BxT[:, :-1]), 3, axis=-1)
  want = (
    sum(
      flow_head.deviation(
        flow, x[:, 1:], x[:, :-1], noise[i], jnp.float32(0.8), jnp.float32(n / LAYERS)
      )
      for i, (n, x) in enumerate(zip(NUMBERS, found, strict=True))
    )
    / 3
  )
  read = np.arange(1, T)[None] < batch.rollout.length_B[:, None]

  @sharding.on_mesh
  def outputs(spec, state, batch):
    return auxiliary_model.outputs(spec, state, dict(flow=flow), batch)

  for size in (SINGLE, SEVERAL) if not remat else (SEVERAL,):
    cut = plain_gradient.recording(spec, size)
    got = jax.jit(functools.partial(outputs, cut))(state, jax.tree.map(jnp.asarray, batch))
    np.testing.assert_allclose(
      np.where(read, got[:, :-1], 0), np.where(read, want, 0), rtol=2e-4, atol=1e-4
    )
  assert read.sum() > B and np.asarray(want)[read].std() > 0.01


def test_a_flow_that_predicts_every_velocity_has_no_deviation():
  """Latents of one value: from the point on the way the velocity is (h − x) / (1 − t), which a network may have."""
  flow = jax.tree.map(jnp.zeros_like, flow_head.init(4, 1, 0))
  r = np.random.default_rng(0)
  h, noise = jnp.zeros((5, 4)), jnp.asarray(r.normal(size=(5, 4)), jnp.float32)
  # v = 0 leaves (h − noise)² in full.
  plain = flow_head.deviation(flow, h, h, noise, jnp.float32(0.8), jnp.float32(0.5))
  np.testing.assert_allclose(plain, (noise**2).mean(-1), rtol=1e-6)
  # v = b with b = h − noise of a single noise matches exactly.
  alike = jnp.broadcast_to(noise[:1], noise.shape)
  flow['last']['bias'] = -noise[0]
  np.testing.assert_allclose(
    flow_head.deviation(flow, h, h, alike, jnp.float32(0.8), jnp.float32(0.5)), 0, atol=1e-12
  )


def test_the_gradient_of_a_deviation_is_that_of_finite_differences():
  with jax.enable_x64(True):
    flow = jax.tree.map(lambda x: x.astype(jnp.float64), network())
    r = np.random.default_rng(1)
    h, context, noise = (jnp.asarray(r.normal(size=(3, MODEL.width))) for _ in range(3))
    loss = lambda flow: flow_head.deviation(flow, h, context, noise, 0.8, 0.25).sum()  # noqa: E731
    along = jax.tree.map(lambda x: jnp.asarray(r.normal(size=x.shape)), flow)
    slope = sum(
      (g * a).sum()
      for g, a in zip(*map(jax.tree.leaves, (jax.grad(loss)(flow), along)), strict=True)
    )
    moved = lambda s: loss(jax.tree.map(lambda x, a: x + s * a, flow, along))  # noqa: E731
    np.testing.assert_allclose((moved(1e-6) - moved(-1e-6)) / 2e-6, slope, rtol=1e-6)


def test_layers_are_those_of_the_official_code():
  numbers = auxiliary_loss.flow().flow.numbers
  assert numbers(28) == (7, 14, 21) and numbers(30) == (8, 15, 22) and numbers(1) == (0, 0, 0)
  assert auxiliary_loss.flow(shares=(1.0,)).flow.numbers(28) == (27,)


@pytest.mark.parametrize(
  'choices, message',
  [
    (dict(shares=()), 'shares=.* must be in'),
    (dict(shares=(0.5, 1.5)), 'shares=.* must be in'),
    (dict(depth=0), 'depth=0 must be at least 1'),
    (dict(time=1.0), 'time=1.0 must be above 0'),
    (dict(after=-1), 'after=-1 must be at least 0'),
  ],
)
def test_settings_out_of_range_are_refused(choices, message):
  with pytest.raises(UserError, match=f'config.objective.auxiliary_model.{message}'):
    auxiliary_loss.flow(**choices)

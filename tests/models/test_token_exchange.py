"""Experts on several devices: tokens that travel to them give what one device gives, however they choose."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxrl_llm.models import expert_rows, moe, token_exchange
from jaxrl_llm.profiling import hlo_decode, hlo_update
from jaxrl_llm.types import ModelConfig

B, Q, D, F, E, K = 8, 16, 5, 7, 8, 3
SIZES = dict(data=1, fsdp=2, context=1, expert=4, decode=1, tensor=1)


def make_config(weighted_inputs=False):
  return ModelConfig(
    vocab=11, width=D, layers=1, heads=1, kv_heads=1, head_dim=4, mlp=F, experts=E, experts_per_token=K,
    max_tokens=Q, weighted_inputs=weighted_inputs,
  )  # fmt: skip


def choices(kind):
  """Experts [B, Q, k]."""
  if kind == 'even':
    all_experts = np.tile(np.arange(E), (B, Q, 1))
    return jnp.asarray(np.random.default_rng(1).permuted(all_experts, axis=-1)[..., :K])
  if kind == 'one device':  # experts 2 and 3, and another one
    return jnp.tile(jnp.array([3, 2, 5]), (B, Q, 1))
  if kind == 'one expert':  # as recorded choices of padding are
    return jnp.full((B, Q, K), 6)
  return choices('even').at[:2].set(choices('one device')[:2])  # the rows of two devices


def draw():
  r = np.random.default_rng(0)
  normal = lambda *shape: jnp.asarray(r.normal(size=shape), jnp.float32)  # noqa: E731
  return (
    normal(B, Q, D),
    normal(B, Q, K),
    moe.Weights(normal(E, D, F), normal(E, D, F), normal(E, F, D), normal(E, F), normal(E, F)),
  )


def on_devices(fn):
  mesh = jax.make_mesh(
    tuple(SIZES.values()), tuple(SIZES), axis_types=(AxisType.Auto,) * len(SIZES)
  )

  def run(x, weight, weights):
    rows = NamedSharding(mesh, PartitionSpec(('data', 'fsdp', 'expert')))
    experts = NamedSharding(mesh, PartitionSpec('expert'))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
      placed = jax.device_put((x, weight), rows), jax.device_put(weights, experts)
      return fn(*placed[0], placed[1])

  return run


def by_definition(config, x_BxQxD, weight_BxQxk, expert_BxQxk, weights):
  """Each token with the matrices of its experts, one copy of them for each token."""
  of = jax.tree.map(lambda a: a[expert_BxQxk], weights)
  before, after = weight_BxQxk[..., None], 1.0
  if not config.weighted_inputs:
    before, after = after, before
  x_BxQxkxD = x_BxQxD[:, :, None] * before * jnp.ones((1, 1, K, 1))
  times = functools.partial(jnp.einsum, 'bqkd,bqkdf->bqkf')
  gate = times(x_BxQxkxD, of.gate) + of.gate_bias
  up = times(x_BxQxkxD, of.up) + of.up_bias
  return (times(jax.nn.silu(gate) * up, of.down) * after).sum(2)


def value_and_gradients(fn, config, expert_BxQxk):
  def loss(x, weight, weights):
    out_BxQxD = fn(config, x, weight, expert_BxQxk, weights)
    slope_BxQxD = jnp.cos(jnp.arange(out_BxQxD.size).reshape(out_BxQxD.shape))
    return (out_BxQxD * slope_BxQxD).sum(), out_BxQxD

  return jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))


@pytest.mark.parametrize('weighted_inputs', [False, True])
@pytest.mark.parametrize(
  'kind, spare', [('even', 1.25), ('one device', 1.25), ('one expert', 1.25), ('mixed', 0.2)]
)
def test_tokens_that_travel_give_the_sums_and_gradients_of_the_definition(
  kind, spare, weighted_inputs, monkeypatch
):
  config, expert_BxQxk = make_config(weighted_inputs), choices(kind)
  monkeypatch.setattr(token_exchange, '_FEWEST_ROWS', 1)
  monkeypatch.setattr(token_exchange, '_SPARE', spare)
  with jax.default_matmul_precision('highest'):
    expected = value_and_gradients(by_definition, config, expert_BxQxk)(*draw())
    one = value_and_gradients(moe.dispatch, config, expert_BxQxk)(*draw())
    many = on_devices(value_and_gradients(moe.dispatch, config, expert_BxQxk))(*draw())
  for result in (one, many):
    jax.tree.map(
      functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5), result, expected
    )


def test_a_report_counts_one_round_of_rows_there_and_back(monkeypatch):
  monkeypatch.setattr(token_exchange, '_FEWEST_ROWS', 1)
  config, expert_BxQxk = make_config(), choices('even')
  forward = jax.jit(
    lambda x, weight, weights: moe.dispatch(config, x, weight, expert_BxQxk, weights)
  )
  text = on_devices(lambda *a: forward.lower(*a).compile().as_text())(*draw())
  rows = 15  # 1.25 times an even share of 48, to each of 4 devices
  # x, its result, a weight and an expert of 4 bytes each; three of four blocks come from other devices.
  assert hlo_update.collective_bytes(text, SIZES)['expert'] == pytest.approx(
    3 * rows * 4 * (2 * D + 2), abs=8
  )
  assert any(token_exchange.LATER_ROUNDS in c.source for c in hlo_decode.all_collectives(text))


def test_tokens_are_gathered_where_they_are_few_or_need_nearly_all_devices(monkeypatch):
  config, expert_BxQxk = make_config(), choices('even')
  compiled = lambda: on_devices(  # noqa: E731
    lambda *a: jax.jit(functools.partial(moe.dispatch, config))
    .lower(a[0], a[1], expert_BxQxk, a[2]).compile().as_text()
  )(*draw())  # fmt: skip
  assert 'all-to-all' not in compiled()
  monkeypatch.setattr(token_exchange, '_FEWEST_ROWS', 1)
  assert 'all-to-all' in compiled()
  monkeypatch.setattr(token_exchange, '_SPARE', 1.4)
  assert 'all-to-all' not in compiled()


@pytest.mark.parametrize('groups', [1, 3, 40])
def test_counting_orders_rows_as_a_stable_sort_does(groups):
  group_N = np.random.default_rng(0).integers(0, groups, 57)
  order_N, place_N, size_G = jax.jit(expert_rows.sort_by_group, static_argnums=1)(group_N, groups)
  np.testing.assert_array_equal(order_N, np.argsort(group_N, kind='stable'))
  np.testing.assert_array_equal(order_N[place_N], np.arange(57))
  np.testing.assert_array_equal(size_G, np.bincount(group_N, minlength=groups))

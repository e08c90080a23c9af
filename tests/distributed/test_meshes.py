"""The step on every kind of mesh, for dense models, windows and mixtures: the same as on one device."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest

from jaxrl_llm import step as steps
from jaxrl_llm.config import loading as configs
from jaxrl_llm.distributed import sharding
from jaxrl_llm.learner import compile as programs
from jaxrl_llm.learner import empty_records, spec_from_config
from jaxrl_llm.learner import state as train_state
from jaxrl_llm.learner.spec_from_config import make_spec
from jaxrl_llm.learner.step_spec import full_bins
from jaxrl_llm.models import decoder, moe, token_exchange
from jaxrl_llm.profiling import hlo_decode, hlo_update
from jaxrl_llm.types import Batch, ModelConfig, Prompts, UserError

DENSE = ModelConfig(
  vocab=50, width=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=48, max_tokens=64
)
MODELS = dict(
  dense=DENSE,
  window=dataclasses.replace(
    DENSE, window=5, sliding=(True, False), sliding_rope_theta=100.0, norms='both', logit_cap=9.0
  ),
  mixture=dataclasses.replace(
    DENSE, mlp=24, experts=8, experts_per_token=3, norm_top_k=True, qk_norm='head', tied=False
  ),
  # gpt-oss's parts, behind a dense layer and beside a shared expert.
  sinks=dataclasses.replace(
    DENSE, layers=3, mlp=24, experts=8, experts_per_token=3, norm_top_k=True, sinks=True, qkv_bias=True,
    out_bias=True, router_bias=True, expert_bias=True, activation='clamped_swiglu', gate_gain=1.7, gate_limit=1.0,
    dense_layers=(True, False, False), dense_mlp=40, shared_mlp=16, shared_gate=True, window=5,
    sliding=(True, False, True),
  ),
  latent=dataclasses.replace(
    DENSE, head_dim=12, rotary_dim=4, rotary_pairs=True, latent=16, query_latent=8, value_dim=6
  ),
)  # fmt: skip
# Two recurrent layers with twice as many value heads as key heads, around one that attends.
MODELS['recurrent'] = dataclasses.replace(
  DENSE, layers=3, qk_norm='head', output_gate=True, rotary_dim=4, recurrent_layers=(True, False, True),
  delta_key_heads=2, delta_value_heads=4, delta_key_dim=6, delta_value_dim=4, delta_window=3,
)  # fmt: skip
MODELS['recurrent mixture'] = dataclasses.replace(
  MODELS['recurrent'], mlp=24, experts=8, experts_per_token=3, norm_top_k=True, tied=False,
  shared_mlp=16, shared_gate=True,
)  # fmt: skip
MODELS['replayed'] = MODELS[
  'mixture'
]  # its update routes tokens to the experts chosen while sampling
P, G, L, T = 8, 2, 8, 6


def spec(model, remat, **mesh):
  c = configs.default()
  c.prompts, c.rollouts, c.prompt_tokens, c.completion_tokens = P, G, L, T
  c.optimizer.learning_rate = 1e-2
  # Gradients of a rarely chosen expert are as small as rounding errors. Recurrent layers make these larger: with 1e-4,
  # parameters that differ by one rounding change the third gradient norm by up to 1.7e-3 on one device.
  c.optimizer.eps = 1e-2 if model == 'recurrent mixture' else 1e-4
  c.rollout.slots = 8 if model.startswith('recurrent') else 0  # states change hands
  c.learner.replay_experts = model == 'replayed'
  with c.ignore_type():
    c.learner.remat = remat
  c.mesh.update(dict(fsdp=1) | mesh)
  count = int(np.prod(list(mesh.values()), dtype=int))
  return make_spec(c, MODELS[model], (3, 7), sharding.make_mesh(c.mesh, jax.devices()[:count]))


def make_prompts(seed):
  r = np.random.default_rng(seed)
  index_P = (seed * P + np.arange(P)).astype(np.int32)
  born_P, expected_P = np.full(P, seed, np.int32), np.zeros(P, np.float32)
  tokens_PxL = r.integers(0, 50, (P, L)).astype(np.int32)
  return Prompts(tokens_PxL, r.integers(1, L + 1, P).astype(np.int32), index_P, born_P, expected_P)


def _mesh(**sizes):
  return sharding.make_mesh(sizes, jax.devices())


def graded(prompts, rollout):
  rollout = jax.tree.map(np.asarray, rollout)
  last = rollout.tokens_BxT[np.arange(P * G), rollout.length_B - 1]
  correct_B = ((last + rollout.length_B) % 2).astype(np.float32)
  return Batch(prompts, rollout, correct_B, correct_B)


def params_of(model):
  """Initial parameters. Those of the delta rule are larger, since normalized keys near 0 amplify rounding errors."""
  larger = lambda path, x: x * 8 if 'delta_' in sharding.path_name(path) else x  # noqa: E731
  return jax.tree_util.tree_map_with_path(larger, decoder.init(model, 0))


def train(spec):
  """Three steps: every rollout's tokens, the metrics, and the last state."""
  state = train_state.init_state(spec, params_of(spec.model.config))
  fn, batch, history = steps.compile_step(spec), empty_records.empty_batch(spec), []
  for index in range(3):
    prompts = make_prompts(index)
    state, rollout, metrics = fn(state, batch, prompts, None, None, np.int32(T))
    batch = graded(prompts, rollout)
    history.append((np.asarray(rollout.tokens_BxT), {k: float(v) for k, v in metrics.items()}))
  return history, state


def assert_same(one, one_state, many, many_state):
  """Equal tokens, and metrics and parameters but for rounding."""
  for (tokens, metrics), (tokens8, metrics8) in zip(one, many, strict=True):
    np.testing.assert_array_equal(tokens, tokens8)
    for name, value in metrics.items():
      np.testing.assert_allclose(metrics8[name], value, atol=1e-4, rtol=1e-4, err_msg=name)
  for a, b in zip(
    jax.tree.leaves(one_state.params), jax.tree.leaves(many_state.params), strict=True
  ):
    np.testing.assert_allclose(a, b, atol=1e-4)


@functools.cache
def alone(model):
  return train(spec(model, False))


@pytest.mark.parametrize(
  'model, remat, mesh',
  [
    ('dense', False, dict(data=8)),
    ('dense', True, dict(fsdp=8)),
    ('dense', False, dict(fsdp=4, tensor=2)),
    ('dense', True, dict(data=2, fsdp=2, tensor=2)),
    ('dense', True, dict(slices=2, fsdp=4)),
    ('mixture', False, dict(slices=2, fsdp=2, expert=2)),
    ('window', True, dict(fsdp=2, context=2, tensor=2)),
    ('window', False, dict(data=2, context=4)),
    ('mixture', False, dict(fsdp=2, expert=4)),
    ('mixture', True, dict(fsdp=2, expert=2, tensor=2)),
    ('replayed', True, dict(context=2, expert=4)),
    ('sinks', True, dict(fsdp=2, expert=2, tensor=2)),
    ('latent', True, dict(fsdp=2, context=2, tensor=2)),
    ('recurrent', False, dict(fsdp=4, tensor=2)),
    ('recurrent', True, dict(data=2, fsdp=2, tensor=2)),
    ('recurrent mixture', True, dict(fsdp=2, expert=2, tensor=2)),
    ('dense', True, dict(fsdp=2, decode=2, tensor=2)),
    ('window', False, dict(context=2, decode=4)),
    ('mixture', True, dict(fsdp=2, expert=2, decode=2)),
    ('latent', True, dict(fsdp=2, decode=4)),
    ('recurrent', True, dict(fsdp=4, decode=2)),
  ],
)
def test_every_mesh_gives_the_tokens_and_metrics_of_one_device(model, remat, mesh):
  one, one_state = alone('mixture' if model == 'replayed' else model)
  many, many_state = train(spec(model, remat, **mesh))
  assert_same(one, one_state, many, many_state)
  _assert_sharded(many_state, mesh)


@pytest.mark.parametrize('travels, most_rows', [(False, 180), (True, 60)])
def test_experts_that_take_tokens_in_parts_give_the_same(travels, most_rows, monkeypatch):
  """180 rows: 15 tokens of each of 4 devices, with 3 experts each; the last part has fewer.

  Of tokens that travel to their experts a device needs room for a quarter of the rows, and for some to spare.
  """
  one, one_state = alone('mixture')
  rows, exchanged, mix, exchange = set(), set(), moe._over_features, token_exchange.exchange

  def watched(config, tokens, weights):
    rows.add(tokens[1].size)
    return mix(config, tokens, weights)

  def watched_exchange(fn, tokens, weights, experts):
    exchanged.add(tokens[0].shape)
    return exchange(fn, tokens, weights, experts)

  monkeypatch.setattr(moe, '_MOST_ROWS', most_rows)
  monkeypatch.setattr(moe, '_over_features', watched)
  monkeypatch.setattr(token_exchange, 'exchange', watched_exchange)
  if travels:
    monkeypatch.setattr(token_exchange, '_FEWEST_ROWS', 1)
  many, many_state = train(spec('mixture', True, fsdp=2, expert=4))
  assert bool(exchanged) == travels
  assert rows and max(rows) <= most_rows, (rows, exchanged)
  assert_same(one, one_state, many, many_state)


def _assert_sharded(state, mesh):
  """Weights and moments are sharded over the devices as the rules state, and not replicated."""
  fsdp, expert = (mesh.get(a, 1) for a in ('fsdp', 'expert'))
  tensor = mesh.get('tensor', 1) * mesh.get('decode', 1)
  for tree in (state.params, state.opt_state):
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
      part = leaf.addressable_shards[0].data.shape
      name = sharding.path_name(path)
      if name.endswith('layers/0/q/kernel'):
        assert part == (32 // fsdp // expert, 32 // tensor), name
      if name.endswith('layers/0/delta_v/kernel'):
        assert part == (32 // fsdp // expert, 4 * 4 // tensor), name
      if name.endswith('layers/0/delta_decay/kernel'):
        assert part == (32 // fsdp // expert, 4 // tensor), name
      if name.endswith('layers/0/delta_out/kernel'):
        assert part == (4 * 4 // tensor, 32 // fsdp // expert), name
      if name.endswith('layers/0/kv_b/kernel'):
        assert part == (16 // fsdp, 4 * (8 + 6) // tensor), name
      if name.endswith('layers/1/experts/down/kernel'):
        assert part == (8 // expert, 24 // tensor, 32 // fsdp), name


def test_rows_that_the_experts_axis_does_not_divide_are_replicated_over_it():
  p = spec('mixture', False, expert=4)
  tokens, mask = make_prompts(0).tokens_PxL[:3], np.ones((3, L), bool)
  forward = lambda p, params: decoder.forward(p.model.config, params, tokens, mask)  # noqa: E731
  params = decoder.init(p.model.config, 0)
  placed = jax.device_put(params, sharding.layout(params, p.layout.mesh))
  many = jax.jit(functools.partial(sharding.on_mesh(forward), p))(placed)
  np.testing.assert_allclose(many, jax.jit(functools.partial(forward, p))(params), atol=1e-4)


def test_the_update_shards_the_tokens_of_a_row_over_context():
  """The widest arrays of a layer, [bins, tokens, 48], hold half the tokens on each of two devices."""
  p = spec('dense', False, context=2)
  size = p.update.packing._replace(bins=3, tokens=18, predicted=12)
  p = p._replace(update=p.update._replace(packing=size))
  arguments = train_state.abstract_state(p), empty_records.empty_batch(p)
  text = programs.compile_update(p).lower(*arguments).compile().as_text()
  assert f'f32[{size.bins},{size.tokens // 2},48]' in text
  assert f'f32[{size.bins},{size.tokens},48]' not in text


@pytest.mark.parametrize('mesh', [dict(fsdp=4), dict(fsdp=2, tensor=2)])
def test_the_head_is_gathered_and_its_gradient_summed_once_and_not_per_chunk(mesh):
  p = spec('dense', False, **mesh)
  p = p._replace(model=p.model._replace(head_chunk_tokens=2))
  arguments = train_state.abstract_state(p), empty_records.empty_batch(p)
  text = programs.compile_update(p).lower(*arguments).compile().as_text()
  along = lambda e: hlo_update.mesh_axes(e.attributes, p.layout.mesh.shape)  # noqa: E731
  head_collectives = [
    e for e in hlo_decode.all_collectives(text) if 'shard_map' in e.source and 'fsdp' in along(e)
  ]
  assert head_collectives and all(e.times == 1 for e in head_collectives), head_collectives


@pytest.mark.parametrize('axis', ['fsdp', 'decode'])
def test_the_update_communicates_weights_and_not_rows(axis):
  """Four microbatches on four devices: the traffic is a few times the weights for each, however many the rows."""
  p = spec('dense', True, **{axis: 4})
  decode = p.rollout.decode._replace(max_tokens=64)
  p = p._replace(
    rollout=p.rollout._replace(decode=decode),
    layout=p.layout._replace(prompt_tokens=64),
    update=p.update._replace(
      packing=p.update.packing._replace(bins=1, tokens=64 + 63, predicted=64)
    ),
  )
  assert full_bins(p) == 4
  arguments = train_state.abstract_state(p), empty_records.empty_batch(p)
  text = programs.compile_update(p).lower(*arguments).compile().as_text()
  weights = 4 * sum(x.size for x in jax.tree.leaves(arguments[0].params))
  received = hlo_update.collective_bytes(text, p.layout.mesh.shape, 4)
  # A microbatch gathers them twice and sums their gradient once, which is as much as two gathers.
  assert set(received) == {axis} and received[axis] < 4 * 5 * weights
  rows = 4 * P * G * 64 * 32
  assert received[axis] < 7 * rows, 'each of two layers has seven products of rows and weights'


def test_experts_that_the_mesh_does_not_divide_are_refused():
  with pytest.raises(UserError, match='config.mesh.expert=3 does not divide the 8 experts'):
    spec('mixture', False, expert=3)
  with pytest.raises(UserError, match='config.mesh.expert=2 does not divide'):
    spec('dense', False, expert=2)


def test_key_heads_of_recurrent_layers_that_the_mesh_does_not_divide_are_refused():
  with pytest.raises(
    UserError, match='config.mesh.tensor × decode = 4 devices do not divide the 2 key'
  ):
    spec('recurrent', False, decode=2, tensor=2)


def test_prompts_that_the_rows_of_an_update_do_not_divide_are_refused():
  with pytest.raises(
    UserError, match='not a multiple of data × fsdp × expert × decode = 3 devices'
  ):
    spec_from_config.check_rows(configs.load('tiny', ['--config.prompts=8']), _mesh(decode=3))


@pytest.mark.parametrize(
  'rules, message',
  [
    ([('q/kernel',)], 'must be'),
    ([('q/kernel', ('rows', None))], 'must be'),
    ([('(q', ('fsdp', None))], 'no regular expression'),
  ],
)
def test_malformed_rules_are_refused(rules, message):
  with pytest.raises(UserError, match=f'config.mesh.rules.*{message}'):
    sharding.rules(rules)


def test_rules_of_the_config_precede_the_others():
  mesh = sharding.make_mesh(dict(fsdp=2, tensor=2), jax.devices()[:4])
  own = sharding.rules([('layers/0/q/kernel$', ('tensor', 'fsdp'))])
  placed = sharding.layout(decoder.abstract_params(DENSE), mesh, own)['layers']
  specs = [tuple(placed[i]['q']['kernel'].spec) for i in (0, 1)]
  assert specs == [('tensor', 'fsdp'), ('fsdp', 'tensor')]

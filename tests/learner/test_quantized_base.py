"""LoRA over a quantized base: gradients, samples, memory, one device and eight, stopped and resumed."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_job
from test_step import MODEL, T, assert_close, config, graded, gradient_of, spec, train

from jaxrl_llm import step as steps
from jaxrl_llm import train as runs
from jaxrl_llm.commands import sharding_report
from jaxrl_llm.config import loading as configs
from jaxrl_llm.distributed import sharding
from jaxrl_llm.learner import compile as programs
from jaxrl_llm.learner import device_memory, empty_records, lora, microbatch
from jaxrl_llm.learner import state as train_state
from jaxrl_llm.learner.spec_from_config import make_spec
from jaxrl_llm.models import blockwise, decoder
from jaxrl_llm.runner import validate
from jaxrl_llm.types import UserError
from tests.learner.test_step_methods import chosen

ON = dict(rank=3, alpha=6.0, targets='(q|k|v|o|gate|up|down)$')
DTYPES = blockwise.DTYPES


def quantized(base_dtype='nf4', **changes):
  return spec(lora=ON | dict(base_dtype=base_dtype), **changes)


def drawn(seed=0):
  """An adapter whose B is not 0, as after some training."""
  adapter = lora.init(quantized().model.lora, decoder.init(MODEL, 0), seed)
  r = np.random.default_rng(seed)
  return jax.tree.map(lambda x: jnp.asarray(x + 0.1 * r.normal(size=x.shape), jnp.float32), adapter)


def unpacked(dtype='nf4', model=MODEL):
  """The base as plain float32 kernels."""
  base = blockwise.quantize_params(decoder.init(model, 0), dtype, 'float32')
  unpack = lambda x: blockwise.dequantize(x) if blockwise.is_blockwise(x) else jnp.asarray(x)  # noqa: E731
  return jax.tree.map(unpack, base, is_leaf=blockwise.is_blockwise)


def states(dtype='nf4', **changes):
  """(spec, state) of the quantized base, and of plain LoRA over the same base unpacked."""
  p, plain = quantized(dtype, **changes), spec(lora=ON, **changes)
  return (
    (p, train_state.init_state(p, decoder.init(MODEL, 0), adapter=drawn())),
    (plain, train_state.init_state(plain, unpacked(dtype), adapter=drawn())),
  )


@pytest.mark.parametrize('dtype, remat', [('nf4', True), ('nf4', False), ('int8', True)])
def test_losses_and_gradients_are_those_of_lora_over_the_unpacked_base(dtype, remat):
  """In rows that share their prompts; the sums are of the losses and of what else is in the metrics."""
  batch = graded(spec(), lora.merge(unpacked(dtype), drawn(), 6.0))
  got, want = (
    gradient_of(p, batch, state) for p, state in states(dtype, learner=dict(remat=remat))
  )
  assert_close(got[1:], want[1:], 1e-4)
  got, want = got[0].params, want[0].params
  size = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(want))
  assert size > 1e-2
  assert_close(got, want, 1e-5 * size)


def test_no_gradient_of_a_frozen_matrix_is_computed():
  """Products of the shape of a feed-forward block's second kernel, [48, 32], or of its half."""

  def products(p):
    arguments = train_state.abstract_state(p), empty_records.empty_batch(p)
    text = programs.compile_update(p).lower(*arguments).compile().as_text()
    assert ' dot(' in text
    return len(re.findall(r'= f32\[(48|24),32\]\S* dot\(', text))

  assert products(spec()) > 0 == products(quantized())


def test_an_update_unpacks_the_base_within_the_loop_over_layers():
  """Every nibble is shifted out of one layer's kernel, so that no two layers are unpacked at a time."""
  p = quantized(learner=dict(remat=True))
  state, batch = train_state.abstract_state(p), empty_records.empty_batch(p)
  traced = jax.make_jaxpr(lambda state, batch: gradient_of(p, batch, state))(state, batch)

  def shifts(jaxpr, is_in_loop):
    for equation in jaxpr.eqns:
      if equation.primitive.name == 'shift_right_logical' and equation.outvars[0].aval.ndim > 1:
        yield is_in_loop
      loop = equation.primitive.name == 'scan' and equation.params['length'] == MODEL.layers
      for inner in jax.extend.core.jaxprs_in_params(equation.params):
        yield from shifts(inner, is_in_loop or loop)

  assert set(shifts(traced.jaxpr, False)) == {True}


@pytest.mark.parametrize('dtype, slots', [('nf4', 0), ('nf4', 6), ('int8', 0)])
def test_tokens_are_sampled_from_the_quantized_policy_that_is_trained(dtype, slots):
  """They are those of LoRA over the unpacked base with a slot for each row."""
  (p, state), (plain, other) = states(dtype)
  p = p._replace(rollout=p.rollout._replace(decode=p.rollout.decode._replace(slots=slots)))
  prompts = graded(spec(), unpacked(dtype)).prompts
  rollout = jax.jit(lambda s: steps.generate(p, s, prompts)[0])(state)
  want = jax.jit(lambda s: steps.generate(plain, s, prompts)[0])(other)
  np.testing.assert_array_equal(rollout.tokens_BxT, want.tokens_BxT)
  beside = microbatch.policy_weights(p, state.base, state.params)
  tokens_BxT = jnp.asarray(rollout.tokens_BxT)
  again = jax.jit(lambda w: microbatch.log_probs(p, w, prompts, tokens_BxT)[0])(beside)
  real = np.arange(T)[None] < np.asarray(rollout.length_B)[:, None]
  np.testing.assert_allclose(again[real], np.asarray(rollout.logp_BxT)[real], atol=2e-5)
  # Evaluation samples with the same weights.
  evaluated = train_state.sampling_state(train_state.sampling_weights(p, state))
  again = jax.jit(lambda s: steps.generate(p, s, prompts)[0])(evaluated)
  np.testing.assert_array_equal(again.logp_BxT, rollout.logp_BxT)


def test_the_quantized_base_is_the_reference_and_no_step_changes_it():
  p = quantized(objective=chosen(kl=dict(fn='k3', coef=0.1)))
  state = train_state.init_state(p, decoder.init(MODEL, 0))
  before = jax.device_get(state.base)
  batch = graded(spec(), unpacked())
  update = programs.compile_update(p)
  state, first = update(state, batch)
  state, second = update(state, batch)
  assert state.reference is None
  assert float(first['actor/kl_loss']) == 0 and float(second['actor/kl_loss']) > 1e-5
  jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(state.base))


@pytest.mark.parametrize('dtype', DTYPES)
def test_a_merged_model_is_the_unpacked_base_and_the_adapter(dtype):
  (p, state), _ = states(dtype)
  merged = train_state.merged_weights(p, state)
  want = lora.merge(unpacked(dtype), drawn(), 6.0)
  assert jax.tree.structure(merged) == jax.tree.structure(want)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), merged, want)
  assert {x.dtype for x in jax.tree.leaves(merged)} == {jnp.dtype('float32')}


@pytest.mark.parametrize('dtype', DTYPES)
def test_bytes_of_the_base_are_as_planned(dtype):
  """32 numbers of NF4 take 16 bytes, their scale 4; kernels with 48 inputs have a scale for 16."""
  p = quantized(dtype, dtype='bfloat16')
  state = train_state.init_state(p, decoder.init(MODEL, 0))
  held = lambda tree: sum(x.nbytes for x in jax.tree.leaves(tree))  # noqa: E731
  assert sharding_report.state_bytes(p)['base'] == held(state.base)
  assert device_memory.state_bytes(p) == held(state)
  rows = sharding_report.rows(p)
  kernels = [row for row in rows if '/kernel/' in row.name]
  wide, narrow = 32 * (32 + 16 + 16 + 32 + 48 + 48), 48 * 32
  numbers = (wide + narrow) // (2 if dtype == 'nf4' else 1)
  want = MODEL.layers * (numbers + wide // 32 * 4 + narrow // 16 * 4)
  assert sum(row.update_bytes for row in kernels) == want
  assert sum(row.decode_bytes for row in kernels) == want
  assert device_memory.sampling_weight_bytes(p) == sum(row.decode_bytes for row in rows)


WIDE = dataclasses.replace(MODEL, width=128, mlp=256, head_dim=32)


@pytest.mark.parametrize('mesh', [dict(data=2, fsdp=2, tensor=2), dict(fsdp=2)])
def test_every_mesh_gives_the_tokens_and_metrics_of_one_device(mesh):
  c = config(lora=ON | dict(base_dtype='nf4'), learner=dict(remat=True))
  c.mesh.update(mesh)
  count = int(np.prod(list(mesh.values())))
  one, many = (
    make_spec(c, WIDE, (3, 7), sharding.make_mesh(sizes, jax.devices()[:n]))
    for sizes, n in (({}, 1), (mesh, count))
  )
  params = decoder.init(WIDE, 0)
  (single, state), (other, state8) = train(one, 3, params), train(many, 3, params)
  for (tokens, metrics), (tokens8, metrics8) in zip(single, other, strict=True):
    np.testing.assert_array_equal(tokens, tokens8)
    for name, value in metrics.items():
      np.testing.assert_allclose(metrics8[name], value, atol=1e-4, rtol=1e-4, err_msg=name)
  assert_close(state.params, state8.params, 1e-4)
  tensor = mesh.get('tensor', 1)
  local = lambda x: x.addressable_shards[0].data.shape  # noqa: E731
  q, down = (state8.base['layers'][1][name]['kernel'] for name in ('q', 'down'))
  assert local(q.data) == (64 // 2, 128 // tensor) and local(q.scale) == (2 // 2, 128 // tensor)
  assert local(down.data) == (128 // tensor, 64) and local(down.scale) == (4 // tensor, 64)


def test_a_mesh_that_cuts_blocks_is_refused():
  c = config(lora=ON | dict(base_dtype='nf4'), prompts=4)
  c.mesh.update(fsdp=4)
  with pytest.raises(UserError, match="cuts the 128 inputs of 'gate' into 4 parts.* 2 blocks"):
    make_spec(c, WIDE, (3, 7), sharding.make_mesh(c.mesh, jax.devices()[:4]))


def test_a_mixture_of_experts_is_refused():
  mixture = dataclasses.replace(MODEL, experts=4, experts_per_token=2)
  c = config(lora=ON | dict(targets='^(q|k|v|o)$', base_dtype='int8'))
  with pytest.raises(UserError, match="base_dtype='int8' does not go with a model with experts=4"):
    make_spec(c, mixture, (3, 7), sharding.make_mesh(c.mesh, jax.devices()[:1]))


def test_an_unknown_type_is_refused(tmp_path):
  validated = configs.load(
    tiny_job.config_file(tmp_path, sft=None, lora=ON | dict(base_dtype='int4'))
  )
  with pytest.raises(UserError, match="base_dtype='int4' must be one of: auto, int8, nf4"):
    validate.validate(validated)


RUN = dict(
  mode='split',
  steps=4,
  sft=dict(steps=0),
  objective=dict(kl=dict(fn='k3', coef=0.05), sft_loss=dict(fn='likelihood', weight=1.0)),
  optimizer=dict(learning_rate=1e-2),
  rewards=dict(fn='exact', workers=1),
  lora=dict(rank=2, alpha=4.0, base_dtype='nf4'),
)


def test_stopped_and_resumed_it_is_the_uninterrupted_run_bit_for_bit(tmp_path):
  def run(folder, count):
    c = configs.load(tiny_job.config_file(tmp_path, **RUN | dict(steps=count)))
    runs.run(c, str(tmp_path / folder), sharding.make_mesh(c.mesh, jax.devices()[:1]))
    return tiny_job.rows(tmp_path / folder)

  want = run('whole', 4)
  run('parts', 2)
  assert run('parts', 4) == want
  losses = [row['actor/sft_loss'] for row in want[1:]]
  assert want[-1]['actor/kl_loss'] > 0 and losses[-1] < losses[0] - 0.1

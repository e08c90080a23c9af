"""Rounded weights in the whole step: what sampler and trainer then differ by, and what is refused."""

from __future__ import annotations

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import step as steps
from jaxrl_llm.config import loading as configs
from jaxrl_llm.distributed import sharding
from jaxrl_llm.evaluation import evaluate
from jaxrl_llm.learner import compile as programs
from jaxrl_llm.learner import empty_records, generate, microbatch, precision
from jaxrl_llm.learner import state as train_state
from jaxrl_llm.learner.spec_from_config import make_spec
from jaxrl_llm.models import decoder
from jaxrl_llm.runner import sft, validate
from jaxrl_llm.types import Batch, ModelConfig, Prompts, UserError

DENSE = ModelConfig(
  vocab=50, width=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=48, max_tokens=64
)
MIXTURE = ModelConfig(
  vocab=50, width=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=24, max_tokens=64,
  experts=8, experts_per_token=2, norm_top_k=True, tied=False,
)  # fmt: skip
P, G, L, T = 4, 2, 8, 6
REMEDY = "set config.objective.importance_correction.fn='token_truncate'"


def config(weights='int8', **changes):
  c = configs.default()
  c.prompts, c.rollouts, c.prompt_tokens, c.completion_tokens = P, G, L, T
  c.rollout.weights_dtype = weights
  c.optimizer.learning_rate = 1e-2
  with c.ignore_type():
    c.update(changes)
  return c


def spec(weights='int8', model=DENSE, mesh=None, **changes):
  c = config(weights, **changes)
  devices = jax.devices()[: int(np.prod(list((mesh or {}).values()), dtype=int))]
  return make_spec(c, model, (3, 7), sharding.make_mesh(mesh or {}, devices))


def make_prompts():
  r = np.random.default_rng(0)
  tokens_PxL = r.integers(0, 50, (P, L)).astype(np.int32)
  zeros = np.zeros(P, np.int32)
  return Prompts(
    tokens_PxL, r.integers(1, L + 1, P).astype(np.int32), np.arange(P, dtype=np.int32), zeros,
    zeros.astype(np.float32),
  )  # fmt: skip


def params_of(model):
  return jax.tree.map(lambda x: x * 1.5, decoder.init(model, 0))


def scored(spec):
  """What was sampled, with the log-probabilities recorded; and what the update's pass says of it."""

  @jax.jit
  def run(params):
    prompts = jax.tree.map(jnp.asarray, make_prompts())
    sampled = generate.generate(spec, train_state.sampling_state(params), prompts)[0]
    batch = Batch(prompts, sampled, sampled.weight_B, sampled.weight_B)
    with jax.sharding.use_abstract_mesh(spec.layout.mesh.abstract_mesh):
      return sampled, microbatch.all_log_probs(spec, params, microbatch.pack(spec, batch))[0]

  state = train_state.init_state(spec, params_of(spec.model.config))
  return jax.tree.map(np.asarray, run(state.params))


def gap(sampled, logp_BxT):
  real_BxT = np.arange(T)[None] < sampled.length_B[:, None]
  return np.abs(sampled.logp_BxT - logp_BxT)[real_BxT]


@pytest.mark.parametrize('weights, least', [('int8', 1e-3), ('float8_e4m3fn', 1e-2)])
def test_the_trainer_differs_by_the_rounding_unless_it_rounds_likewise(weights, least):
  apart, logp_BxT = scored(spec(weights))
  rounded, same_BxT = scored(spec(weights, learner=dict(quantize=True)))
  np.testing.assert_array_equal(apart.tokens_BxT, rounded.tokens_BxT)
  np.testing.assert_array_equal(apart.logp_BxT, rounded.logp_BxT)
  assert gap(apart, logp_BxT).mean() > least
  assert gap(rounded, same_BxT).max() < 2e-5


def test_rounded_experts_are_those_of_the_trainer_and_the_same_on_eight_devices():
  single, single_BxT = scored(spec('int8', MIXTURE, learner=dict(quantize=True)))
  mesh = dict(fsdp=2, expert=2, tensor=2)
  many, many_BxT = scored(spec('int8', MIXTURE, mesh, learner=dict(quantize=True)))
  assert gap(single, single_BxT).max() < 2e-5
  np.testing.assert_array_equal(many.tokens_BxT, single.tokens_BxT)
  np.testing.assert_allclose(many.logp_BxT, single.logp_BxT, atol=2e-5)
  np.testing.assert_allclose(many_BxT, single_BxT, atol=2e-5)


def train(spec):
  """Two steps: tokens and metrics of the second, and the weights."""
  state = train_state.init_state(spec, params_of(DENSE))
  fn, batch = steps.compile_step(spec), empty_records.empty_batch(spec)
  for _ in range(2):
    state, sampled, metrics = fn(state, batch, make_prompts(), None, None, np.int32(T))
    sampled = jax.tree.map(np.asarray, sampled)
    right_B = (sampled.tokens_BxT[:, 0] % 2).astype(np.float32)
    batch = Batch(make_prompts(), sampled, right_B, right_B)
  return sampled.tokens_BxT, {k: float(v) for k, v in metrics.items()}, state.params


def test_a_step_of_one_precision_is_the_same_on_eight_devices():
  """Weights move, in float32, and the sampler is where the trainer is."""
  tokens, metrics, params = train(spec(learner=dict(quantize=True)))
  tokens8, metrics8, params8 = train(spec(learner=dict(quantize=True), mesh=dict(fsdp=4, tensor=2)))
  np.testing.assert_array_equal(tokens, tokens8)
  for name, value in metrics.items():
    np.testing.assert_allclose(metrics8[name], value, atol=1e-4, rtol=1e-4, err_msg=name)
  for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(params8), strict=True):
    assert a.dtype == b.dtype == jnp.float32
    np.testing.assert_allclose(a, b, atol=1e-4)
  assert 0 < metrics['training/rollout_probs_diff_max'] < 1e-5 < metrics['actor/update_norm']


def test_the_decode_loop_reads_numbers_of_one_byte_and_converts_none_before():
  """As lowered: of kernels, the loop carries int8 alone.

  What XLA makes of it for a TPU: tests/commands/test_compile_report.py.
  """
  made = spec()
  run = jax.jit(lambda p, q: generate.generate(made, train_state.sampling_state(p), q)[0])
  text = run.lower(params_of(DENSE), make_prompts()).as_text()
  D, d = DENSE.width, DENSE.head_dim
  shapes = {(D, 4 * d), (D, 2 * d), (D, DENSE.mlp), (DENSE.mlp, D)}
  carried = collections.Counter()
  for loop in re.findall(r'stablehlo\.while\(.*?\n? *: (.*)', text):
    for rows, columns, dtype in re.findall(r'tensor<(\d+)x(\d+)x(\w+)>', loop):
      if (int(rows), int(columns)) in shapes:
        carried[dtype] += 1
  assert carried == {'i8': 7 * DENSE.layers}


def test_evaluation_reads_what_is_saved(monkeypatch):
  dtypes = []
  monkeypatch.setattr(
    programs, 'compile_generate', lambda spec: dtypes.append(spec.model.weights_dtype)
  )
  table = type('Table', (), dict(rows=[], tokens=[]))
  sampling = dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
  judging = evaluate.Scoring(None)
  evaluate.make_evaluator(spec(learner=dict(quantize=True)), table, None, judging, 2, sampling)
  assert dtypes == ['float32']


@pytest.mark.parametrize('quantize_update, reads', [(False, 'float32'), (True, 'int8')])
def test_a_supervised_start_is_not_refused_for_rounded_sampling(
  monkeypatch, quantize_update, reads
):
  """Its objective has no ratio. It learns with rounded weights where training does."""

  class Made(Exception):
    pass

  def compile_update(spec):
    raise Made(spec.model.weights_dtype, spec.update.quantize)

  monkeypatch.setattr(programs, 'compile_update', compile_update)
  changes = dict(
    learner=dict(quantize=quantize_update),
    objective=dict(importance_correction=dict(fn='token')),
    sft=dict(steps=1),
  )
  state = train_state.sampling_state(None)
  with pytest.raises(Made) as error:
    sft.run(config(**changes), spec(**changes), state, None, None, lambda loss: None)
  assert error.value.args == (reads, quantize_update)


def refused(weights='int8', **changes):
  c = config(weights, **changes)
  with pytest.raises(UserError) as caught:
    validate.validate(c)
    make_spec(c, DENSE, (3,), sharding.make_mesh({}, jax.devices()[:1]))
  return str(caught.value)


@pytest.mark.parametrize(
  'objective, names',
  [
    (dict(old_policy=dict(fn='before')), "config.objective.old_policy.fn='before'"),
    (dict(old_policy=dict(fn='average', decay=0.9)), "config.objective.old_policy.fn='average'"),
    (dict(ratio=dict(fn='one')), "config.objective.ratio.fn='one'"),
  ],
)
def test_an_objective_that_ignores_the_rounding_is_refused(objective, names):
  message = refused(objective=objective)
  assert message.startswith("config.rollout.weights_dtype='int8'") and names in message
  assert REMEDY in message and message.count('.  ') == 0
  corrected = objective | dict(importance_correction=dict(fn='token_truncate'))
  assert spec(objective=corrected).model.weights_dtype == 'int8'
  assert spec(objective=objective, learner=dict(quantize=True)).update.quantize
  assert spec('auto', objective=objective).model.weights_dtype == 'float32'


@pytest.mark.parametrize(
  'objective, warns',
  [
    ({}, True),
    (dict(old_policy=dict(fn='recorded')), True),
    (dict(ratio=dict(fn='direct'), old_policy=dict(fn='before')), True),
    (dict(importance_correction=dict(fn='token_truncate')), False),
  ],
)
def test_ratios_to_recorded_log_probs_are_accepted_with_a_warning(monkeypatch, objective, warns):
  warnings = []
  monkeypatch.setattr(
    precision.logging, 'warning', lambda text, *args: warnings.append(text % args)
  )
  spec(objective=objective)
  assert len(warnings) == warns and all(REMEDY in text for text in warnings)
  spec('auto', objective=objective)
  spec(objective=objective, learner=dict(quantize=True))
  assert len(warnings) == warns


@pytest.mark.parametrize(
  'weights, changes, says',
  [
    ('float32', dict(dtype='bfloat16'), "'float32' is wider than bfloat16"),
    (
      'auto',
      dict(learner=dict(quantize=True)),
      "does not go with config.rollout.weights_dtype='auto'",
    ),
    ('bfloat16', dict(dtype='bfloat16', learner=dict(quantize=True)), 'rounds none'),
  ],
)
def test_types_wider_than_compute_are_refused(weights, changes, says):
  assert says in refused(weights, **changes)


def test_an_unknown_type_is_refused():
  with pytest.raises(UserError, match="weights_dtype='int4' must be one of: auto, float32, bfl"):
    validate.validate(config('int4'))

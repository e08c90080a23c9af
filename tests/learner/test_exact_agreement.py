"""Log-probs of sampling and update in bfloat16 with learner.agreement=exact: no bit differs."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import step as steps
from jaxrl_llm.config import loading as configs
from jaxrl_llm.config import schema
from jaxrl_llm.distributed import sharding
from jaxrl_llm.learner import compile as programs
from jaxrl_llm.learner import empty_records, generate, microbatch, packing, precision
from jaxrl_llm.learner import state as train_state
from jaxrl_llm.learner.spec_from_config import make_spec
from jaxrl_llm.models import decoder, exact
from jaxrl_llm.types import Batch, ModelConfig, Prompts, UserError

MODEL = ModelConfig(
  vocab=300, width=64, layers=2, heads=4, kv_heads=2, head_dim=16, mlp=96, max_tokens=128,
  qk_norm='head',
)  # fmt: skip
P, G, L, T = 4, 4, 13, 20
ENDS = tuple(range(0, 300, 12))


@pytest.fixture
def exact_products():
  if not exact.has_exact_products():
    pytest.skip('products of bfloat16 on this CPU depend on the number of rows')


def spec(agreement='exact', model=MODEL, **changes):
  c = configs.default()
  c.dtype, c.learner.agreement, c.optimizer.learning_rate = 'bfloat16', agreement, 1e-3
  c.prompts, c.rollouts, c.prompt_tokens, c.completion_tokens, c.rollout.slots = P, G, L, T, 6
  with c.ignore_type():
    for name, value in changes.items():
      section, _, field = name.rpartition('__')
      (c[section] if section else c)[field] = value
  return make_spec(c, model, ENDS, sharding.make_mesh(c.mesh, jax.devices()[:1]))


def weights(spec):
  """Random weights with norms that bfloat16 rounds."""
  params = decoder.init(spec.model.config, 0)
  random = np.random.default_rng(0)
  is_norm = lambda path: str(getattr(path[-1], 'key', '')) == 'scale'  # noqa: E731
  spread = lambda path, x: x * random.uniform(0.5, 1.5, x.shape) if is_norm(path) else x  # noqa: E731
  return jax.tree.map(np.float32, jax.tree_util.tree_map_with_path(spread, params))


def make_prompts(seed=0):
  """Prompts of 1 to L tokens."""
  r = np.random.default_rng(seed)
  length_P = np.linspace(1, L, P).astype(np.int32)
  index_P = (seed * P + np.arange(P)).astype(np.int32)
  tokens_PxL = r.integers(0, MODEL.vocab, (P, L)).astype(np.int32)
  return Prompts(tokens_PxL, length_P, index_P, index_P * 0, np.zeros(P, np.float32))


@functools.cache
def both_halves(**changes):
  """Log-probs of all sampled tokens: recorded, and computed again by the program that the update runs."""
  s = spec(**changes)
  params, prompts = weights(s), make_prompts()
  state = train_state.init_state(s, params)

  def sample(spec, state):
    return generate.generate(spec, state, prompts)[0]

  def score(spec, state, rollout):
    batch = Batch(prompts, rollout, rollout.length_B, rollout.length_B)
    weights = microbatch.policy_weights(spec, state.base, state.params)
    return microbatch.all_log_probs(spec, weights, microbatch.pack(spec, batch))[0]

  compiled = lambda fn: jax.jit(  # noqa: E731
    functools.partial(sharding.on_mesh(fn), s), compiler_options=programs.options(s)
  )
  rollout = compiled(sample)(state)
  learned_BxT = compiled(score)(state, rollout)
  real_BxT = np.arange(T)[None] < np.asarray(rollout.length_B)[:, None]
  assert len(set(rollout.length_B.tolist())) > 4
  return np.asarray(rollout.logp_BxT)[real_BxT], np.asarray(learned_BxT)[real_BxT]


@pytest.mark.usefixtures('exact_products')
@pytest.mark.parametrize(
  'changes',
  [
    {},
    dict(rollout__slots=1),
    dict(temperature=0.7, learner__microbatch_tokens=1024),
    dict(lora__rank=4, learner__remat=True),
  ],
  ids=['slots', 'one slot', 'temperature', 'adapter'],
)
def test_no_bit_differs(changes):
  sampled, learned = both_halves(**changes)
  np.testing.assert_array_equal(sampled, learned)


@pytest.mark.usefixtures('exact_products')
def test_a_query_head_for_each_key_head():
  """Then a slot's products of attention have one row."""
  one = dataclasses.replace(MODEL, heads=2, tied=False)
  np.testing.assert_array_equal(*both_halves(model=one))


@pytest.mark.usefixtures('exact_products')
def test_slots_change_no_bit_of_a_sample():
  """As many slots as rows and one slot: the same tokens with the same log-probs."""
  np.testing.assert_array_equal(both_halves()[0], both_halves(rollout__slots=1)[0])


def test_without_the_setting_bits_differ():
  sampled, learned = both_halves(agreement='off')
  assert (sampled != learned).mean() > 0.2


@pytest.mark.usefixtures('exact_products')
def test_the_gradient_pass_of_a_step_has_the_recorded_log_probs():
  s = spec()
  state = train_state.init_state(s, weights(s))
  step, batch = steps.compile_step(s), empty_records.empty_batch(s)
  for index in range(3):
    prompts = make_prompts(index)
    state, rollout, metrics = step(state, batch, prompts, None, None, np.int32(T))
    score_B = np.random.default_rng(index).normal(size=P * G).astype(np.float32)
    batch = Batch(prompts, jax.tree.map(np.asarray, rollout), score_B, score_B)
    assert metrics['training/rollout_probs_diff_max'] == 0
  assert metrics['training/trained_tokens'] > 50
  assert metrics['actor/grad_norm'] > 0


def test_the_gradient_is_that_of_the_plain_model():
  """Sums in another order and of rounded weights; in float32 the exact functions are those of the model."""
  tokens_BxS = jnp.asarray(np.random.default_rng(0).integers(0, MODEL.vocab, (2, 9)))
  params = decoder.init(MODEL, 0)

  def loss(params, config):
    logits = decoder.forward(config, params, tokens_BxS, jnp.ones((2, 9)))
    partition = exact.partition_and_entropy(logits)[0] if config.is_exact else None
    plain = jax.scipy.special.logsumexp(logits, axis=-1)
    return (jnp.sin(logits).sum(-1) + (plain if partition is None else partition)).sum()

  both = [
    jax.jit(jax.grad(loss), static_argnums=1)(params, config)
    for config in (MODEL, dataclasses.replace(MODEL, is_exact=True))
  ]
  # Cosines and sines have 16 bits.
  close = lambda a, b: np.linalg.norm(a - b) < 1e-4 * np.linalg.norm(b)  # noqa: E731
  assert all(jax.tree.leaves(jax.tree.map(close, *both)))


def test_prompts_and_completions_begin_in_even_columns():
  size = packing.PackingSpec(bins=2, tokens=48, predicted=40, rows=4, shares_prompt=True, align=2)
  prompt_P, length_B = np.array([5, 8, 1]), np.array([7, 4, 1, 9, 2, 6])
  rows = packing.Rows(*map(jnp.asarray, (prompt_P, length_B)), jnp.ones(6, bool))
  plan = packing.make_plan(size, rows)
  found = []
  for number in range(-(-int(plan.bins) // size.bins)):
    at = jax.tree.map(np.asarray, packing.lay_out(size, rows, plan, number, 9))
    for bin_, column in np.argwhere(at.copy_NxS > 0):
      is_prompt, place = at.is_prompt_NxS[bin_, column], at.place_NxS[bin_, column]
      assert column % 2 == place % 2
      prompt = at.column_prompt_NxS[bin_, column]
      assert at.position_NxS[bin_, column] == place + (0 if is_prompt else prompt_P[prompt])
      found.append(
        (bool(is_prompt), int(prompt if is_prompt else at.column_row_NxS[bin_, column]), int(place))
      )
    hidden_U = at.source_U[: at.used]
    assert (at.copy_NxS.reshape(-1)[hidden_U] > 0).all()
  completions = [(False, b, i) for b, n in enumerate(length_B) for i in range(n - 1)]
  assert sorted(x for x in found if not x[0]) == completions
  assert {x for x in found if x[0]} == {
    (True, p, i) for p, n in enumerate(prompt_P) for i in range(n)
  }


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    (dict(agreement='always'), "agreement='always' is unknown; choose one of: off, exact"),
    (dict(dtype='float32'), 'float32 on CPUs do, .*set --config.dtype=bfloat16'),
    (dict(completion_tokens=2040), 'need 2054 columns, and with more than 2048'),
    (dict(model=ModelConfig(window=8, sliding=(True,), vocab=9, width=8, layers=1, heads=1,
                            kv_heads=1, head_dim=8, mlp=8, max_tokens=64)), 'a model with inexact'),
  ],
)  # fmt: skip
def test_the_setting_is_refused(monkeypatch, changes, message):
  monkeypatch.setattr(exact, 'has_exact_products', lambda: True)
  with pytest.raises(UserError, match=message):
    spec(**changes)


def test_a_cpu_whose_products_depend_on_rows_is_refused(monkeypatch):
  monkeypatch.setattr(exact, 'has_exact_products', lambda: False)
  with pytest.raises(UserError, match='bfloat16 on this CPU do'):
    spec()


def test_other_devices_are_refused():
  c = schema.typed(configs.default())
  c = schema.replace(c, {'learner.agreement': 'exact'})
  with pytest.raises(UserError, match='devices other than CPUs'):
    precision.is_exact(c, 'bfloat16', on_cpu=False)

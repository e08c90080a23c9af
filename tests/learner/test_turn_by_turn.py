"""A step for every turn, the last one first (configs/agents/seeupo.py): against the loop written out, and its
limits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_step import MODEL, G, P, T, assert_close, config, graded, in_bins, spec

from jaxrl_llm import objective
from jaxrl_llm.distributed import sharding
from jaxrl_llm.learner import compile as programs
from jaxrl_llm.learner import empty_records, microbatch
from jaxrl_llm.learner import state as train_state
from jaxrl_llm.learner.spec_from_config import make_spec
from jaxrl_llm.models import decoder
from jaxrl_llm.objective import turn_masks
from jaxrl_llm.types import Turns, UserError
from tests.learner.test_step_methods import chosen, off_policy, updated

METHOD = dict(
  advantage=dict(fn='raw'),
  credit_assignment=dict(fn='turn_whitened'),
  ratio=dict(fn='sequence'),
  aggregation=dict(fn='sequence_mean'),
)


# Methods that are defined by turns require an environment; batches here have turns of their own.
EPISODES = dict(mode='split', environment=dict(fn='guess'))


def sequential(**more):
  c = config().optimizer
  c.outer = dict(fn='last_turn_first', **more)
  return dict(optimizer=c, **EPISODES)


def talked(batch, most=3):
  """The batch, its rows cut into up to `most` turns of one or two tokens, some with a token given in between."""
  number_BxT = np.full((P * G, T), -1, np.int32)
  for b, length in enumerate(batch.rollout.length_B):
    sampled = 0
    for t in range(length):
      observed = b % 3 == 0 and t == 1 and length > 2
      if not observed:
        number_BxT[b, t] = min(sampled // (1 + b % 2), most - 1)
        sampled += 1
  zeros = np.zeros((P * G, T))
  turns = Turns(number_BxT, zeros.astype(np.float32), zeros.astype(np.int32), zeros[:, 0])
  return batch._replace(rollout=batch.rollout._replace(turns=turns))


@pytest.fixture(scope='module')
def batch():
  return off_policy(graded(spec(), decoder.init(MODEL, 0)))


def by_hand(p, batch, eps):
  """The parameters after a step of each turn, each with its own loss: −Σ_b M_b·A_b·s_b / rows, s_b the turn's ratio."""
  params, number = decoder.init(MODEL, 0), batch.rollout.turns.number_BxT
  advantage = objective.targets(p.objective.method, batch, G).advantage_BxT
  tokens = jnp.asarray(batch.rollout.tokens_BxT)
  score = lambda q: microbatch.log_probs(p, q, batch.prompts, tokens)[0]  # noqa: E731
  ratio = lambda q, old, own: jnp.exp(  # noqa: E731
    jnp.where(own, score(q) - old, 0).sum(1) / jnp.maximum(own.sum(1), 1)
  )

  @jax.jit
  def step(params, memory, m, own):
    old, has = score(params), own.any(1)
    a = jnp.where(own, advantage, 0).max(1) + jnp.where(own, advantage, 0).min(1)
    loss = lambda q: -(m * a * ratio(q, old, own) * has).sum() / has.sum()  # noqa: E731
    change, memory = p.update.optimizer.update(jax.grad(loss)(params), memory, params)
    params = optax.apply_updates(params, change)
    return params, memory, ratio(params, old, own)

  memory, m, multipliers = p.update.optimizer.init(params), np.ones(P * G, np.float32), []
  for k in range(number.max(), -1, -1):
    params, memory, moved = step(params, memory, m, number == k)
    m = np.clip(m * np.clip(moved, 1 - eps, 1 + eps), 1 - eps, 1 + eps)
    multipliers.append(m)
  return params, multipliers


@pytest.mark.parametrize('eps', [0.2, 0.01])
def test_the_update_equals_a_loop_over_turns(batch, eps):
  """The update of several microbatches against one program a turn, with every row's multiplier worked out beside it."""
  batch = talked(batch)
  p = in_bins(spec(objective=chosen(**METHOD), **sequential(eps=eps)), 1)
  got, metrics = updated(p, batch, decoder.init(MODEL, 0))
  want, multipliers = by_hand(p, batch, eps)
  assert int(got.step) == metrics['actor/turns'] == 3
  assert_close(got.params, want, 2e-5)
  # What later turns have become told: some rows count more, some less, and some meet the bounds.
  first, last = multipliers[-2], multipliers[0]
  assert first.min() < 1 < first.max() and np.abs(first - last).max() > 1e-3
  if eps == 0.01:
    assert (np.abs(first - 1) > 0.00999).any()
    free, _ = by_hand(p, batch, 0.5)
    gap = jax.tree.map(lambda x, y: np.abs(x - y).max(), free, want)
    assert max(jax.tree.leaves(gap)) > 1e-4


def test_with_one_turn_it_equals_gspo_normalized_over_the_batch(batch):
  """Two batches of rows that are one turn each, beside the plain step whose old policy is that of before."""
  batch = talked(batch, most=1)
  before = dict(old_policy=dict(fn='before'), importance_correction=dict(fn='token'))
  plain, sequence = (
    spec(objective=chosen(**METHOD, **more), **outer)
    for more, outer in (
      (before, EPISODES),
      (dict(importance_correction=dict(fn='token')), sequential()),
    )
  )
  first, second = (train_state.init_state(p, decoder.init(MODEL, 0)) for p in (plain, sequence))
  for _ in range(2):
    first, _ = programs.compile_update(plain)(first, batch)
    second, metrics = programs.compile_update(sequence)(second, batch)
  assert metrics['actor/turns'] == 1
  assert_close(jax.device_get(second.params), jax.device_get(first.params), 2e-6)
  gap = jax.tree.map(lambda x, y: np.abs(x - y).max(), second.params, decoder.init(MODEL, 0))
  assert max(jax.tree.leaves(gap)) > 1e-3


def test_metrics_cover_all_turns(batch):
  """Tokens, and means over them: with a learning rate of nothing every turn sees the same policy."""
  batch = talked(batch)
  c = sequential()
  c['optimizer'].learning_rate = 0.0
  metrics = updated(spec(objective=chosen(**METHOD), **c), batch, decoder.init(MODEL, 0))[1]
  plain = dict(METHOD, ratio=dict(fn='token'), aggregation=dict(fn='token_mean'))
  want = updated(spec(objective=chosen(**plain), **EPISODES), batch, decoder.init(MODEL, 0))[1]
  assert metrics['training/trained_tokens'] == want['training/trained_tokens'] > 0
  for name in ('actor/entropy', 'training/rollout_probs_diff_mean', 'critic/advantages/mean'):
    np.testing.assert_allclose(metrics[name], want[name], rtol=1e-4, atol=1e-6)
  assert metrics['actor/lr'] == 0


def test_an_empty_batch_changes_nothing_and_eight_devices_agree_with_one(batch):
  batch = talked(batch)
  changes = dict(objective=chosen(**METHOD, kl=dict(fn='k3', coef=0.1)), **sequential())
  want = updated(spec(**changes), batch, decoder.init(MODEL, 0))[0]
  c = config(**changes)
  c.mesh.update(data=2, fsdp=2, tensor=2)
  many = make_spec(c, MODEL, (3, 7), sharding.make_mesh(c.mesh, jax.devices()))
  update, state = (
    programs.compile_update(many),
    train_state.init_state(many, decoder.init(MODEL, 0)),
  )
  state, _ = update(state, batch)
  got = jax.device_get(state)
  assert_close(got.params, want.params, 1e-4)
  empty = talked(empty_records.empty_batch(many))
  state, metrics = update(state, empty)
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), got)
  assert all(np.isfinite(float(v)) for v in metrics.values()) and metrics['actor/turns'] == 0


def test_the_multiplier_is_clipped_and_is_1_where_nothing_moved():
  r = np.random.default_rng(0)
  x, mask = np.log(r.uniform(0.05, 0.95, (8, 5))), np.arange(5)[None] < r.integers(0, 6, (8, 1))
  ones, real = jnp.ones(8), jnp.asarray(mask.astype(float))
  np.testing.assert_allclose(turn_masks.multiplier(ones, x, x, real), 1)
  m = turn_masks.multiplier(ones, x, x - 0.1, real)
  np.testing.assert_allclose(m, np.where(mask.any(1), np.exp(0.1), 1), rtol=1e-6)
  for _ in range(5):
    m = turn_masks.multiplier(m, x, x + r.normal(size=x.shape), real)
    assert (m >= 0.8).all() and (m <= 1.2 + 1e-6).all()
  assert m.min() < m.max()


def test_the_schedule_lasts_for_the_most_turns_and_bounds_are_checked():
  changes = sequential()
  changes['optimizer'].decay = 'linear'
  p = spec(**changes, steps=5)
  most = config().environment.turns
  np.testing.assert_allclose(p.update.schedule(5 * most // 2) / p.update.schedule(0), 0.5)
  with pytest.raises(UserError, match='config.optimizer.outer.eps=1.0 must be from 0 to 1'):
    spec(**sequential(eps=1.0))

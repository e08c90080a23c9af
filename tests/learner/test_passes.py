"""Several passes over a batch: equal to repeated updates, with prompts shuffled into other minibatches."""

from __future__ import annotations

import jax
import numpy as np

from jaxrl_llm.learner import compile as programs
from jaxrl_llm.learner import state as train_state
from jaxrl_llm.learner import update
from jaxrl_llm.learner.microbatch import by_prompt
from jaxrl_llm.learner.minibatch import MinibatchInputs
from jaxrl_llm.models import decoder
from tests.test_step import MODEL, G, P, graded, spec


def updated(p, batch, times=1):
  """The state after `times` calls of the compiled update on one batch."""
  run, state = programs.compile_update(p), train_state.init_state(p, decoder.init(MODEL, 0))
  for _ in range(times):
    state, metrics = run(state, jax.tree.map(np.array, batch))
  return jax.device_get(state), {k: float(v) for k, v in metrics.items()}


def test_two_passes_are_two_updates_on_the_same_batch():
  """The recorded log-probs of the batch's start stay the old policy: the second pass is clipped."""
  batch = graded(spec(), decoder.init(MODEL, 0))
  twice, metrics = updated(spec(learner=dict(passes=2)), batch)
  want, last = updated(spec(), batch, times=2)
  jax.tree.map(np.testing.assert_array_equal, twice.params, want.params)
  assert int(twice.step) == 2 and last['actor/pg_clipfrac'] > 0
  np.testing.assert_allclose(metrics['actor/pg_clipfrac'], last['actor/pg_clipfrac'] / 2, rtol=1e-5)


def test_shuffled_minibatches_hold_whole_groups_and_every_prompt_once():
  p = spec(learner=dict(passes=2, minibatches=2))
  batch = graded(spec(), decoder.init(MODEL, 0))
  minibatches = update._in_minibatches(p, by_prompt(p, batch))
  old_UxBxT = np.asarray(minibatches.rollout.logp_BxT).reshape(2, P * G // 2, -1)
  inputs = MinibatchInputs(began=np.zeros(2, np.int32), old=old_UxBxT)
  orders = set()
  for seed in range(8):
    moved, moved_inputs = update._shuffled(p, jax.random.key(seed), (minibatches, inputs))
    index_P = np.asarray(moved.prompts.index_P).ravel()
    orders.add(tuple(index_P))
    assert sorted(index_P) == sorted(batch.prompts.index_P)
    tokens_PxGxT = np.asarray(moved.rollout.tokens_BxT).reshape(P, G, -1)
    logp_PxGxT = np.asarray(moved_inputs.old).reshape(P, G, -1)
    for place, index in enumerate(index_P):
      source = list(batch.prompts.index_P).index(index)
      rows = slice(source * G, source * G + G)
      np.testing.assert_array_equal(tokens_PxGxT[place], batch.rollout.tokens_BxT[rows])
      np.testing.assert_array_equal(logp_PxGxT[place], batch.rollout.logp_BxT[rows])
  assert len(orders) > 4


def test_passes_over_minibatches_take_an_optimizer_step_each():
  batch = graded(spec(), decoder.init(MODEL, 0))
  state, _ = updated(spec(learner=dict(passes=3, minibatches=2)), batch)
  assert int(state.step) == 6

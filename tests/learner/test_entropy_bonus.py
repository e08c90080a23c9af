"""The entropy bonus in the update: its gradient goes through all logits of all rows, and its coefficient is kept."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from objective_table import METHODS

from jaxrl_llm.learner import state as train_state
from jaxrl_llm.learner.update import update
from jaxrl_llm.objective import entropy_bonus
from jaxrl_llm.types import UserError
from tests.learner.packed_jobs import make, make_batch, make_state, weights, with_method
from tests.learner.test_packed_rows import check


def spec(bonus, name='grpo'):
  plain = with_method(make(), **METHODS[name].settings)
  return plain._replace(objective=plain.objective._replace(entropy_bonus=bonus))


@pytest.mark.parametrize('name', ['grpo', 'm2po_mask'])
def test_the_gradient_is_that_of_whole_rows(name):
  """Rows without an advantage have a gradient, too, whether or not coefficients need the whole minibatch."""
  batch, params = make_batch(), weights(0)
  chosen, plain = spec(entropy_bonus.fixed(coef=0.3), name), spec(None, name)
  with_bonus, c_BxT = check(chosen, make_state(chosen, params), batch)
  without, _ = check(plain, make_state(plain, params), batch)
  assert (c_BxT[np.asarray(batch.rollout.length_B) > 0] == 0).all(1).any()
  change = jax.tree.map(lambda x, y: np.abs(x - y).max(), with_bonus, without)
  assert max(jax.tree.leaves(change)) > 1e-4


def test_the_coefficient_follows_the_entropy_and_no_empty_batch_moves_it():
  batch, rule = make_batch(), entropy_bonus.adaptive(target=9.0, delta=0.1, high=0.15)
  chosen, coefs = spec(rule), []
  run, state = (
    jax.jit(functools.partial(update, chosen)),
    train_state.init_state(chosen, weights(0)),
  )
  for _ in range(3):
    state, metrics = run(state, batch)
    coefs.append(float(metrics['actor/entropy_coef']))
  np.testing.assert_allclose(coefs, [0, 0.1, 0.15], rtol=1e-6)
  empty = batch._replace(
    rollout=batch.rollout._replace(length_B=np.zeros_like(batch.rollout.length_B))
  )
  low = state._replace(entropy_bonus=rule.init())
  after, _ = run(low, empty)
  assert float(after.entropy_bonus.coef) == 0 and int(after.entropy_bonus.active) == 1


@pytest.mark.parametrize(
  'make_rule, message',
  [
    (lambda: entropy_bonus.fixed(coef=-1.0), 'coef=-1.0 must not be below 0'),
    (lambda: entropy_bonus.adaptive(target=0.0), 'target=0.0 must be above 0 nats'),
    (lambda: entropy_bonus.adaptive(delta=0.0), 'delta=0.0 must be above 0'),
    (lambda: entropy_bonus.adaptive(coef=1.0), 'coef=1.0 must be from low=0.0 to high=0.005'),
  ],
)
def test_settings_out_of_range_are_refused(make_rule, message):
  with pytest.raises(UserError, match=f'config.objective.entropy_bonus.{message}'):
    make_rule()

"""Records of the wrong shape or type are refused at the interface, and the step is traced once."""

from __future__ import annotations

import chex
import jax
import numpy as np
import pytest
from test_step import G, L, P, T, grade, make_prompts, spec

from jaxrl_llm import objective
from jaxrl_llm import step as steps
from jaxrl_llm.learner import compile as programs
from jaxrl_llm.learner import empty_records
from jaxrl_llm.learner import state as train_state
from jaxrl_llm.models import decoder
from jaxrl_llm.objective import advantage, record_checks

B = P * G


def graded():
  filled = empty_records.empty_rollout(spec())
  filled = filled._replace(length_B=filled.length_B + 1 + np.arange(B, dtype=np.int32) % T)
  return grade(make_prompts(), filled)


def replaced(batch, field, array):
  """`batch` with another array in `field`, such as 'prompts.length_P'."""
  name, _, inner = field.partition('.')
  value = getattr(batch, name)._replace(**{inner: array}) if inner else array
  return batch._replace(**{name: value})


def at(batch, field):
  for name in field.split('.'):
    batch = getattr(batch, name)
  return batch


WRONG = {
  'prompts.tokens_PxL': np.zeros((P, L, 1), np.int32),
  'prompts.length_P': np.zeros(P, np.float32),
  'prompts.born_P': np.zeros(P + 1, np.int32),
  'prompts.expected_P': np.zeros((P, 1), np.float32),
  'prompts.weight_P': np.zeros(P + 1, np.float32),
  'rollout.tokens_BxT': np.zeros((B, T), np.float32),
  'rollout.logp_BxT': np.zeros((B, T + 1), np.float32),
  'rollout.length_B': np.zeros((B, 1), np.int32),
  'rollout.weight_B': np.zeros(B, np.int32),
  'rollout.feature_BxF': np.zeros(B, np.float32),
  'reward_B': np.zeros(B + 1, np.float32),
  'correct_B': np.zeros(B, bool),
  'replayed_B': np.zeros((B, 1), np.float32),
  'imitation_B': np.zeros((B, 1), np.float32),
  'parts_BxK': np.zeros(B, np.float32),
}


def test_a_graded_batch_passes():
  record_checks.batch(graded())
  record_checks.batch(empty_records.empty_batch(spec()))


@pytest.mark.parametrize('field', WRONG)
def test_a_wrong_field_is_refused_by_update_and_objective(field):
  batch = replaced(graded(), field, WRONG[field])
  made = spec()
  if np.shape(WRONG[field]) != np.shape(at(graded(), field)):
    with pytest.raises(AssertionError):
      jax.eval_shape(lambda b: objective.targets(made.objective.method, b, G), batch)
  with pytest.raises(AssertionError):
    programs.compile_update(made)(train_state.abstract_state(made), batch)


@pytest.mark.parametrize('field', [f for f in WRONG if f.startswith('prompts.')])
def test_wrong_prompts_are_refused_by_sampling(field):
  made = spec()
  prompts = replaced(graded(), field, WRONG[field]).prompts
  with pytest.raises(AssertionError):
    jax.eval_shape(
      lambda state, p: steps.generate(made, state, p), train_state.abstract_state(made), prompts
    )


def test_log_probs_of_another_shape_are_refused():
  made, batch = spec(), graded()
  target = objective.targets(made.objective.method, batch, G)
  with pytest.raises(AssertionError):
    objective.coefficients(made.objective.method, target, np.zeros((B, T + 1), np.float32))


def test_groups_must_be_whole():
  batch = graded()
  rows = jax.tree.map(lambda x: x[:-1], (batch.rollout, batch.reward_B, batch.correct_B))
  with pytest.raises(AssertionError):
    record_checks.batch(batch._replace(rollout=rows[0], reward_B=rows[1], correct_B=rows[2]))


def test_numbers_that_are_not_finite_are_found_in_debug_mode():
  batch = graded()
  batch.rollout.logp_BxT[0, 0] = np.nan
  record_checks.finite(batch)
  with jax.debug_nans(True), pytest.raises(AssertionError, match='logp_BxT'):
    record_checks.finite(batch)


def test_the_step_is_traced_once(monkeypatch):
  """Calls with new prompts, batches and caps find the program that is there."""
  chex.clear_trace_counter()
  monkeypatch.setattr(steps, 'step', chex.assert_max_traces(steps.step, n=1))
  made = spec()
  fn, state = (
    steps.compile_step(made),
    train_state.init_state(made, decoder.init(made.model.config, 0)),
  )
  batch = empty_records.empty_batch(made)
  for index in range(3):
    prompts = make_prompts(index)
    state, rollout, _ = fn(state, batch, prompts, None, None, np.int32(T - index % 2))
    batch = grade(prompts, rollout)


class AdvantagesTest(chex.TestCase):
  """Traced or not, on a device or on the host, an advantage is the same."""

  @chex.variants(with_jit=True, without_jit=True, with_device=True, without_device=True)
  def test_group_normalized(self):
    reward_PxG = np.array([[0.0, 1.0, 1.0, 0.0], [0.25, 0.5, 0.75, 1.0]], np.float32)
    length_PxG = np.full_like(reward_PxG, 3.0)
    fn = self.variant(lambda r, n: advantage.group_normalized(r, n, eps=1e-6))
    mean, std = reward_PxG.mean(1, keepdims=True), reward_PxG.std(1, keepdims=True, ddof=1)
    np.testing.assert_allclose(
      fn(reward_PxG, length_PxG), (reward_PxG - mean) / (std + 1e-6), rtol=1e-6
    )

"""A teacher that reads solutions: the gradient toward it, rows without a solution, and the prompts that it reads."""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from objective_table import METHODS

from jaxrl_llm import models
from jaxrl_llm.config import loading
from jaxrl_llm.config.schema import ScratchConfig, typed
from jaxrl_llm.distributed import sharding
from jaxrl_llm.runner import setup, solutions
from jaxrl_llm.types import Prompts, Row, Solutions, UserError
from tests.learner import plain_gradient
from tests.learner.packed_jobs import (
  SEVERAL,
  B,
  T,
  make,
  make_batch,
  make_state,
  near_policy,
  packed,
  weights,
  with_method,
)

LONGER = 9  # tokens of a prompt with a solution; a plain one has 5
FUNCTIONS = dict(sdpo='solved_by_group', opsd='solved_by_data')


def job(name, seed=0, **changes):
  """Spec, state and a batch on policy, in which a third of the rows have no solution."""
  known = dict(distillation=dict(fn=FUNCTIONS[name], prompt_tokens=LONGER)) | changes
  spec = plain_gradient.recording(make(), SEVERAL)
  spec = with_method(spec, **METHODS[name].settings | known)
  spec = spec._replace(objective=spec.objective._replace(solution_tokens=LONGER))
  state = make_state(spec, weights(0))
  r = np.random.default_rng(seed)
  length_B = np.where(np.arange(B) % 3 == 0, 0, r.integers(6, LONGER + 1, B)).astype(np.int32)
  tokens_BxL = r.integers(0, 20, (B, LONGER)).astype(np.int32)
  batch = make_batch(seed)._replace(solutions=Solutions(tokens_BxL, length_B))
  batch = jax.tree.map(jnp.asarray, batch)
  return spec, state, near_policy(batch, plain_gradient.scores(spec, state.params, batch).logp)


@pytest.mark.parametrize('name', FUNCTIONS)
def test_the_gradient_is_that_of_whole_rows(name):
  """Log-probs of the reference model behind the longer prompts, each row with one of its own."""
  spec, state, batch = job(name)
  got, metrics = packed(spec, state, batch)
  want, c_BxT, _, _ = plain_gradient.gradient(spec, state, batch)
  assert plain_gradient.distance(got, want) < 1e-5
  taught_B = (np.asarray(batch.solutions.length_B) > 0) & (np.asarray(batch.rollout.length_B) > 0)
  np.testing.assert_array_equal((np.asarray(c_BxT) != 0).any(1), taught_B)
  assert metrics['training/trained_tokens'] == np.asarray(batch.rollout.length_B)[taught_B].sum()


def test_averaged_weights_score_the_rows_without_a_reward_too():
  """As the old policy. The teacher gives advantages to rows that have none by rewards."""
  old = dict(fn='average', decay=0.9)
  spec, state, batch = job('opsd', old_policy=old, advantage=dict(fn='raw', baseline=0.0))
  batch = batch._replace(reward_B=jnp.zeros(B))
  got, _ = packed(spec, state, batch)
  want, *_ = plain_gradient.gradient(spec, state, batch)
  assert plain_gradient.distance(got, want) < 1e-5


def test_the_coefficient_is_the_gap_to_the_teacher_over_the_tokens_of_rows_with_one():
  spec, state, batch = job('opsd')
  _, c_BxT, _, _ = plain_gradient.gradient(spec, state, batch)
  tokens_BxL, length_B = map(np.asarray, batch.solutions)
  prompts = batch.prompts._replace(tokens_PxL=tokens_BxL, length_P=length_B)
  solved = batch._replace(prompts=prompts)
  teacher_BxT = plain_gradient.scores(spec, state.reference, solved).logp
  own_B = np.asarray(batch.rollout.length_B)
  mask_BxT = (np.arange(T) < own_B[:, None]) & (length_B > 0)[:, None]
  gap_BxT = np.where(mask_BxT, teacher_BxT - batch.rollout.logp_BxT, 0)
  np.testing.assert_allclose(c_BxT, gap_BxT / mask_BxT.sum(), atol=1e-6)
  assert np.abs(gap_BxT).max() > 0.1


def test_the_first_right_completion_of_another_row_is_the_solution():
  correct_B = np.array([0, 1, 0, 1, 0, 0, 0, 1, 0])
  group_B = [4, 4, 4, 4, 7, 7, 9, 9, 9]
  chosen_B = solutions.first_right(correct_B, group_B)
  np.testing.assert_array_equal(chosen_B, [1, 3, 1, 1, -1, -1, 7, -1, 7])


def context(**distillation):
  """What `solutions.build` reads, with the tokenizer of characters."""
  c = loading.default()
  c.rollouts, c.data.chat = 2, False
  c.objective.distillation = distillation
  tokenizer = models.load('scratch', scratch=ScratchConfig(width=16, layers=1), seed=0).tokenizer
  return types.SimpleNamespace(
    config=typed(c),
    spec=types.SimpleNamespace(
      objective=types.SimpleNamespace(solution_tokens=distillation['prompt_tokens'])
    ),
    models=types.SimpleNamespace(policy=types.SimpleNamespace(tokenizer=tokenizer)),
  )


def built(correct_B, texts=('21', '12', '43', '34'), **distillation):
  """(text of each row's prompt with a solution, share of rows with one) of two prompts with two rows each."""
  given = context(**distillation)
  questions = [('rev 12=', '21', {}), ('rev 34=', '43', {'solution': '34 turned is 43'})]
  rows = [Row(str(i), q, (), a, 'digits', more) for i, (q, a, more) in enumerate(questions)]
  prompts = Prompts(None, None, np.array([3, 8]), None, None)
  found, metrics = solutions.build(
    given, prompts, [rows[0]] * 2 + [rows[1]] * 2, texts, np.array(correct_B)
  )
  decode = given.models.policy.tokenizer.decode
  pairs = zip(found.tokens_BxL, found.length_B, strict=True)
  return [decode(tokens[:n].tolist()) for tokens, n in pairs], metrics['distillation/solved']


def solved(question, solution):
  return f'{question}\n\nA right answer is:\n{solution}\n\nAnswer the question in your own way.'


def test_a_group_teaches_by_its_own_right_completions():
  texts, share = built([1, 0, 0, 0], fn='solved_by_group', prompt_tokens=100)
  assert texts == ['', solved('rev 12=', '21'), '', ''] and share == 0.25
  texts, share = built([1, 0, 1, 1], fn='solved_by_group', prompt_tokens=100)
  assert texts[1] == solved('rev 12=', '21') and texts[2] == solved('rev 34=', '34')
  assert texts[3] == solved('rev 34=', '43') and share == 0.75


def test_a_completion_teaches_without_its_thinking():
  thoughts = ('<think>12 turned</think>\n21', '12', 'over</think>', '34')
  texts, share = built([1, 0, 1, 0], thoughts, fn='solved_by_group', prompt_tokens=100)
  assert texts == ['', solved('rev 12=', '21'), '', ''] and share == 0.25


def test_the_data_teaches_by_a_solution_or_else_an_answer():
  texts, share = built([0] * 4, fn='solved_by_data', prompt_tokens=100)
  assert texts[::2] == [solved('rev 12=', '21'), solved('rev 34=', '34 turned is 43')]
  assert share == 1


def test_a_prompt_that_becomes_too_long_has_no_teacher():
  longest = len(solved('rev 12=', '21'))
  texts, share = built([0] * 4, fn='solved_by_data', prompt_tokens=longest)
  assert texts == [solved('rev 12=', '21')] * 2 + [''] * 2 and share == 0.5


def test_prompts_with_solutions_must_fit_the_model():
  overrides = ('model=scratch', 'completion_tokens=8', 'prompts=2', 'objective.advantage.fn=raw')
  overrides += ('objective.distillation.fn=solved_by_data', 'objective.zero_variance.fn=keep')
  overrides += ('objective.distillation.prompt_tokens=125',)
  c = loading.load('tiny', [f'--config.{text}' for text in overrides])
  with pytest.raises(UserError, match='objective.distillation.prompt_tokens=125 and .* are 133'):
    setup.build_context(c, sharding.make_mesh(c.mesh, jax.devices()[:1]))

"""Discussions (configs/agents/comas.py): a reward goes to its own turn, and the update does not read the verifier."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from small_episodes import G, P, Pool, Result, T, check_log_probs, made, right, run

from jaxrl_llm import objective, rewards
from jaxrl_llm.environments import discussion
from jaxrl_llm.evaluation import evaluate
from jaxrl_llm.runner import resume, turn_batching
from jaxrl_llm.types import STOPPED, UNFINISHED

CREDIT = dict(
  environment__fn='discussion',
  environment__turns=3,
  environment__judge='rewards',
  environment__weight=0.0,
  objective__advantage=dict(fn='raw'),
  objective__credit_assignment=dict(fn='turn_reward_whitened'),
  objective__zero_variance=dict(fn='keep'),
  curriculum__utility=dict(fn='uniform'),
  curriculum__prior_pooling=dict(fn='none'),
  curriculum__evidence_decay=dict(fn='none'),
  curriculum__eligibility=dict(fn='none'),
)


def score(text: str) -> int | None:
  """A score that hangs on the letters; None for one text of four."""
  return (None, 1, 2, 3)[sum(map(ord, text)) % 4]


class Discusses:
  """A discussion of a policy that writes no scores: they are read from the letters."""

  graded_turn = 0

  def reset(self, row, seed):
    self.own = discussion.discussion(evaluate='?', score='!')
    self.own.reset(row, seed)

  def step(self, text):
    if self.own.turns == 2:
      found = score(text)
      text = 'none' if found is None else f'<score>{found}</score>'
    return self.own.step(text)


def discussed(make=Discusses, **changes):
  return made(make, **(CREDIT | changes))


def texts_of(context, rollout, b):
  return context.episodes.turn_texts(rollout.tokens_BxT[b], rollout.turns.number_BxT[b])


def paid(texts, reason):
  """Rewards of the turns of a row, by the paper: a discussion that did not reach its score pays nothing."""
  if len(texts) < 3 or reason != STOPPED:
    return [0.0] * len(texts)
  found = score(texts[2])
  return [0.0, 0.0, -1.0] if found is None else [(found - 1) / 2, (3 - found) / 2, 0.0]


@pytest.fixture(scope='module')
def talked():
  context = discussed()
  return context, *run(context, 4)


@pytest.mark.parametrize('batching', ['lockstep', 'turns'])
def test_each_reward_is_at_the_end_of_its_own_turn_and_nowhere_else(batching, talked):
  context, _, _, history = talked
  if batching == 'turns':
    how = dict(fn='turns', ready=2, iterations=3)
    context = discussed(environment__batching=how)
    _, _, history = run(context, 4, call=turn_batching.compile_call(context))
  seen = set()
  for _, rollout, _ in history:
    want_BxT = np.zeros((P * G, T), np.float32)
    for b in range(P * G):
      of_turn = paid(texts_of(context, rollout, b), rollout.reason_B[b])
      seen.add(tuple(of_turn))
      for turn, reward in enumerate(of_turn):
        want_BxT[b, np.flatnonzero(rollout.turns.number_BxT[b] == turn).max()] = reward
    np.testing.assert_array_equal(rollout.turns.reward_BxT, want_BxT)
  assert {(0, 0, -1), (0, 1, 0), (0.5, 0.5, 0), (1, 0, 0)} <= seen


def test_log_probs_of_all_roles_are_those_of_one_pass_over_the_row(talked):
  context, _, _, history = talked
  prompts, rollout, _ = history[0]
  check_log_probs(context, prompts, rollout, 2e-5)
  assert set(np.unique(rollout.turns.number_BxT)) == {-1, 0, 1, 2}


def check_credit(context, batch):
  """Each sampled token has the reward of its turn, standardized over all of them; all others have no coefficient."""
  number_BxT, method = batch.rollout.turns.number_BxT, context.spec.objective.method
  columns = np.arange(T)[None] < batch.rollout.length_B[:, None]
  own_BxT = columns & (number_BxT >= 0)
  reward_BxT = np.zeros((P * G, T))
  for b in np.flatnonzero(batch.rollout.length_B):
    of_turn = paid(texts_of(context, batch.rollout, b), batch.rollout.reason_B[b])
    reward_BxT[b] = np.take(of_turn, np.maximum(number_BxT[b], 0))
  want_BxT = (reward_BxT - reward_BxT[own_BxT].mean()) / reward_BxT[own_BxT].std() * own_BxT
  target = objective.targets(method, batch, G)
  np.testing.assert_allclose(target.advantage_BxT, want_BxT, atol=1e-5)
  c_BxT, _ = objective.coefficients(method, target, batch.rollout.logp_BxT, 0 * want_BxT)
  np.testing.assert_array_equal(np.asarray(c_BxT) != 0, np.abs(want_BxT) > 1e-6)
  assert {0, 1, 2} <= set(number_BxT[np.asarray(c_BxT) != 0].tolist())
  return target


def test_every_token_of_a_turn_learns_from_the_reward_of_its_turn_alone(talked):
  context, _, _, history = talked
  for _, rollout, landed in history:
    np.testing.assert_array_equal(landed.batch.rollout.tokens_BxT, rollout.tokens_BxT)
    check_credit(context, landed.batch)


def test_the_verifier_reads_the_solution_and_takes_no_part_in_the_update(talked):
  context, _, _, history = talked
  _, rollout, landed = history[0]
  right_B = np.array([right(texts_of(context, rollout, b)[0]) for b in range(P * G)])
  last_B = np.array([right(texts_of(context, rollout, b)[-1]) for b in range(P * G)])
  np.testing.assert_array_equal(landed.batch.correct_B, right_B)
  np.testing.assert_array_equal(landed.batch.reward_B, right_B)
  assert 0 < right_B.mean() < 1 and (right_B != last_B).any()
  method, batch = context.spec.objective.method, landed.batch
  for other_B in (1 - right_B, 0 * right_B):
    other = batch._replace(
      reward_B=other_B.astype(np.float32), correct_B=other_B.astype(np.float32)
    )
    for name in ('advantage_BxT', 'weight_BxT'):
      a, b = (getattr(objective.targets(method, x, G), name) for x in (batch, other))
      np.testing.assert_array_equal(a, b)


def test_held_out_accuracy_is_that_of_the_solution():
  context = discussed(ends=tuple(range(0, 90, 2)), evaluation__prompts=8)
  context.episodes.begin_step(0)
  tokenizer = context.models.policy.tokenizer
  scoring = evaluate.Scoring(Pool(), episodes=context.episodes)
  measure = evaluate.make_evaluator(
    context.spec, context.tables.held_out, tokenizer.decode, scoring, 0, {}
  )
  _, rows, _ = measure(context.models.policy.params)
  said = [line['output'][0] for line in rows]
  assert [line['score'][0] for line in rows] == [right(text) for text in said]
  assert any('?' in text for text in said)


def test_a_resumed_run_is_the_uninterrupted_one():
  """Also where a step leaves discussions unfinished: they are replayed, and the score pays turns of earlier steps."""
  changes = dict(environment__rounds=1, rollout__max_age=9)
  whole_state, _, whole = run(discussed(**changes), 6)
  context = discussed(**changes)
  state, batch, first = run(context, 4)
  assert (first[-1][1].reason_B == UNFINISHED).any()
  again = discussed(**changes)
  for name in ('curriculum', 'lengths', 'unfinished'):
    resume._stateful(again)[name].load_state_dict(resume._stateful(context)[name].state_dict())
  end_state, _, rest = run(again, 2, state=state, batch=batch, start=4)
  for (_, a, _), (_, b, _) in zip(first + rest, whole, strict=True):
    jax.tree.map(np.testing.assert_array_equal, a, b)
  assert rest[0][2].metrics['environment/replayed'] > 0
  assert np.abs(np.concatenate([r.turns.reward_BxT for _, r, _ in rest])).sum() > 0
  jax.tree.map(np.testing.assert_array_equal, end_state, whole_state)


class Fails(Discusses):
  """Raises at some evaluations, and pays too few turns for some scores."""

  def step(self, text):
    if self.own.turns == 1 and sum(map(ord, text)) % 4 == 1:
      raise KeyError('gone')
    result = super().step(text)
    uneven = result.done and score(text) == 1
    return Result(None, (0.0, 1.0), True) if uneven else result


def test_an_environment_that_fails_costs_its_episode_alone():
  context = discussed(Fails)
  _, _, history = run(context, 4)
  messages = set()
  for _, rollout, landed in history:
    failed_B = rollout.turns.outcome_B != rewards.OK
    np.testing.assert_array_equal(landed.batch.rollout.length_B == 0, failed_B)
    assert not rollout.turns.reward_BxT[failed_B].any()
    assert landed.metrics['grade/errors'] == failed_B.sum() < P * G
    for b in np.flatnonzero(failed_B):
      texts = texts_of(context, rollout, b)
      messages.add(len(texts))
      assert sum(map(ord, texts[-1])) % 4 == 1
    check_credit(context, landed.batch)
  assert messages == {2, 3}

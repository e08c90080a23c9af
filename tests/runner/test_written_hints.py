"""Hints that the policy writes: the steps of a prompt, what is learned of them, and a restored provider."""

from __future__ import annotations

import dataclasses
import json

import bad_input
import numpy as np
import pytest
from small_tokenizers import Letters

from jaxrl_llm import data
from jaxrl_llm.checkpointing import checkpoint
from jaxrl_llm.config import loading
from jaxrl_llm.config.schema import DataConfig
from jaxrl_llm.curriculum import hint_rules
from jaxrl_llm.runner import setup, written_hints
from jaxrl_llm.runner.hints import Measures
from jaxrl_llm.types import PLAIN, REQUEST, STOPPED, Batch, Rollout, Row, UserError

G, L, T = 4, 40, 30
SETTINGS = DataConfig(source='digits', template='Q: {question}', chat=False)
PAIRS = ('2+2', 'four'), ('3+3', 'six'), ('1+1', 'two'), ('5+5', '')


def make(prompt_tokens=L, **settings):
  how = dict(instruction='{question}|{attempt}|{solution}', hints=3)
  rows = [Row(str(i), q, (), a, 'made', {}) for i, (q, a) in enumerate(PAIRS)]
  table = data.make_table(rows, SETTINGS, prompt_tokens, Letters())
  rule = hint_rules.written(**(how | settings))
  return written_hints.WrittenHints(rule, table, Letters(), SETTINGS, seed=0)


def texts(prompts):
  rows = zip(prompts.tokens_PxL, prompts.length_P, strict=True)
  return [Letters().decode(tokens[:n].tolist()) for tokens, n in rows]


def rollout_of(*said, logp=-0.5):
  """G rows a prompt that say these texts; '' is a row that was dropped."""
  tokens_BxT = np.zeros((len(said), T), np.int32)
  for row, text in zip(tokens_BxT, said, strict=True):
    row[: len(text)] = Letters().encode(text)
  length_B = np.array([len(text) + 1 if text else 0 for text in said], np.int32)
  return Rollout(
    tokens_BxT,
    np.full(tokens_BxT.shape, logp, np.float32),
    length_B,
    np.full(len(said), STOPPED, np.int8),
    np.zeros_like(tokens_BxT),
    np.ones(len(said), np.float32),
    np.zeros((len(said), 0), np.float32),
  )


def visited(own, index, right, said=('a',) * G, step=0, reliance=None, logp=-0.5):
  """(prompts, batch to learn from, metrics) of a step with so many right rows of each prompt."""
  index = [*own.due(len(index)), *index][: len(index)]
  prompts = own.add_hints(own.table.prompts(index, born=step), step)
  said = said if len(said) == G * len(index) else said * len(index)
  rollout, metrics = own.receive(prompts, rollout_of(*said, logp=logp))
  correct_B = np.concatenate([np.arange(G) < k for k in right]).astype(np.float32)
  correct_B *= rollout.length_B > 0
  batch, more = own.update(
    Batch(prompts, rollout, correct_B, correct_B, success_B=correct_B),
    np.ones(len(index), bool),
    Measures(reliance_B=reliance),
  )
  return prompts, batch, metrics | more


def hint(text):
  return f'<hint>{text}</hint>'


REPLIES = (hint('count'), hint('think'), 'no', hint('never read'))


def test_a_group_of_wrong_rows_alone_is_followed_by_a_request_and_then_by_its_hints():
  own = make()
  prompts, batch, _ = visited(own, [0, 1, 2], [0, 1, 4])
  assert texts(prompts) == ['Q: 2+2', 'Q: 3+3', 'Q: 1+1']
  assert prompts.context_P.tolist() == [PLAIN] * 3 and prompts.hint_P.tolist() == [0] * 3
  assert batch.rollout.length_B.tolist() == [2] * 12 and batch.success_B is None
  assert own.waiting.tolist() == [0]
  prompts, batch, metrics = visited(own, [1, 2], [0, 2], [*REPLIES, *['a'] * G])
  assert texts(prompts) == [
    '2+2|a|four',
    'Q: 3+3',
  ]  # the first slot is that of the prompt that was due
  assert prompts.context_P.tolist() == [REQUEST, PLAIN] and prompts.hint_P.tolist() == [1, 0]
  assert batch.rollout.length_B.tolist() == [0] * 4 + [2] * 4
  counts = {name: metrics[f'hint/{name}'] for name in ('requests', 'tried', 'unread', 'leaks')}
  assert counts == dict(requests=1, tried=2, unread=1, leaks=0)
  assert own.waiting.tolist() == [0]
  prompts, batch, metrics = visited(own, [1, 1, 1], [1, 0, 4])
  assert texts(prompts) == ['Q: 2+2\n\ncount', 'Q: 2+2\n\nthink', 'Q: 3+3']
  assert prompts.context_P.tolist() == [0, 1, PLAIN]
  assert (metrics['hint/groups'], metrics['hint/mixed'], metrics['hint/learned']) == (2, 1, 2)
  assert metrics['hint/right'] == 1 / 8 and len(own.waiting) == 0
  # The slots of hinted groups hold the best of them, and the request with the rewards of its hints.
  assert texts(batch.prompts) == ['Q: 2+2\n\ncount', '2+2|a|four', 'Q: 3+3']
  best = 1 - 0.25**4 - 0.75**4
  np.testing.assert_allclose(batch.reward_B[:8], [1, 0, 0, 0, best, 0, -0.2, 0], atol=1e-6)
  assert batch.rollout.length_B.tolist() == [2] * 4 + [len(r) + 1 for r in REPLIES[:3]] + [
    0,
    2,
    2,
    2,
    2,
  ]
  assert Letters().decode(batch.rollout.tokens_BxT[4]) == REPLIES[0]
  assert batch.correct_B[4:8].tolist() == [0] * 4
  assert not own.written and not own.ready
  prompts, _, metrics = visited(own, [0], [0])  # plain again, and asked for again
  assert texts(prompts) == ['Q: 2+2'] and own.waiting.tolist() == [0]
  assert metrics['hint/groups'] == metrics['hint/learned'] == 0


def test_the_least_reliant_of_equal_hints_is_learned_and_rows_keep_their_log_probs():
  own = make(hints=2)
  visited(own, [0, 1], [0, 4])
  visited(own, [1], [0], REPLIES, logp=-0.75)
  reliance_B = np.array([-0.3, -9, -9, -9, -0.15, -0.15, -9, -9], np.float32)
  _, batch, metrics = visited(own, [2, 2], [1, 2], reliance=reliance_B, logp=-0.25)
  first, second = (
    (1 - p**4 - (1 - p) ** 4) * np.exp(d / 0.3) for p, d in ((0.25, -0.3), (0.5, -0.15))
  )
  assert texts(batch.prompts) == ['Q: 2+2\n\nthink', '2+2|a|four']
  np.testing.assert_allclose(batch.reward_B[4:], [first, second, 0, 0], rtol=1e-6)
  assert metrics['hint/reward'] == pytest.approx((first + second) / 2)
  assert set(batch.rollout.logp_BxT[:4, :2].ravel()) == {-0.25}
  assert set(batch.rollout.logp_BxT[4, :5]) == {-0.75}


def test_a_hint_with_the_answer_or_without_room_is_not_sampled_with():
  own = make(hints=4)
  visited(own, [0], [0])
  replies = hint('it is FOUR'), hint(''), hint('x' * (T - 14)), hint('count')
  _, _, metrics = visited(own, [0], [0], replies)
  names = ('requests', 'tried', 'unread', 'leaks', 'too_long')
  assert [metrics[f'hint/{name}'] for name in names] == [1, 2, 1, 1, 0]
  own = make(hints=4, prompt_tokens=L - 18)
  visited(own, [0], [0])
  _, _, metrics = visited(own, [0], [0], replies)
  assert [metrics[f'hint/{name}'] for name in names] == [1, 1, 1, 1, 1]
  _, batch, metrics = visited(own, [0], [4])
  assert (
    metrics['hint/learned'] == 1
  )  # right rows alone are no mixed group, and all but one hint was refused
  np.testing.assert_allclose(batch.reward_B, [-0.2, -0.2, -0.2, 0], atol=1e-6)


def test_hints_of_equal_reward_teach_nothing():
  own = make()
  visited(own, [0], [0])
  visited(own, [0], [0], ['no'] * G)
  assert len(own.waiting) == 0 and not own.written
  visited(own, [0], [0])
  visited(own, [0], [0], [hint('count')] * G)
  _, batch, metrics = visited(own, [0] * 3, [0, 0, 4])
  assert batch.rollout.length_B.sum() == 0 and metrics['hint/learned'] == 0 and not own.ready


def test_hints_may_be_sampled_with_in_several_steps_and_groups_wait_for_a_slot():
  own = make()
  visited(own, [0], [0])
  visited(own, [0], [0], REPLIES)
  prompts, batch, metrics = visited(own, [0], [2])
  assert prompts.context_P.tolist() == [0] and metrics['hint/learned'] == 0
  assert batch.rollout.length_B.sum() == 0 and own.waiting.tolist() == [0]
  prompts, batch, metrics = visited(own, [0], [1])
  assert prompts.context_P.tolist() == [1]
  assert (metrics['hint/learned'], metrics['hint/waiting']) == (1, 1)
  assert texts(batch.prompts) == ['Q: 2+2\n\ncount'] and batch.reward_B.tolist() == [1, 1, 0, 0]
  _, batch, metrics = visited(own, [1], [2], [''] * G)  # a slot without rows
  assert texts(batch.prompts) == ['2+2|a|four'] and metrics['hint/waiting'] == 0


def test_a_prompt_without_a_solution_or_room_is_not_asked_for_hints():
  own = make()
  visited(own, [3], [0])
  assert len(own.waiting) == 0
  own = make(instruction='{question}' + 'x' * L)
  visited(own, [0], [0])
  assert len(own.waiting) == 0


def test_a_long_attempt_loses_its_middle():
  own = make(prompt_tokens=20)
  visited(own, [0], [0], ['abcdefghijklmnop'] * G)
  prompts, *_ = visited(own, [0], [0])
  assert texts(prompts) == ['2+2|abcdeflmnop|four']


def test_the_attempt_is_a_wrong_row_drawn_by_the_step():
  def request(step):
    own = make()
    visited(own, [0], [0], ['a', 'b', '', 'd'], step=step)
    return own.requests[0].tolist()

  drawn = {Letters().decode(request(step))[4] for step in range(30)}
  assert drawn == set('abd') and request(3) == request(3)


def test_a_prompt_whose_request_or_hints_are_being_sampled_is_not_asked_again():
  """As where the data is smaller than the steps in flight."""
  own = make()
  visited(own, [0], [0])
  own.due(1)  # in flight
  visited(own, [0], [0])
  assert len(own.waiting) == 0
  own._due = [(0, REQUEST)]
  visited_again = own.add_hints(own.table.prompts([0]), 1)
  own.receive(visited_again, rollout_of(*REPLIES))
  own.due(2)
  visited(own, [0], [0])
  assert len(own.waiting) == 0 and set(own.written) == {0}


def test_groups_that_are_unfinished_or_empty_decide_nothing():
  own = make()
  prompts = own.add_hints(own.table.prompts([0, 1]), 0)
  wrong_B = np.zeros(2 * G, np.float32)
  batch = Batch(prompts, rollout_of(*['a'] * G, *[''] * G), wrong_B, wrong_B)
  own.update(batch, np.array([False, True]))
  assert len(own.waiting) == 0 and not own.requests


def test_more_hints_than_replies_are_refused():
  settings = dict(curriculum=dict(hint=dict(fn='written', hints=5)), rollouts=4)
  message = bad_input.sentence(*bad_input.outcome(bad_input.job(**settings)))
  assert message.startswith(
    'config.curriculum.hint.hints=5 replies of a request are more than its config.rollouts=4'
  )


def test_data_without_solutions_is_refused():
  config, table = loading.load('hill'), make().table
  bare = dataclasses.replace(table, rows=tuple(row._replace(answer='') for row in table.rows))
  assert setup._hints(config, table, Letters()) is not None
  with pytest.raises(UserError, match="hint.fn='written' needs solutions, and no row"):
    setup._hints(config, bare, Letters())


@pytest.mark.parametrize('steps', [1, 2, 4, 5])
def test_a_restored_provider_goes_on(steps):
  """After the first wrong groups, after a request, between two groups with hints, and when a group waits for a slot."""

  def go_on(own, first):
    for step in range(first, 8):
      yield visited(own, [0, 1], [1, 0] if step == 3 else [0, 1], [*REPLIES, *REPLIES], step=step)

  own, other = make(), make()
  for step in range(steps):
    visited(own, [0] if step else [0, 1], [int(step == 3)] if step else [0, 0], REPLIES, step=step)
  assert len(own.ready) == (steps == 5)
  text, arrays = checkpoint._encode(own.state_dict())
  restored = json.loads(
    text, object_hook=lambda d: arrays[d[checkpoint._ARRAY]] if checkpoint._ARRAY in d else d
  )
  other.load_state_dict(restored)
  for one, two in zip(go_on(own, steps), go_on(other, steps), strict=True):
    assert texts(one[0]) == texts(two[0]) and one[2] == two[2]
    assert texts(one[1].prompts) == texts(two[1].prompts)
    for name in ('reward_B', 'correct_B'):
      np.testing.assert_array_equal(getattr(one[1], name), getattr(two[1], name))
    for x, y in zip(one[1].rollout, two[1].rollout, strict=True):
      np.testing.assert_array_equal(x, y)

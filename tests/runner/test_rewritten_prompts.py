"""Rewritten prompts: the three steps of a prompt, what is learned of them, and a restored provider."""

from __future__ import annotations

import json

import numpy as np
import pytest
from small_tokenizers import Letters

from jaxrl_llm import data
from jaxrl_llm.config.schema import DataConfig
from jaxrl_llm.curriculum import hint_rules
from jaxrl_llm.runner import rewritten_prompts
from jaxrl_llm.types import FROM_HARD, FROM_MEDIUM, PLAIN, REQUEST, STOPPED, Batch, Rollout, Row

G, L, T = 4, 40, 60
SETTINGS = DataConfig(source='digits', template='Q: {question}', chat=False)
PAIRS = ('2+2', 'four'), ('3+3', 'six'), ('1+1', 'two'), ('5+5', '')


def make(**settings):
  how = dict(simplify='Simplify {question}={answer}', vary='Vary {question}', least_chars=4)
  rows = [Row(str(i), q, (), a, 'made', {}) for i, (q, a) in enumerate(PAIRS)]
  table = data.make_table(rows, SETTINGS, L, Letters())
  rule = hint_rules.rewritten(**(how | settings))
  return rewritten_prompts.RewrittenPrompts(rule, table, Letters(), SETTINGS, seed=0)


def texts(prompts):
  rows = zip(prompts.tokens_PxL, prompts.length_P, strict=True)
  return [Letters().decode(tokens[:n].tolist()) for tokens, n in rows]


def rollout_of(*said):
  """G rows a prompt that say these texts; '' is a row that was dropped."""
  tokens_BxT = np.zeros((len(said), T), np.int32)
  for row, text in zip(tokens_BxT, said, strict=True):
    row[: len(text)] = Letters().encode(text)
  length_B = np.array([len(text) + 1 if text else 0 for text in said], np.int32)
  zeros = np.zeros(tokens_BxT.shape)
  reason_B = np.full(len(said), STOPPED, np.int8)
  return Rollout(
    tokens_BxT, zeros, length_B, reason_B, zeros, np.ones(len(said)), np.zeros((len(said), 0))
  )


def visited(own, index, right, said=('a',) * G):
  """The prompts of a step, after groups with so many right rows each."""
  prompts = own.add_hints(own.table.prompts(list(index)), 0)
  rollout, _ = own.receive(prompts, rollout_of(*said * len(index)))
  correct_B = np.concatenate([np.arange(G) < k for k in right]).astype(np.float32)
  batch = Batch(prompts, rollout, correct_B, correct_B)
  return own.update(batch, np.ones(len(index), bool))[0]


def test_a_hard_prompt_is_simplified_and_a_medium_one_varied():
  """1 of 4 is hard and 2 of 4 medium; 3 of 4 is easy."""
  own = make()
  got = own.add_hints(own.table.prompts([0, 1, 2]), 0)
  assert texts(got) == ['Q: 2+2', 'Q: 3+3', 'Q: 1+1'] and got.context_P.tolist() == [PLAIN] * 3
  visited(own, [0, 1, 2], [1, 2, 3])
  assert own.waiting.tolist() == [0, 1]
  assert own.due(1).tolist() == [0] and own.due(5).tolist() == [1] and len(own.due(5)) == 0
  got = own.add_hints(own.table.prompts([0, 1, 2]), 1)
  assert texts(got) == ['Simplify 2+2=four', 'Vary 3+3', 'Q: 1+1']
  assert got.context_P.tolist() == [REQUEST, REQUEST, PLAIN] and got.hint_P.tolist() == [1, 1, 0]


def test_the_first_question_in_the_replies_is_sampled_once_and_the_others_are_not_learned():
  own = make()
  visited(own, [0, 1], [0, 2])
  own.due(2)
  got = own.add_hints(own.table.prompts([0, 1, 2]), 1)
  long = '```text ' + 'x' * (L - 2) + '```'  # with 'Q: ' it does not fit
  said = ['', 'no', '```text one+three ```', 'two+two', long, 'six?', 'x', 'x', *['a'] * G]
  rollout, metrics = own.receive(got, rollout_of(*said))
  assert rollout.length_B.tolist() == [0] * 8 + [2] * 4
  assert metrics == {'hint/requests': 2, 'hint/rewritten': 2}
  assert own.due(5).tolist() == [0, 1]
  got = own.add_hints(own.table.prompts([0, 1]), 2)
  assert texts(got) == ['Q: one+three', 'Q: six?']
  assert got.context_P.tolist() == [FROM_HARD, FROM_MEDIUM] and got.hint_P.tolist() == [1, 1]
  batch = visited(own, [0, 1], [0, 1])  # hard themselves, and not rewritten again
  assert batch.rollout.length_B.tolist() == [2] * 8
  assert len(own.waiting) == 0
  assert texts(own.add_hints(own.table.prompts([0, 1]), 3)) == ['Q: 2+2', 'Q: 3+3']


def test_a_prompt_without_an_answer_or_a_good_reply_or_room_is_plain_again():
  own = make()
  visited(own, [0, 3], [0, 0])
  assert own.due(5).tolist() == [0]  # the data has no answer to prompt 3
  visited(own, [0], [0], said=('no',) * G)
  assert len(own.waiting) == 0
  assert texts(own.add_hints(own.table.prompts([0, 3]), 2)) == ['Q: 2+2', 'Q: 5+5']
  own = make(simplify='{question}' + 'x' * L)
  visited(own, [0], [0])
  assert len(own.waiting) == 0


def test_groups_that_are_unfinished_or_empty_decide_nothing():
  own = make()
  prompts = own.add_hints(own.table.prompts([0, 1]), 0)
  rollout = rollout_of(*['a'] * G, *[''] * G)
  wrong_B = np.zeros(2 * G, np.float32)
  own.update(Batch(prompts, rollout, wrong_B, wrong_B), np.array([False, True]))
  assert len(own.waiting) == 0 and not own.questions


def test_an_absent_row_counts_as_none():
  """2 of 3 is medium, where 2 of 4 is, too, and 1 of 3 is not hard."""
  own = make(hard=0.3, medium=0.6)
  visited(own, [0, 1], [2, 1], said=('a', 'a', 'a', ''))
  assert own.waiting.tolist() == [1]  # 2 / 3 is easy
  assert own.questions[1] == (FROM_MEDIUM, '')


@pytest.mark.parametrize('asked', [False, True])
def test_a_restored_provider_goes_on(asked):
  own, other = make(), make()
  visited(own, [0, 1], [0, 2])
  if asked:
    own.due(1)
    visited(own, [0], [0], said=('one and three',) * G)
  state = own.state_dict()
  own_part = {name: state[name] for name in ('questions', 'next')}
  other.load_state_dict(state | json.loads(json.dumps(own_part)))
  for one in (own, other):
    assert one.waiting.tolist() == ([1, 0] if asked else [0, 1])
    got = texts(one.add_hints(one.table.prompts([0, 1]), 2))
    assert got == ['Q: one and three' if asked else 'Simplify 2+2=four', 'Vary 3+3']

"""Hinted prompts: their tokens, grading of hinted completions, the batch learned from, and the stored answers."""

from __future__ import annotations

import types

import numpy as np
import pytest
from small_tokenizers import Letters

from jaxrl_llm import data
from jaxrl_llm.config import loading, schema
from jaxrl_llm.curriculum import hint_rules
from jaxrl_llm.runner import hints, setup
from jaxrl_llm.types import STOPPED, TRUNCATED, Batch, Rollout, Row, UserError

G, L, T = 2, 40, 4
SETTINGS = types.SimpleNamespace(source='digits', system='', template='{question}', chat=False)


class ChatLetters(Letters):
  def encode_chat(self, messages):
    return self.encode('|'.join(m['content'] for m in messages))


def table(*pairs, prompt_tokens=L):
  rows = [Row(str(i), q, (), a, 'made', {}) for i, (q, a) in enumerate(pairs)]
  return data.make_table(rows, SETTINGS, prompt_tokens, ChatLetters())


def make(rule, *pairs, **how):
  return hints.HintProvider(rule, table(*pairs, **how), ChatLetters(), SETTINGS, seed=0)


def always(share, form=hint_rules.PREFIX, **how):
  return hint_rules.Rule(form, lambda visits: share, **how)


PAIRS = ('2+2', 'four'), ('3+3', 'six'), ('1+1', 'two')


def text(prompts, p):
  return ChatLetters().decode(prompts.tokens_PxL[p, : prompts.length_P[p]].tolist())


def answered(prompts, *texts, right, reason=STOPPED):
  """A batch in which the rows say these texts, ended by a 0."""
  tokens_BxT = np.zeros((len(texts), T + 1), np.int32)
  for row, said in zip(tokens_BxT, texts, strict=True):
    row[: len(said)] = ChatLetters().encode(said)
  length_B = np.array([len(said) + 1 for said in texts], np.int32)
  rollout = Rollout(
    tokens_BxT,
    np.full(tokens_BxT.shape, -0.5, np.float32),
    length_B,
    np.full(len(texts), reason, np.int8),
    np.zeros_like(tokens_BxT),
    np.ones(len(texts), np.float32),
    np.zeros((len(texts), 0), np.float32),
  )
  right_B = np.array(right, np.float32)
  return Batch(prompts, rollout, right_B, right_B)


def test_a_prefix_stands_behind_the_prompt_and_before_the_reply():
  own = make(always(0.5), *PAIRS)
  plain = own.table.prompts([0, 1], born=3)
  got = own.add_hints(plain, 3)
  assert [text(got, p) for p in range(2)] == ['2+2fo', '3+3s']
  assert got.hint_P.tolist() == [0.5, 0.5] and got.born_P.tolist() == [3, 3]
  assert [ChatLetters().decode(x.tolist()) for x in own.prefixes(got)] == ['fo', 's']


def test_without_room_or_without_a_known_answer_a_prompt_stays_plain():
  own = make(always(1.0), ('2+2', 'four'), ('12345', 'twelve'), ('9', ''), prompt_tokens=8)
  got = own.add_hints(own.table.prompts([0, 1, 2]), 0)
  assert [text(got, p) for p in range(3)] == ['2+2four', '12345', '9']
  assert got.hint_P.tolist() == [1, 0, 0]
  assert [len(x) for x in own.prefixes(got)] == [4, 0, 0]


def test_an_answer_told_in_the_question_is_learned_as_one_to_the_plain_question():
  own = make(always(1.0, hint_rules.CONTEXT, plain=True), *PAIRS)
  plain = own.table.prompts([0, 1])
  got = own.add_hints(plain, 0)
  assert text(got, 0) == '2+2\n\nThe answer begins with: four'
  assert [len(x) for x in own.prefixes(got)] == [0, 0]
  batch = answered(got, 'four', 'no', 'six', 'no', right=[1, 0, 1, 0])
  learned, row = own.update(batch, np.array([True, True]))
  np.testing.assert_array_equal(learned.prompts.tokens_PxL, plain.tokens_PxL)
  np.testing.assert_array_equal(learned.prompts.length_P, plain.length_P)
  assert learned.rollout is batch.rollout  # with the log-probabilities that the hint gave them
  assert row == {'hint/groups': 2, 'hint/share': 1.0, 'hint/right': 0.5}


def test_a_group_that_only_fills_the_cache_has_no_rows_to_learn():
  own = make(hint_rules.self_rolled(), *PAIRS)
  wrong = answered(own.add_hints(own.table.prompts([0]), 0), 'no', 'no', right=[0, 0])
  own.update(wrong, np.array([True]))
  plain = own.table.prompts([0, 1])
  got = own.add_hints(plain, 1)
  assert text(got, 0) == '2+2\n\nThe answer begins with: four' and text(got, 1) == '3+3'
  batch = answered(got, 'four', 'no', 'six', 'no', right=[1, 0, 1, 0])
  learned, row = own.update(batch, np.array([True, True]))
  assert learned.rollout.length_B.tolist() == [0, 0, 4, 3] and row['hint/groups'] == 1
  np.testing.assert_array_equal(learned.prompts.tokens_PxL, plain.tokens_PxL)
  assert batch.rollout.length_B.tolist() == [5, 3, 4, 3]  # what the cache reads
  assert own.add_hints(plain, 2).hint_P.tolist() == [0, 0]


def test_what_is_learned_behind_a_prefix_keeps_it():
  own = make(always(0.5), *PAIRS)
  got = own.add_hints(own.table.prompts([0]), 0)
  learned, _ = own.update(answered(got, 'ur', 'x', right=[1, 0]), np.array([True]))
  np.testing.assert_array_equal(learned.prompts.tokens_PxL, got.tokens_PxL)


def test_own_right_replies_are_told_rather_than_those_of_the_data_and_whole():
  own = make(always(0.5), *PAIRS)
  got = own.add_hints(own.table.prompts([0]), 0)
  own.update(answered(got, 'nf', 'n', right=[1, 1]), np.array([True]))
  assert (
    ChatLetters().decode(own.answers.tokens[0].tolist()) == 'fon'
  )  # with the prefix, the shortest
  assert text(own.add_hints(own.table.prompts([0]), 1), 0) == '2+2f'
  own.update(answered(got, 'a', 'b', right=[0, 0]), np.array([True]))
  own.update(answered(got, 'a', 'b', right=[1, 1], reason=TRUNCATED), np.array([True]))
  assert ChatLetters().decode(own.answers.tokens[0].tolist()) == 'fon'


def test_a_solved_neighbor_stands_before_the_question():
  own = make(always(1.0, hint_rules.CONTEXT, exemplars=True), *PAIRS)
  plain = own.table.prompts([0, 1])
  assert own.add_hints(plain, 0).hint_P.tolist() == [0, 0]  # nobody has solved anything
  batch = answered(own.add_hints(plain, 0), 'four', 'no', 'no', 'no', right=[1, 0, 0, 0])
  own.update(batch, np.array([True, True]))
  got = own.add_hints(plain, 1)
  assert text(got, 1) == '2+2\nfour\n\n3+3' and got.hint_P.tolist() == [0, 1]


def test_visits_that_count_are_whole_and_a_restored_provider_goes_on():
  rule = hint_rules.prefix(start=0.5, plain=0.0)
  own = make(rule, *PAIRS)
  got = own.add_hints(own.table.prompts([0, 1]), 0)
  assert got.hint_P.tolist() == [0, 0]
  batch = answered(got, 'a', 'b', 'c', 'd', right=[0, 0, 0, 0])
  own.update(batch, np.array([True, False]))
  assert list(own.hints.visits) == [0]
  other = make(rule, *PAIRS)
  other.load_state_dict(own.state_dict())
  for one in (own, other):
    assert one.add_hints(one.table.prompts([0, 1]), 1).hint_P.tolist() == [0.5, 0]


@pytest.mark.parametrize('messages', [False, True])
def test_a_template_reaches_the_last_question(messages):
  row = Row('0', 'a{b}', (), '7', 'made', {})
  if messages:
    said = (dict(role='user', content='x'), dict(role='assistant', content='y'))
    row = row._replace(question='', messages=(*said, dict(role='user', content='a{b}')))
  got = data.with_question(row, '{question} ({hint})', dict(hint='7'))
  assert (got.messages[-1]['content'] if messages else got.question) == 'a{b} (7)'
  assert not messages or (
    got.messages[:2] == row.messages[:2] and row.messages[2]['content'] == 'a{b}'
  )


def test_prompts_are_worth_what_they_are_with_their_hints():
  own = make(hint_rules.prefix(start=0.5, plain=0.0), *PAIRS)
  plain = own.table.prompts([0, 1, 2])
  assert len(own.posterior(0).index) == 0
  batch = answered(own.add_hints(plain, 0), 'a', 'b', 'c', 'd', 'e', 'f', right=[0, 0, 0, 0, 1, 0])
  own.update(batch, np.ones(3, bool))
  got = own.posterior(1)
  assert [x.tolist() for x in got] == [[0, 1], [1, 1], [1, 1]]  # not told before
  batch = answered(own.add_hints(plain, 1), 'a', 'b', 'c', 'd', 'e', 'f', right=[1, 0, 0, 0, 1, 0])
  own.update(batch, np.ones(3, bool))
  got = own.posterior(2)
  assert [x.tolist() for x in got] == [[0, 1], [2, 1], [2, 3]]


def test_each_slot_of_a_prompt_begins_with_its_share_of_the_answer():
  rows = [('2+2', 'abcd'), ('3+3', '')]
  own = make(hint_rules.stages(shares=(0.0, 0.25, 0.75)), *rows)
  slots = own.table.prompts([0, 0, 0, 1, 1, 1])._replace(part_P=np.array([0, 1, 2] * 2, np.int32))
  got = own.add_hints(slots, 0)
  assert [text(got, p) for p in range(6)] == ['2+2', '2+2a', '2+2abc', '3+3', '3+3', '3+3']
  assert got.context_P.tolist() == [0, 1, 2, 0, 0, 0]
  assert got.hint_P.tolist() == [0, 0.25, 0.75, 0, 0, 0]
  # A completion behind a prefix is one with it: the answer of the second prompt is known from here on.
  batch = answered(got, *['x'] * 6, *['wxyz'] * 6, right=[0] * 6 + [1] * 6)
  own.update(batch, np.ones(6, bool))
  again = own.add_hints(slots, 1)
  assert [text(again, p) for p in range(3, 6)] == ['3+3', '3+3w', '3+3wxy']
  narrow = make(hint_rules.stages(shares=(0.0, 0.25, 0.75)), *rows, prompt_tokens=4)
  assert narrow.add_hints(slots, 0).context_P.tolist() == [0, 1, 0, 0, 0, 0]


def test_each_slot_of_a_prompt_has_its_own_strategy_or_none():
  own = make(hint_rules.contexts(texts=('left', 'right'), drop=0.5), *PAIRS)
  plain = own.table.prompts([0, 0, 1, 1])._replace(part_P=np.array([0, 1, 0, 1], np.int32))
  seen = set()
  for step in range(12):
    got = own.add_hints(plain, step)
    for p, (question, side) in enumerate(
      [('2+2', 'left'), ('2+2', 'right'), ('3+3', 'left'), ('3+3', 'right')]
    ):
      hinted = got.context_P[p] >= 0
      assert text(got, p) == (f'{question}\n\n{side}' if hinted else question)
      assert got.context_P[p] == (p % 2 if hinted else -1) and got.hint_P[p] == hinted
    seen.add(tuple((got.context_P >= 0).tolist()))
  assert len(seen) > 4  # slots go without one by one
  batch = answered(got, *['a'] * 8, right=[1] * 8)
  learned, _ = own.update(batch, np.ones(4, bool))
  np.testing.assert_array_equal(learned.prompts.tokens_PxL, got.tokens_PxL)


@pytest.mark.parametrize(
  'flags, message',
  [
    (
      ('curriculum.hint.fn=self_rolled', 'replay.reuse.fn=cached'),
      "hint.fn='self_rolled' learns from demonstrations and no row of the data has one; add a column",
    ),
    (
      ('curriculum.hint.fn=corrected',),
      "hint.part='steps' is no name in config.rewards.parts: none",
    ),
  ],
)
def test_hints_without_what_they_read_are_refused(flags, message):
  config = schema.typed(loading.load('', [f'--config.{flag}' for flag in flags]))
  with pytest.raises(UserError, match=message):
    setup._hints(config, table(('2+2', '')), ChatLetters())

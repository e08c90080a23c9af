"""Each grader on texts that fooled one before."""

from __future__ import annotations

import random
from decimal import Decimal

import pytest

from jaxrl_llm.rewards import verifiers
from jaxrl_llm.rewards.parsing import extract
from jaxrl_llm.types import Row


def row(answer: str, **extra) -> Row:
  return Row('id', 'question', (), answer, 'source', extra)


@pytest.mark.parametrize(
  'text, answer, reward',
  [
    (' 12\n', '12', 1),
    ('12', ' 12 ', 1),
    ('12.', '12', 0),
    ('012', '12', 0),
    ('', '12', 0),
    ('a b', 'ab', 0),
  ],
)
def test_exact(text, answer, reward):
  assert verifiers.exact(text, row(answer)) == reward


@pytest.mark.parametrize(
  'text, answer, share',
  [
    ('foul', 'four', 0.75),
    ('four', 'four', 1.0),
    ('fo', 'four', 1.0),
    ('fourfour', 'four', 0.5),
    (' four', 'four', 0.0),
    ('', 'four', 0.0),
  ],
)
def test_matching_start(text, answer, share):
  assert verifiers.matching_start(text, row(answer)) == share


@pytest.mark.parametrize(
  'text, answer, reward',
  [
    ('so 3 + 4 = 7', '7', 1),
    ('7, not 8', '7', 1),  # a denied answer does not count
    ('7, not 8', '8', 0),
    ('it is 42.', '42', 1),
    ('1,234,567', '1234567', 1),
    ('1234567', '1,234,567', 1),
    ('choose 1,2,3', '3', 1),  # a list, no thousands
    ('1,2345', '2345', 1),
    ('-0', '0', 1),
    ('-0.00', '0', 1),
    ('7.50', '7.5', 1),
    ('.5', '0.5', 1),
    ('+3', '3', 1),
    ('x = -4', '-4', 1),
    ('x = \u22124', '-4', 1),  # the typographic minus
    ('10-4', '4', 1),  # a minus between two terms is no sign
    ('(2)-4', '4', 1),
    ('-4', '4', 0),
    ('9007199254740993', '9007199254740992', 0),  # equal as floats
    ('1' + '0' * 5000, '1' + '0' * 5000, 1),
    ('no number', '7', 0),
    ('', '7', 0),
    ('72', 'reasoning ... #### 72', 1),
  ],
)
def test_number(text, answer, reward):
  assert verifiers.number(text, row(answer)) == reward


@pytest.mark.parametrize('text, reward', [('7 and 8', 1), ('8 and 7', 0), ('none', 0)])
def test_first_number(text, reward):
  assert verifiers.first_number(text, row('7')) == reward


@pytest.mark.parametrize(
  'text, reward',
  [
    (' 12\n', 1),
    ('-1,234.5', 1),
    ('\u22124', 1),
    ('+3', 1),
    ('.5', 1),
    ('12.', 0),
    ('1,23', 0),
    ('1 2', 0),
    ('3 + 4 = 7', 0),
    ('= 7', 0),
    ('', 0),
    ('--7', 0),
    ('1' * 5000 + 'x', 0),
  ],
)
def test_bare_number_judges_the_form_and_not_the_answer(text, reward):
  assert verifiers.bare_number(text, row('no number at all')) == reward


@pytest.mark.parametrize(
  'text, reward',
  [
    ('so <answer>7</answer>', 1),
    ('<answer>\n7 + 1\n</answer>\n', 1),
    ('<answer>7</answer>.', 0),
    ('<answer> </answer>', 0),
    ('<answer>7', 0),
    ('7</answer>', 0),
    ('</answer>7<answer>', 0),
    ('<answer>7</answer><answer>8</answer>', 0),
    ('<answer><answer>7</answer>', 0),
    ('<b>7</b>', 0),
    ('', 0),
  ],
)
def test_tagged_asks_for_one_pair_at_the_end(text, reward):
  assert verifiers.tagged(text, row('7')) == reward
  assert verifiers.tagged(text.replace('answer', 'b'), row('7'), tag='b') == (
    reward or '<b>7</b>' == text
  )


@pytest.mark.parametrize(
  'grader', [verifiers.exact, verifiers.number, verifiers.first_number, verifiers.short_answer]
)
def test_a_row_without_an_answer_is_an_error_and_no_zero(grader):
  with pytest.raises(ValueError, match='has no answer'):
    grader('7', row(''))


def test_an_answer_without_a_number_is_an_error_and_no_zero():
  with pytest.raises(ValueError, match="no number: 'blue'"):
    verifiers.number('7', row('blue'))


def test_an_answer_of_marks_alone_is_an_error_and_an_empty_text_does_not_equal_it():
  with pytest.raises(ValueError, match='holds no word'):
    verifiers.short_answer('', row('**'))


def test_answers_that_nothing_can_be_compared_with_are_errors_and_no_zeros():
  with pytest.raises(ValueError, match="holds no number: 'blue'"):
    verifiers.numeric('7', row('blue'))
  for answer, extra in (
    ('blue', {}),
    ('E', dict(options=['a', 'b'])),
    ('7', dict(options=['a', 'b'])),
  ):
    with pytest.raises(ValueError, match='none of its options'):
      verifiers.multiple_choice('A', row(answer, **extra))
  with pytest.raises(ValueError, match="'options' of row id must be a list of 2 to 26 texts"):
    verifiers.multiple_choice('A', row('A', options=['alone']))


def test_what_is_compared_is_told_for_votes():
  assert extract.numeric('so 75%') == extract.numeric('\\frac{3}{4}') is not None
  assert extract.multiple_choice('The answer is (b).') == 'B' and extract.numeric('x') is None


def gym_row(settings: dict) -> Row:
  reasoning_gym = pytest.importorskip('reasoning_gym')
  entry = reasoning_gym.create_dataset('countdown', seed=3, size=1, **settings)[0]
  gym = dict(name='countdown', settings=settings, answer=entry['answer'])
  return Row('id', entry['question'], (), entry['answer'], 'countdown',
             dict(gym=gym, metadata=entry['metadata']))  # fmt: skip


def test_gym_accepts_what_the_task_accepts():
  # Countdown takes any expression of the right value, which no comparison with the answer would.
  known = gym_row(dict(min_numbers=2, max_numbers=2))
  assert verifiers.gym(known.answer, known) == 1.0
  assert verifiers.gym(f' ({known.answer}) ', known) == 1.0
  assert verifiers.gym('nonsense', known) < 1.0


def test_gym_reads_the_last_tag():
  known = gym_row({})
  text = f'<answer>no</answer> or <answer>\n{known.answer}\n</answer> then'
  assert verifiers.gym(text, known, tag='answer') == 1.0
  assert verifiers.gym(known.answer, known, tag='answer') == 0.0


def test_gym_refuses_rows_of_other_sources():
  with pytest.raises(ValueError, match='does not come from reasoning-gym'):
    verifiers.gym('7', row('7'))


def test_the_last_and_the_first_number_are_those_of_a_search_through_all_of_the_text():
  draw = random.Random(0)
  for _ in range(20_000):
    text = ''.join(draw.choices('012345,,..+-\N{MINUS SIGN}a) ', k=draw.randrange(14)))
    found = extract.NUMBER.findall(text.replace('\N{MINUS SIGN}', '-'))
    values = [Decimal(x.replace(',', '')) for x in found] or [None]
    assert (extract.first_number(text), extract.number(text)) == (values[0], values[-1]), text

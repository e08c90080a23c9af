"""The words around answers: counted by prompts, forgotten step by step, kept through JSON."""

from __future__ import annotations

import json

import pytest

from jaxrl_llm.curriculum import answer_wording
from jaxrl_llm.curriculum.answer_wording import Lead
from jaxrl_llm.curriculum.prompt_features import PromptFeatures


def group(answer, *texts, question=''):
  return answer_wording.Group(question, answer, texts)


def after(*steps):
  record = answer_wording.none()
  for groups in steps:
    record = answer_wording.updated(record, groups)
  return answer_wording.commonest(record)


def plain(before, end=''):
  return Lead(before), end


def test_words_of_one_prompt_are_not_everybodys():
  """A prompt of the next step that is answered in them makes them known, unless it has other words, too."""
  one = group('7', *['It is 7.'] * 8)
  assert after() is after([]) is after([group('7')]) is after([one]) is None
  assert after([one], [group('8', 'It is 8.')]) == plain('It is ', '.')
  assert after([group('7', 'It is 7.', '7')], [group('8', 'It is 8.', '8')]) is None


def test_words_stand_before_and_after_the_last_place_of_the_answer():
  words = after([group('7', '7 is 7, so 7.'), group('8', '7 is 7, so 8.')])
  assert words == plain('7 is 7, so ', '.') and words.phrase('', '30') == '7 is 7, so 30.'


def test_prompts_count_and_not_completions():
  """Three prompts with one right completion each outweigh sixteen completions of two prompts."""
  many = [group('7', *['so 7'] * 8)] * 2
  few = [group(x, f'It is {x}.') for x in '567']
  assert after([*many, *few]) == after([*few, *many]) == plain('It is ', '.')


def test_the_shares_of_a_prompt_add_up_to_one():
  """Of 'a': 2/3 of each prompt; of 'b': 1/3, and 1 or 1/3 in the next step."""
  first = group('7', 'a 7', 'a 7', 'b 7')
  assert after([first] * 2) == plain('a ')
  assert after([first] * 2, [group('5', 'b 5')]) == plain('b ')
  assert after([first] * 3, [group('5', 'b 5')]) == plain('b ')
  assert after([first] * 3, [group('5', 'b 5', 'd 5', 'd 5')]) == plain('a ')


@pytest.mark.parametrize('text, answer', [('seven', '7'), ('seven', ''), ('', '7')])
def test_a_completion_without_its_answer_has_no_words(text, answer):
  assert after([group(answer, text)] * 3) is None


def test_sentences_that_end_otherwise_count_together():
  """2 of 5 end with a full stop and 2 without one, of which the newer weigh more."""
  without, other = group('7', 'It is 7'), group('9', 'so 9')
  assert after([group('8', 'It is 8.'), other], [without]) == plain('It is ')
  assert after([without, other], [group('8', 'It is 8.')]) == plain('It is ', '.')


def test_an_end_of_the_commonest_words_is_chosen():
  """Of 7 prompts 3 have other words, and more than either end."""
  said, other = [group('7', 'It is 7.', 'It is 7')] * 4, [group('7', 'so 7')] * 3
  assert after([*other, *said]) == plain('It is ', '.')


def test_a_part_of_the_question_is_repeated_for_every_question():
  """Ends of the question stay away: nine characters before the sum, and its full stop."""
  words = after(
    [
      group('5', 'So 2 + 3 = 5.', question='Calculate 2 + 3.'),
      group('107', 'So 35 + 72 = 107.', question='Calculate 35 + 72.'),
    ]
  )
  assert words == (Lead('So', (9, 1), ' = '), '.')
  assert words.phrase('Calculate 4 + 5 + 6.', '15') == 'So 4 + 5 + 6 = 15.'
  assert words.phrase('Why?', '15') == 'So = 15.'


def test_the_longest_part_of_a_question_is_the_repeated_one():
  ask = 'What is the capital of {}?'.format
  groups = [
    group(town, f'The capital of {land} is {town}.', question=ask(land))
    for land, town in [('France', 'Paris'), ('Italy', 'Rome')]
  ]
  words = after(groups)
  assert words.phrase(ask('Peru'), 'Lima') == 'The capital of Peru is Lima.'


@pytest.mark.parametrize('question', ['Say 7 and 8 now', 'The answer or not?', 'an answer'])
def test_words_that_stand_in_all_questions_repeat_nothing(question):
  """All completions have the same characters of their question, and go on as they are."""
  words = after([group('7', 'The answer is 7', question=question)] * 2)
  assert words == plain('The answer is ')


def test_a_question_shorter_than_both_ends_has_no_part():
  assert Lead('(', (0, 5), ')').text('four') == Lead('(', (5, 0), ')').text('four') == '()'


def test_two_characters_are_no_part_of_a_question():
  groups = [group('7', 'ab 7', question='xab'), group('7', 'cd 7', question='xcd')]
  assert after(groups) is None
  groups = [group('7', 'abc 7', question='xabc'), group('7', 'def 7', question='xdef')]
  assert after(groups) == (Lead('', (1, 0), ' '), '')


def test_newer_words_replace_older_ones():
  """1 + .9 + .81 of older steps against as much of newer ones, whose newest counts most."""
  old, new = [group('7', 'old 7')], [group('7', 'new 7')]
  assert after(old, old) == plain('old ') and after(old, old, *[[]] * 9) is None
  assert after(old, old, old, new) == plain('old ')
  assert after(old, old, old, new, new, new) == plain('new ')


def test_the_heaviest_words_are_kept():
  """Words of twenty other prompts push out one another, and not the heavy ones."""
  heavy = [group('7', 'x 7')] * 3
  light = [group('7', f'{i} 7') for i in range(20)]
  record = answer_wording.updated(answer_wording.none(), heavy)
  record = answer_wording.updated(record, light)
  assert answer_wording.commonest(record) == plain('x ')
  assert len(json.loads(record.tobytes())) == 16


def test_any_text_passes_through_a_record():
  text = 'Das Ergebnis: "\\boxed{7}" 🦜\n\t'
  features = PromptFeatures(4, 2, 1, 0, answer_tokens=8)
  assert features.phrase('', '7') == ''
  features.observe([group('7', text, question='»7«')] * 2)
  assert features.phrase('', '7') == text and features.phrase('', '8') == text.replace('7', '8')
  other = PromptFeatures(4, 2, 1, 0, answer_tokens=8)
  other.load({name: array.copy() for name, array in features.state.items()})
  assert other.phrase('', '9') == features.phrase('', '9')
  parts = PromptFeatures(4, 2, 1, 0, answer_tokens=8)
  parts.observe([group('1', f'"{x}": 1', question=f'¿{x}?') for x in ('🦜🦜🦜', 'uno')])
  other.load({name: array.copy() for name, array in parts.state.items()})
  assert other.phrase('¿ñandú?', '9') == '"ñandú": 9'

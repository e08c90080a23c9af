"""The words around answers: counted by prompts, forgotten step by step, kept through JSON."""

from __future__ import annotations

import json

import pytest

from jaxrl_llm.curriculum import answer_wording
from jaxrl_llm.curriculum.prompt_features import PromptFeatures


def after(*steps):
  record = answer_wording.none()
  for groups in steps:
    record = answer_wording.updated(record, groups)
  return answer_wording.commonest(record)


def test_words_of_one_prompt_are_not_everybodys():
  """A prompt of the next step that is answered in them makes them known, unless it has other words, too."""
  one = ('7', ['It is 7.'] * 8)
  assert after() is after([]) is after([('7', [])]) is after([one]) is None
  assert after([one], [('8', ['It is 8.'])]) == ('It is ', '.')
  assert after([('7', ['It is 7.', '7'])], [('8', ['It is 8.', '8'])]) is None


def test_words_stand_before_and_after_the_last_place_of_the_answer():
  words = after([('7', ['7 is 7, so 7.']), ('8', ['7 is 7, so 8.'])])
  assert words == ('7 is 7, so ', '.') and words.phrase('30') == '7 is 7, so 30.'


def test_prompts_count_and_not_completions():
  """Two prompts with one right completion each outweigh eight completions of one prompt."""
  many, few = ('7', ['3 + 4 = 7'] * 8), [('5', ['It is 5.']), ('6', ['It is 6.'])]
  assert after([many, *few]) == after([*few, many]) == ('It is ', '.')


def test_the_shares_of_a_prompt_add_up_to_one():
  """Of 'a': 2/3 + 2/3. Of 'b': 1/3 + 1/3 + 2/3 or 1."""
  first = ('7', ['a 7', 'a 7', 'b 7'])
  assert after([first, first, ('5', ['b 5', 'b 5', 'd 5'])]) == ('a ', '')
  assert after([first, first, ('5', ['b 5', 'b 5'])]) == ('b ', '')


@pytest.mark.parametrize('text, answer', [('seven', '7'), ('seven', ''), ('', '7')])
def test_a_completion_without_its_answer_has_no_words(text, answer):
  assert after([(answer, [text])] * 3) is None


def test_newer_words_replace_older_ones():
  """1 + .9 + .81 of older steps against as much of newer ones, whose newest counts most."""
  old, new = [('7', ['old 7'])], [('7', ['new 7'])]
  assert after(old, old) == ('old ', '') and after(old, old, *[[]] * 9) is None
  assert after(old, old, old, new) == ('old ', '')
  assert after(old, old, old, new, new, new) == ('new ', '')


def test_the_heaviest_words_are_kept():
  """Words of twenty other prompts push out one another, and not the heavy ones."""
  heavy = [('7', ['x 7'])] * 3
  light = [('7', [f'{i} 7']) for i in range(20)]
  record = answer_wording.updated(answer_wording.none(), heavy)
  record = answer_wording.updated(record, light)
  assert answer_wording.commonest(record) == ('x ', '')
  assert len(json.loads(record.tobytes())) == 16


def test_any_text_passes_through_a_record():
  text = 'Das Ergebnis: "\\boxed{7}" 🦜\n\t'
  features = PromptFeatures(4, 2, 1, 0, answer_tokens=8)
  assert features.phrase('7') == ''
  features.observe([('7', [text])] * 2)
  assert features.phrase('7') == text and features.phrase('8') == text.replace('7', '8')
  other = PromptFeatures(4, 2, 1, 0, answer_tokens=8)
  other.load({name: array.copy() for name, array in features.state.items()})
  assert other.phrase('9') == features.phrase('9')

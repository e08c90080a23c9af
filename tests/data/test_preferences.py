"""Pairs for reward models: TRL's preference format in its forms, the split, and bad rows."""

from __future__ import annotations

import json

import pytest

from jaxrl_llm import data
from jaxrl_llm.config import schema
from jaxrl_llm.data import preferences
from jaxrl_llm.types import UserError


def user(text):
  return dict(role='user', content=text)


def assistant(text):
  return dict(role='assistant', content=text)


@pytest.mark.parametrize(
  'record, prompt',
  [
    (dict(prompt='2 + 3 = ', chosen='5', rejected='6'), '2 + 3 = '),
    (dict(chosen='2 + 3 = 5', rejected='2 + 3 = 6'), '2 + 3 = '),
    (dict(prompt=[user('2?')], chosen=[assistant('2')], rejected=[assistant('3')]), [user('2?')]),
    (
      dict(chosen=[user('2?'), assistant('2')], rejected=[user('2?'), assistant('3')]),
      [user('2?')],
    ),
  ],
  ids=('text', 'whole texts', 'messages', 'whole conversations'),
)
def test_the_forms_of_trl(record, prompt):
  """The prompt is that of the row, or what both completions begin with; together they are the row's own content."""
  row = preferences.to_pair(record | dict(margin=2), 'here')
  found = list(row.messages) or row.question
  assert found == prompt and row.extra['margin'] == 2.0
  for side in ('chosen', 'rejected'):
    assert found + row.extra[side] == record.get('prompt', record[side][:0]) + record[side]
  assert preferences.to_pair(record, 'here').extra['margin'] == 0.0


BAD = {
  'no object': ([1], r'line 2 is no JSON object but a list'),
  'no chosen': (dict(prompt='a', rejected='b'), r"line 2 has no 'chosen'; a pair needs 'chosen'"),
  'no rejected': (dict(prompt='a', chosen='b', rejected=None), r"line 2 has no 'rejected'"),
  'a number': (
    dict(prompt='a', chosen=1, rejected='b'),
    r"line 2: 'chosen' must be text or a list",
  ),
  'no role': (dict(chosen=[dict(content='a')], rejected=[user('b')]), r"needs text under 'role'"),
  'empty': (dict(prompt=' ', chosen='a', rejected='b'), r"line 2: 'prompt' must be text"),
  'mixed': (dict(prompt=[user('a')], chosen='a', rejected='b'), r'line 2 mixes text and messages'),
  'mixed sides': (dict(chosen='a', rejected=[user('b')]), r'line 2 mixes text and messages'),
  'equal': (
    dict(prompt='a', chosen='b', rejected='b'),
    r"line 2: 'chosen' and 'rejected' are equal",
  ),
  'margin': (
    dict(prompt='a', chosen='b', rejected='c', margin='x'),
    r"'margin' is 'x'; give a number",
  ),
  'infinite': (dict(prompt='a', chosen='b', rejected='c', margin=float('inf')), r"'margin' is inf"),
  'surrogate': (dict(prompt='a', chosen='\ud800', rejected='c'), r"'chosen' is no Unicode"),
}


@pytest.mark.parametrize('name', BAD)
def test_a_bad_row_is_one_sentence_with_its_line(tmp_path, name):
  record, message = BAD[name]
  path = tmp_path / 'pairs.jsonl'
  good = dict(prompt='a', chosen='b', rejected='c')
  path.write_text(f'{json.dumps(good)}\n{json.dumps(record)}\n')
  with pytest.raises(UserError, match=message):
    data.load_pairs(schema.DataConfig(source='jsonl', path=str(path)), 0)


def test_other_sources_have_no_pairs():
  with pytest.raises(UserError, match="config.data.source='gym' has no pairs.*--config.data.path="):
    data.load_pairs(schema.DataConfig(), 0)


def test_pairs_without_a_common_prompt_are_held_out_one_by_one(tmp_path):
  """None of the others leaves the training rows with it."""
  rows = [dict(chosen=f'{n} good', rejected=f'bad {n}') for n in range(20)]
  (tmp_path / 'pairs.jsonl').write_text('\n'.join(map(json.dumps, rows)))
  config = schema.DataConfig(source='jsonl', path=str(tmp_path / 'pairs.jsonl'))
  train, held_out = data.load_pairs(config, 3)
  assert len(train) == 17 and len(held_out) == 3
  assert {row.question for row in train} == {''}


def write(path, prompts):
  rows = [
    dict(prompt=p, chosen=f'{p} right', rejected=f'{p} {k}') for p in prompts for k in range(2)
  ]
  path.write_text('\n'.join(map(json.dumps, rows)) + '\n')
  return str(path)


def test_no_prompt_is_on_both_sides(tmp_path):
  """A seeded split, and a file of held-out pairs."""
  path = write(tmp_path / 'pairs.jsonl', [f'p{n}' for n in range(20)])
  config = schema.DataConfig(source='jsonl', path=path)
  train, held_out = data.load_pairs(config, 3)
  assert len(held_out) == 3 and len(train) == 34
  assert not {row.question for row in train} & {row.question for row in held_out}
  own = write(tmp_path / 'own.jsonl', ['p0', 'q'])
  config = schema.DataConfig(source='jsonl', path=path, eval_path=own, size=7)
  train, held_out = data.load_pairs(config, 9)
  assert len(held_out) == 4 and len(train) == 7
  assert 'p0' not in {row.question for row in train}

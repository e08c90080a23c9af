"""Traits of rows of files: columns as MATH, MATH-500, GSM8K and DAPO have them."""

from __future__ import annotations

import json
import pathlib
import tempfile

import numpy as np
import pytest

from jaxrl_llm import data
from jaxrl_llm.config import loading
from jaxrl_llm.data import files, pipeline

SUBJECTS = ('Algebra', 'Geometry', 'Number Theory', 'Prealgebra', 'Precalculus')
N = 600


class Words:
  """A tokenizer: one token per word."""

  end_ids = (0,)

  def encode(self, text):
    return range(1, 1 + len(text.split()))

  def encode_chat(self, messages):
    return self.encode(' '.join(m['content'] for m in messages))


def problem(i: int) -> str:
  """One of four lengths, unrelated to level and subject."""
  return f'Problem {i}: ' + 'find the value ' * (1 + i // 150)


def math_500(i: int) -> dict:
  return dict(
    problem=problem(i),
    solution=f'We have {i}.',
    answer=str(i % 3),
    subject=SUBJECTS[i % 5],
    level=1 + i % 7 % 5,
    unique_id=f'test/{i}.json',
  )


def hendrycks(i: int) -> dict:
  row = dict(problem=problem(i), solution=f'We have {i}.')
  return row | dict(answer=str(i % 3), type=SUBJECTS[i % 5], level=f'Level {1 + i % 7 % 5}')


def dapo(i: int) -> dict:
  return dict(
    data_source='math_dapo',
    prompt=[dict(role='user', content=problem(i))],
    ability='MATH',
    reward_model=dict(ground_truth=str(i), style='rule'),
    extra_info=dict(index=f'9a{i}', split='train', tier=['easy', 'hard'][i % 2]),
  )


def gsm8k(i: int) -> dict:
  return dict(question=problem(i), answer=f'It is {i}.\n#### {i}')


def kinds(records, **columns) -> np.ndarray:
  """The kinds of these records, read and encoded as a run does."""
  config = loading.default()
  config.data.update(dict(source='jsonl', chat=False, columns=columns))
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder, 'rows.jsonl')
    path.write_text(''.join(json.dumps(record) + '\n' for record in records))
    config.data.path = str(path)
    config.data.chat = isinstance(records[0].get('prompt'), list)
    table = pipeline.make_table(
      files.read(str(path), 'config.data.path', config.data), config.data, 100, Words()
    )
  assert len(table) == len(records)
  return data.kinds(table.rows, table.file_tokens_N)


def same_partition(kind_N, label_N) -> bool:
  """Equal kinds exactly where labels are equal."""
  pairs = set(zip(kind_N.tolist(), label_N, strict=True))
  return len(pairs) == len(set(kind_N.tolist())) == len(set(label_N))


MATH = dict(question='problem')
QUARTER = [i // 150 for i in range(N)]


@pytest.mark.parametrize('layout, second', [(math_500, 'subject'), (hendrycks, 'type')])
def test_level_and_subject_form_the_kinds_of_math(layout, second):
  """Times the quarters of length there would be 100 kinds of 600 rows, too few rows for each."""
  rows = [layout(i) for i in range(N)]
  assert same_partition(kinds(rows, **MATH), [(r['level'], r[second]) for r in rows])


def test_a_stated_level_enters_before_columns_of_fewer_values():
  rows = [math_500(i) | dict(form='ab'[i // 7 % 2]) for i in range(80)]  # room for 8 kinds
  assert same_partition(kinds(rows, **MATH), [r['level'] for r in rows])


def test_length_alone_forms_the_kinds_of_gsm8k():
  assert same_partition(kinds([gsm8k(i) for i in range(N)]), QUARTER)


def test_fields_of_extra_info_count_and_its_index_does_not():
  rows = [dapo(i) for i in range(N)]
  labels = [(i % 2, quarter) for i, quarter in enumerate(QUARTER)]
  assert same_partition(kinds(rows), labels)


def test_permuted_rows_have_permuted_kinds():
  rows = [math_500(i) for i in range(N)]
  order = np.random.default_rng(0).permutation(N)
  permuted = kinds([rows[i] for i in order], **MATH)
  assert np.array_equal(permuted, kinds(rows, **MATH)[order])


@pytest.mark.parametrize(
  'column',
  [
    lambda i: dict(note=f'Seen in exam {i}.'),
    lambda i: dict(number=i % 61),  # fewer than 10 rows each
    lambda i: dict(number=i % 40),  # 15 rows each, and more than 32 values
    lambda i: dict(license='MIT'),
    lambda i: {f'own {i}': 'yes'},
    lambda i: dict(rare='yes') if i % 3 == 0 else {},
    lambda i: dict(index=i % 2),
    lambda i: dict(tags=['a', 'b'][: i % 2]),
    lambda i: dict(rate=i % 2 / 2),
    lambda i: dict(extra_info=dict(answer='AB'[i % 2], solution='AB'[i % 2])),
  ],
)
def test_other_columns_change_nothing(column):
  rows = [gsm8k(i) for i in range(N)]
  more = [row | column(i) for i, row in enumerate(rows)]
  assert np.array_equal(kinds(more), kinds(rows))


def test_a_source_has_traits_of_its_own():
  rows = [gsm8k(i) | dict(data_source='one', level=i % 2) for i in range(N // 2)]
  rows += [gsm8k(i) | dict(data_source='two', level=i) for i in range(N // 2, N)]
  labels = [(r['data_source'], r['level'] % 2 * (i < N // 2), i // 150) for i, r in enumerate(rows)]
  found = kinds(rows)
  # Two lengths in each source, which the edges of quarters separate.
  assert same_partition(found, labels)


def test_a_few_rows_are_one_kind():
  assert kinds([math_500(i) for i in range(9)], **MATH).tolist() == [0] * 9


def test_rows_without_a_value_are_a_kind_of_their_own():
  rows = [math_500(i) for i in range(N)]
  for row in rows[::2]:
    del row['subject']
  labels = [(r['level'], r.get('subject')) for r in rows]
  assert same_partition(kinds(rows, **MATH), labels)


def test_there_are_at_most_256_kinds():
  """c and a form 32; b would make 512 of them."""
  rows = [dict(question=f'q {i}', answer='1', a=i % 16, b=i // 16 % 16) for i in range(8000)]
  rows = [row | dict(c=i // 256 % 2) for i, row in enumerate(rows)]
  assert same_partition(kinds(rows), [(r['a'], r['c']) for r in rows])

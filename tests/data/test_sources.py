"""Sources gym, digits and jsonl: rows, disjoint sets, determinism by seed, and errors."""

from __future__ import annotations

import collections
import json
import re
import subprocess
import sys

import ml_collections
import pytest

from jaxrl_llm import data as package
from jaxrl_llm.config import loading
from jaxrl_llm.data import files, sources, tasks
from jaxrl_llm.rewards import verifiers
from jaxrl_llm.types import UserError


def data_of(**settings) -> ml_collections.ConfigDict:
  data = loading.default().data
  with data.unlocked():
    data.update(settings)
  return data


def questions(rows) -> list[str]:
  return [tasks.question_key(row) for row in rows]


SMALL = dict(name='chain_sum', min_terms=2, max_terms=2, min_digits=1, max_digits=1)


def check_split_and_seed(source, data, other_seed):
  train, held_out = source(data, 20)
  assert not set(questions(train)) & set(questions(held_out))
  assert len(set(questions(train))) == len(train) and len(held_out) == 20
  assert source(data, 20) == (train, held_out)
  assert questions(source(other_seed, 20)[0]) != questions(train)
  return train, held_out


def test_digits():
  data = data_of(source='digits', size=200)
  train, held_out = check_split_and_seed(sources.digits, data, data_of(size=200, seed=1))
  assert len(train) == 200
  assert {row.source for row in train} == {'digits/copy', 'digits/rev', 'digits/sort'}
  assert {row.extra['length'] for row in train} == set(range(1, 9))
  # The order is mixed: a step's prompts come from several tasks.
  assert len({row.source for row in train[:20]}) > 2


def test_digits_settings():
  data = data_of(tasks=(dict(name='rev', min_length=3, max_length=3, size=5),))
  train, _ = sources.digits(data, 0)
  assert [len(row.answer) for row in train] == [3] * 5
  assert all(row.question == f'rev:{row.answer[::-1]}=' for row in train)


@pytest.mark.parametrize('settings', [dict(min_length=0), dict(min_length=5, max_length=4),
                                      dict(max_length=2.5)])  # fmt: skip
def test_digits_refuse_lengths_that_are_none(settings):
  with pytest.raises(UserError, match=r'config.data.tasks\[0\]: (min|max)_length='):
    sources.digits(data_of(source='digits', tasks=(dict(name='rev', **settings),)), 0)


def test_digits_end_where_there_are_no_more(caplog):
  data = data_of(tasks=(dict(name='copy', max_length=1, size=100),))
  assert sorted(row.answer for row in sources.digits(data, 0)[0]) == list('0123456789')
  assert 'gave 10 training' in caplog.text


def test_digits_refuse_an_unknown_operation():
  with pytest.raises(UserError, match="name='reverse' is no digits task"):
    sources.digits(data_of(source='digits', tasks=(dict(name='reverse'),)), 0)


@pytest.fixture
def reasoning_gym():
  return pytest.importorskip('reasoning_gym')


def test_gym(reasoning_gym):
  wide = (dict(name='chain_sum', min_terms=2, max_terms=3, min_digits=1, max_digits=2),)
  data = data_of(tasks=wide, size=100)
  train, _ = check_split_and_seed(sources.gym, data, data_of(tasks=wide, size=100, seed=1))
  for row in train:
    expression = row.question.split(':')[1].rstrip('= ')
    assert str(eval(expression)) == row.answer  # noqa: S307
    assert 2 <= len(expression.split()) // 2 + 1 <= 3


def test_gym_splits_a_task_with_few_questions(reasoning_gym):
  train, held_out = sources.gym(data_of(tasks=(SMALL,), size=400), 100)
  assert len(train) + len(held_out) == 200  # all there are
  assert not set(questions(train)) & set(questions(held_out))
  assert len(held_out) == 40


def test_gym_seeds_one_apart_do_not_share_their_rows(reasoning_gym):
  # Row i of a generator depends on seed + i alone.
  wide = (dict(name='chain_sum', min_terms=5, max_terms=6, min_digits=3, max_digits=4),)
  zero, one = (sources.gym(data_of(tasks=wide, size=100, seed=s), 0)[0] for s in (0, 1))
  assert not set(questions(zero)) & set(questions(one))


def test_gym_keeps_what_its_grader_needs(reasoning_gym):
  (row,), _ = sources.gym(data_of(tasks=(dict(name='countdown', min_numbers=3, size=1),)), 0)
  assert row.extra['gym'] == dict(name='countdown', settings=dict(min_numbers=3), answer=row.answer)
  assert row.extra['metadata']['target']


def test_gym_levels_are_those_of_its_own_curriculum(reasoning_gym):
  """Level k of chain_sum has k + 2 terms of k + 1 digits; each level equally often and graded with its settings."""
  task = dict(name='chain_sum', levels=(0, 2), allow_negation=False)
  train, held_out = sources.gym(data_of(tasks=(task,), size=60), 12)
  for row in train + held_out:
    level, settings = row.extra['level'], row.extra['gym']['settings']
    terms = re.findall(r'\d+', row.question.partition('=')[0])
    assert len(terms) == level + 2 and {len(term) for term in terms} == {level + 1}
    assert settings['max_terms'] == level + 2 and settings['allow_negation'] is False
    assert verifiers.gym(row.answer, row) == 1
  counts = collections.Counter(row.extra['level'] for row in train)
  assert set(counts) == {0, 1, 2} and max(counts.values()) - min(counts.values()) <= 4
  assert len(set(package.kinds(train))) == 3


def test_gym_leaves_out_numbers_for_which_a_generator_finds_no_question(reasoning_gym, monkeypatch):
  from reasoning_gym.factory import DATASETS

  made, _ = DATASETS['chain_sum']
  draw, asked = made.__getitem__, set()

  def find(self, index):
    asked.add(index)
    if index % 3 == 0:
      raise RuntimeError('no path of this length after 1000 attempts')
    return draw(self, index)

  task = dict(name='chain_sum', min_terms=4, max_terms=4)
  everything, _ = sources.gym(data_of(tasks=(task,), size=30), 0)
  monkeypatch.setattr(made, '__getitem__', find)
  train, held_out = sources.gym(data_of(tasks=(task,), size=20), 5)
  assert (len(train), len(held_out)) == (20, 5) and 0 in asked
  first = {row.id for row in everything}
  assert 0 < sum(row.id in first for row in train) < 30
  monkeypatch.setattr(made, '__getitem__', lambda self, index: find(self, 0))
  with pytest.raises(UserError, match="'chain_sum' gave no new question; change its settings"):
    sources.gym(data_of(tasks=(task,), size=20), 0)


def test_gym_has_a_default(reasoning_gym):
  train, held_out = sources.gym(data_of(size=10), 5)
  assert (len(train), len(held_out)) == (10, 5)
  assert {row.source for row in train} == {'chain_sum'}


@pytest.mark.parametrize(
  'entry, message',
  [
    (dict(name='chain_sum', levels=3), 'levels=3 must be the lowest and the highest, of the levels 0 to 10'),
    (dict(name='chain_sum', levels=(0, 11)), 'levels=(0, 11) must be'),
    (dict(name='composite', levels=(0, 1)), "'composite' has no levels"),
    (dict(name='chainsum'), "name='chainsum' is no gym task; did you mean chain_sum"),
    (dict(name='chain_sum', min_term=2), "is no setting of 'chain_sum'; did you mean min_terms"),
    (dict(name='chain_sum', seed=2), "seed is no setting of 'chain_sum'"),
    (dict(name='chain_sum', min_terms=4, max_terms=2), "'chain_sum' refuses its settings"),
    (dict(name='chain_sum', min_terms='two'), "'chain_sum' refuses its settings"),
  ],
)  # fmt: skip
def test_gym_tells_what_is_wrong(reasoning_gym, entry, message):
  with pytest.raises(UserError) as error:
    sources.gym(data_of(tasks=(entry,)), 0)
  assert message in str(error.value)


def test_gym_refuses_tasks_that_differ_between_processes(reasoning_gym, monkeypatch):
  data = data_of(tasks=(dict(name='ransom_note', size=2),))
  monkeypatch.delenv('PYTHONHASHSEED', raising=False)
  with pytest.raises(UserError, match='set PYTHONHASHSEED=0'):
    sources.gym(data, 0)
  monkeypatch.setenv('PYTHONHASHSEED', '0')
  assert len(sources.gym(data, 0)[0]) == 2


def test_gym_without_reasoning_gym_names_the_extra(monkeypatch):
  monkeypatch.setitem(sys.modules, 'reasoning_gym.factory', None)
  with pytest.raises(UserError, match=r"pip install -e '[^']*\[gym\]'"):
    sources.gym(data_of(), 0)


def write(path, rows) -> str:
  path.write_text('\n'.join(json.dumps(row) for row in rows))
  return str(path)


def numbered(count, start=0):
  return [dict(question=f'q{i}', answer=str(i)) for i in range(start, start + count)]


def test_jsonl(tmp_path):
  path = write(tmp_path / 'a.jsonl', numbered(200))
  data = data_of(path=path)
  train, held_out = check_split_and_seed(sources.jsonl, data, data_of(path=path, seed=1))
  assert len(train) == 180
  assert questions(train) == [q for q in questions(files.read(path, '')) if q in
                              set(questions(train))]  # fmt: skip
  assert len(sources.jsonl(data_of(path=path, size=7), 20)[0]) == 7


def test_a_row_added_to_the_file_moves_no_other(tmp_path):
  path = tmp_path / 'a.jsonl'
  before = sources.jsonl(data_of(path=write(path, numbered(100))), 10)[1]
  after = sources.jsonl(data_of(path=write(path, numbered(1, 900) + numbered(100))), 10)[1]
  assert len(set(questions(before)) & set(questions(after))) >= 9


def test_jsonl_holds_out_questions_not_lines(tmp_path):
  rows = [dict(question=f'q{i % 50}', answer=str(i)) for i in range(200)]
  train, held_out = sources.jsonl(data_of(path=write(tmp_path / 'a', rows)), 1000)
  assert not set(questions(train)) & set(questions(held_out))
  assert len(held_out) == 10 and len(train) == 4 * 40


def test_jsonl_with_a_file_for_evaluation(tmp_path, caplog):
  path, other = write(tmp_path / 'a', numbered(20)), write(tmp_path / 'b', numbered(20, 15))
  train, held_out = sources.jsonl(data_of(path=path, eval_path=other), 100)
  assert questions(train) == [f'q{i}' for i in range(15)]
  assert questions(held_out) == [f'q{i}' for i in range(15, 35)]
  assert '5 rows were dropped' in caplog.text
  assert len(sources.jsonl(data_of(path=path, eval_path=other), 6)[1]) == 6
  with pytest.raises(UserError, match='holds only questions that are also in'):
    sources.jsonl(data_of(path=path, eval_path=path), 6)


@pytest.mark.parametrize('source', ['digits', 'gym'])
def test_another_process_draws_the_same_rows(source):
  if source == 'gym':
    pytest.importorskip('reasoning_gym')
  code = (
    'from jaxrl_llm.config import loading\n'
    'from jaxrl_llm.data import sources\n'
    'data = loading.default().data\n'
    'data.size = 30\n'
    f'print([r.id for rows in sources.{source}(data, 10) for r in rows])\n'
  )
  out = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)
  rows = getattr(sources, source)(data_of(size=30), 10)
  assert out.stdout.strip() == str([row.id for part in rows for row in part])

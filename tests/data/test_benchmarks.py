"""Benchmarks in the layouts of their repositories on the hub, with rows of theirs."""

from __future__ import annotations

import json
import pathlib

import pytest

from jaxrl_llm.config import loading
from jaxrl_llm.data import benchmarks, load_rows
from jaxrl_llm.evaluation.levels import levels
from jaxrl_llm.rewards import score
from jaxrl_llm.types import UserError

FIXTURE = pathlib.Path(__file__).with_name('gsm8k.jsonl')
GSM8K = [
  {name: json.loads(line)['extra_info'][name] for name in ('question', 'answer')}
  for line in FIXTURE.read_text().splitlines()
]
MATH_500 = [
  dict(
    problem='Convert the point $(0,3)$ in rectangular coordinates to polar coordinates.  Enter your answer in the form '
    '$(r,\\theta),$ where $r > 0$ and $0 \\le \\theta < 2 \\pi.$',
    solution='We have that $r = \\sqrt{0^2 + 3^2} = 3.$',
    answer='\\left( 3, \\frac{\\pi}{2} \\right)',
    subject='Precalculus',
    level=2,
    unique_id='test/precalculus/807.json',
  ),
  dict(
    problem='If $f(x) = \\frac{3x-2}{x-2}$, what is the value of $f(-2) +f(-1)+f(0)$? Express your answer as a common '
    'fraction.',
    solution='$f(-2)+f(-1)+f(0)=\\frac{14}{3}$',
    answer='\\frac{14}{3}',
    subject='Algebra',
    level=3,
    unique_id='test/algebra/2584.json',
  ),
]
# HuggingFaceH4/aime_2024 has these columns, math-ai/aime25 problem, answer and id.
AIME = [
  dict(
    id=60 + i,
    problem=f'Find the number of rectangles of kind {i}.',
    solution='',
    answer=answer,
    url='',
    year='2024',
  )
  for i, answer in enumerate(('204', '113', '033'))
]


def lines(path, rows) -> str:
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text('\n'.join(map(json.dumps, rows)))
  return str(path)


def parquet(path, rows) -> str:
  pa = pytest.importorskip('pyarrow')
  from pyarrow import parquet as writer

  path.parent.mkdir(parents=True, exist_ok=True)
  writer.write_table(pa.Table.from_pylist(rows), path)
  return str(path)


def read(path, count=10**6):
  return benchmarks.read(str(path), count, 0)


def graded(benchmark, texts) -> list[float]:
  spec = loading.load('', [f'--config.rewards.fn={benchmark.verifier}']).rewards
  return score(benchmark.rows, texts, spec).reward_B.tolist()


def test_gsm8k_as_parquet_in_the_layout_of_the_hub(tmp_path):
  """Of two subsets and two splits, the test split of main; the label is the number behind the mark."""
  folder = tmp_path / 'gsm8k'
  socratic = [row | dict(question=f'Socratic: {row["question"]}') for row in GSM8K]
  parquet(folder / 'main/train-00000-of-00001.parquet', GSM8K[:4])
  parquet(folder / 'main/test-00000-of-00001.parquet', GSM8K[4:])
  parquet(folder / 'socratic/test-00000-of-00001.parquet', socratic)
  found = read(folder)
  assert found.verifier == 'number' and {row.source for row in found.rows} == {'gsm8k'}
  assert [row.question for row in found.rows] == [row['question'] for row in GSM8K[4:]]
  labels = [row['answer'].rpartition('#### ')[2] for row in GSM8K[4:]]
  assert [row.answer for row in found.rows] == labels
  assert set(graded(found, [f'So it is ${label}.' for label in labels])) == {1.0}
  assert set(graded(found, [f'So it is 1{label}.' for label in labels])) == {0.0}


def test_math_500_with_formulas_and_levels(tmp_path):
  pytest.importorskip('math_verify')
  lines(tmp_path / 'MATH-500' / 'test.jsonl', MATH_500)
  found = read(tmp_path / 'MATH-500')
  assert found.verifier == 'math_verify' and levels(found.rows) == ['2', '3']
  texts = ['It is $\\boxed{(3, \\pi/2)}$.', 'The answer is \\boxed{4\\frac{2}{3}}.']
  assert graded(found, texts) == [1.0, 1.0]
  assert graded(found, texts[::-1]) == [0.0, 0.0]


def test_aime_has_whole_numbers_and_no_test_split(tmp_path):
  parquet(tmp_path / 'aime_2024/data/train-00000-of-00001.parquet', AIME)
  found = read(tmp_path / 'aime_2024')
  assert found.verifier == 'number'
  assert graded(found, ['\\boxed{204}', 'The answer is 113.', 'so 33']) == [1.0] * 3
  aime25 = [{k: row[k] for k in ('id', 'problem', 'answer')} for row in AIME]
  path = lines(tmp_path / 'aime25/test.jsonl', aime25)
  for same in (path, tmp_path / 'aime25'):
    assert [row.question for row in read(same).rows] == [row.question for row in found.rows]


@pytest.mark.parametrize(
  'name, subset, split, rows',
  [
    ('openai/gsm8k', 'main', 'test', GSM8K),
    ('HuggingFaceH4/MATH-500', None, 'test', MATH_500),
    ('HuggingFaceH4/aime_2024', None, 'train', AIME),
    ('yentinglin/aime_2025', None, 'train', AIME),
    ('math-ai/aime25', None, 'test', AIME),
  ],
)
def test_a_hub_name_has_its_subset_and_split(monkeypatch, name, subset, split, rows):
  datasets = pytest.importorskip('datasets')
  calls = []

  def load_dataset(*args, **kwargs):
    calls.append((args, kwargs))
    return datasets.Dataset.from_list(rows)

  monkeypatch.setattr(datasets, 'load_dataset', load_dataset)
  found = read(f'hub:{name}')
  assert calls == [((name, subset), dict(split=split))]
  assert len(found.rows) == len(rows) and {row.source for row in found.rows} == {name}


def test_fewer_prompts_are_a_seeded_choice_with_a_warning(tmp_path, caplog):
  path = lines(tmp_path / 'test.jsonl', GSM8K)
  assert read(path, 5) == read(path, 5) and len(read(path, 5).rows) == 5
  assert f'5 of {len(GSM8K)} prompts are evaluated' in caplog.text
  caplog.clear()
  assert len(read(path).rows) == len(GSM8K) and not caplog.text


def test_training_rows_leave_out_the_questions_of_the_benchmark(tmp_path):
  own = lines(tmp_path / 'own.jsonl', GSM8K)
  test = lines(tmp_path / 'test.jsonl', GSM8K[:3])
  source = ['--config.data.source=jsonl', f'--config.data.path={own}']
  source += ['--config.data.answer_after=####', f'--config.evaluation.benchmark={test}']
  rows = load_rows(loading.load('', source))
  assert [row.question for row in rows.train] == [row['question'] for row in GSM8K[3:]]
  assert len(rows.held_out) == 3 and rows.verifier == 'number'
  with pytest.raises(UserError, match="are also in config.evaluation.benchmark='"):
    load_rows(loading.load('', [*source, f'--config.data.path={test}']))


@pytest.mark.parametrize(
  'rows, message',
  [
    ([dict(question='q', answer='5')], "nor question and answer with '#### number'"),
    ([dict(prompt='q', answer='5')], 'neither the columns problem and answer'),
    ([dict(problem='p', solution='5')], "line 1 has no text or number under 'answer'"),
    ([['p']], 'is one JSON array'),
    ([], 'holds no row'),
  ],
)
def test_rows_of_another_layout_are_refused(tmp_path, rows, message):
  with pytest.raises(UserError, match='config.evaluation.benchmark=.*' + message):
    read(lines(tmp_path / 'test.jsonl', rows))


def test_names_and_folders_that_hold_none_are_refused(tmp_path):
  with pytest.raises(UserError, match='no known benchmark; did you mean openai/gsm8k'):
    read('hub:openai/gsm8')
  with pytest.raises(UserError, match='does not exist; give a folder or file, or hub: and one of'):
    read('openai/gsm8k')
  with pytest.raises(UserError, match='holds no file named test'):
    read(tmp_path)
  for name in ('easy', 'hard'):
    lines(tmp_path / name / 'test.jsonl', AIME)
  with pytest.raises(UserError, match='holds 2 files of one split'):
    read(tmp_path)

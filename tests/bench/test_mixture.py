"""Rows of the mixture: written whole and alike every time, graded as reasoning-gym does, and compared by rules."""

from __future__ import annotations

import collections
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import quick
from tiers import REPEATS

from jaxrl_llm import data
from jaxrl_llm.config import loading
from jaxrl_llm.data import row_formats, sources, traits
from jaxrl_llm.rewards import verifiers
from jaxrl_llm.rewards.parsing import answer_span, extract
from jaxrl_llm.types import UserError
from tests.bench import choices, mixture_rows
from tests.bench.mixture_rows import GENERATORS

pytest.importorskip('reasoning_gym')

ROOT = pathlib.Path(__file__).parents[2]
EACH, HELD_OUT = 40, 2
NAMES = list(GENERATORS)
# sha256 of the rows below: no process and no order of a set changes them.
GOLDEN = '0036c5114ddfab155691a93dac0e93b7cd2bf2de8a741e8c368bac3daff3e258'


def small(seed: int = 0, names=NAMES):
  return mixture_rows.request(names, EACH * len(names), HELD_OUT, seed)


def read(path: pathlib.Path) -> list[dict]:
  return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  path = tmp_path_factory.mktemp('mixture')
  mixture_rows.write(str(path), small())
  return path


def test_rows_have_three_fields_and_all_generators(folder):
  for file, count in (('rows.jsonl', EACH), ('held_out.jsonl', HELD_OUT)):
    rows = read(folder / file)
    assert all(row.keys() == {'question', 'answer', 'source'} for row in rows)
    assert all(type(value) is str and value.strip() for row in rows for value in row.values())
    assert collections.Counter(row['source'] for row in rows) == dict.fromkeys(NAMES, count)
    # Any beginning of the file holds all sources.
    assert {row['source'] for row in rows[: len(NAMES)]} == {*NAMES}
  assert len(NAMES) >= 12


def test_no_question_occurs_twice(folder):
  questions = [
    row['question'].strip() for file in mixture_rows.FILES for row in read(folder / file)
  ]
  assert len({*questions}) == len(questions)


def test_the_rows_depend_on_the_seed_alone(folder, tmp_path):
  again, other = (mixture_rows.write(str(tmp_path / str(seed)), small(seed)) for seed in (0, 1))
  assert again['files']['rows.jsonl']['sha256'] == GOLDEN
  assert again['files'] == json.loads((folder / 'about.json').read_text())['files']
  assert all(again['files'][f]['sha256'] != other['files'][f]['sha256'] for f in mixture_rows.FILES)
  assert not {*NAMES} & {*sources._UNORDERED}


def test_a_number_without_a_question_is_passed_over(tmp_path):
  # Of this stream of mazes the 704th has no path of the length that is asked for.
  mixture_rows.write(str(tmp_path), mixture_rows.request(['maze'], 710, 1, 0))
  assert len(read(tmp_path / 'rows.jsonl')) == 710


def test_a_part_of_the_generators_has_the_same_questions(folder, tmp_path):
  mixture_rows.write(str(tmp_path), small(names=['chain_sum']))
  whole = [row for row in read(folder / 'rows.jsonl') if row['source'] == 'chain_sum']
  assert read(tmp_path / 'rows.jsonl') == whole


def test_about_names_versions_settings_and_seed(folder):
  about = json.loads((folder / 'about.json').read_text())
  assert about['request']['generators'].keys() == {*NAMES} and about['request']['seed'] == 0
  assert (
    about['request']['reasoning_gym'].startswith('0.1.') and about['python'] and about['written']
  )
  assert about['files']['rows.jsonl']['rows'] == EACH * len(NAMES)


def test_written_rows_are_kept_damaged_ones_written_again_and_others_refused(folder, tmp_path):
  request = small(names=['gcd'])
  first, path = mixture_rows.write(str(tmp_path), request), tmp_path / 'rows.jsonl'
  written = path.stat().st_mtime_ns
  assert mixture_rows.write(str(tmp_path), request) == first and path.stat().st_mtime_ns == written
  path.write_text('')
  assert mixture_rows.write(str(tmp_path), request)['files'] == first['files']
  assert len(read(path)) == EACH
  with pytest.raises(
    UserError, match='holds rows of another request, see about.json; give another'
  ):
    mixture_rows.write(str(tmp_path), small(1, ['gcd']))


def test_an_interrupted_file_is_not_there(tmp_path, monkeypatch):
  def interrupted(name, side, count, seed, seen, draw=mixture_rows.draw):
    rows = draw(name, side, count, seed, seen)
    yield next(rows)
    if side == 'train':
      raise KeyboardInterrupt
    yield from rows

  with monkeypatch.context() as patch:
    patch.setattr(mixture_rows, 'draw', interrupted)
    with pytest.raises(KeyboardInterrupt):
      mixture_rows.write(str(tmp_path), small(names=['gcd']))
  assert [path.name for path in tmp_path.iterdir()] == ['held_out.jsonl']
  mixture_rows.write(str(tmp_path), small(names=['gcd']))
  assert len(read(tmp_path / 'rows.jsonl')) == EACH


@pytest.mark.parametrize(
  'options, message',
  [
    (['--generators=gcd,chain_sums'], "'chain_sums' is no generator of the mixture; did you mean chain_sum."),
    (['--rows=1'], f'--rows=1 and --held-out=1 leave a generator without a row; there are {len(NAMES)}'),
    (['--held-out=0'], '--rows=99 and --held-out=0 leave'),
    (['--generators=gcd'], 'gcd has only 3 of 99 different questions for train; lower --rows or --held-out.'),
  ],
)  # fmt: skip
def test_a_bad_request_is_refused_with_one_sentence(tmp_path, monkeypatch, options, message):
  # Four pairs of numbers, of which one is held out.
  monkeypatch.setitem(GENERATORS, 'gcd', dict(min_value=1, max_value=2))
  fixed = ['mixture_rows', f'--out={tmp_path / "out"}', '--rows=99', '--held-out=1']
  monkeypatch.setattr(sys, 'argv', fixed + options)
  with pytest.raises(SystemExit) as error:
    mixture_rows.main()
  assert message in str(error.value) and '\n' not in str(error.value)
  assert not (tmp_path / 'out' / 'rows.jsonl').exists()


def perturbed(answer: str, others: set[str]) -> set[str]:
  """Wrong answers: other values of a number, or words in another order, cut or extended."""
  if extract.NUMBER.fullmatch(answer):
    value = extract.number(answer)
    return {str(value + 1), str(value - 1), str(-value), str(10 * value + 1), f'{answer}1'} - {
      answer,
      '-0',
    }
  words = answer.split()
  wrong = {
    ' '.join(words[::-1]),
    ' '.join(words[1:]),
    answer[::-1],
    answer[:-2],
    f'{answer} {answer}',
    f'un{answer}',
  }
  wrong |= others
  return {text for text in wrong if answer_span.words(text) not in ('', answer_span.words(answer))}


@pytest.mark.parametrize('name', NAMES)
def test_every_source_is_graded_as_reasoning_gym_grades_it(name):
  """Right answers have 1 there and here, and wrong ones neither."""
  import reasoning_gym

  count = 40 * REPEATS
  dataset = reasoning_gym.create_dataset(name, seed=11, size=count, **GENERATORS[name])
  entries = [dataset[i] for i in range(count)]
  answers = {str(entry['answer']) for entry in entries}
  compared = 0
  for entry in entries:
    answer = str(entry['answer'])
    record = dict(question=entry['question'], answer=answer, source=name)
    row = row_formats.to_row(record, 'here', dict(columns=dict(source='source')), 'jsonl')
    assert dataset.score_answer(answer, entry) == verifiers.short_answer(answer, row) == 1
    assert verifiers.short_answer(f'The answer is {answer}.', row) == 1
    for wrong in perturbed(answer, set(sorted(answers)[:8])):
      assert dataset.score_answer(wrong, entry) < 1, (answer, wrong)
      assert verifiers.short_answer(wrong, row) == 0, (answer, wrong)
      compared += 1
  assert compared >= count


class Letters:
  """A token per character."""

  end_ids = (0,)

  def encode(self, text):
    return [ord(letter) % 50 + 1 for letter in text]

  def encode_chat(self, messages):
    return self.encode(''.join(message['content'] for message in messages))


def test_the_curriculum_has_the_source_and_the_length_alone(folder):
  paths = (f'data.path={folder}/rows.jsonl', f'data.eval_path={folder}/held_out.jsonl')
  config = loading.load('mixture', [f'--config.{x}' for x in (*paths, 'prompt_tokens=1000')])
  tables = data.load(config, Letters())
  assert (
    {row.source for row in tables.held_out.rows}
    == {row.source for row in tables.train.rows}
    == {*NAMES}
  )
  levels = traits.levels(tables.train.rows, tables.train.file_tokens_N)
  assert {trait.partition('=')[0] for level in levels for trait in level[1:]} == {'prompt tokens'}
  kinds = traits.kinds(tables.train.rows, tables.train.file_tokens_N)
  assert len(NAMES) < len(np.unique(kinds)) <= 4 * len(NAMES)


# A second start trains nothing.
TWICE = 'from tests.bench import choices; choices.main(); choices.train.run = None; choices.main()'


def test_the_benchmark_runs_the_mixture_and_repeats_no_finished_run(tmp_path):
  options = ['--job=mixture', '--smoke', f'--out={tmp_path}']
  env = os.environ | dict(PYTHONPATH=str(ROOT), JAX_PLATFORMS='cpu', XLA_FLAGS=quick.flags(1))
  process = subprocess.run(
    [sys.executable, '-c', TWICE, *options], cwd=tmp_path, env=env, timeout=280, text=True,
    capture_output=True,
  )  # fmt: skip
  assert process.returncode == 0, process.stderr
  tables = process.stdout[process.stdout.index('\ngreedy: after') :]
  first, second = tables[: len(tables) // 2], tables[len(tables) // 2 :]
  assert first == second and '| greedy at the end, by source | uniform | default |' in first
  assert all(f'| {source} |' in first for source in NAMES)
  for rule in ('uniform', 'default'):
    config = json.loads((tmp_path / f'mixture/{rule}_0/config.json').read_text())
    assert config['curriculum']['utility']['fn'] == dict(uniform='uniform').get(rule, 'mixed_group')
    assert config['rewards']['fn'] == 'short_answer' and config['data']['source'] == 'jsonl'


def test_an_unknown_rule_is_refused(monkeypatch, capsys, tmp_path):
  monkeypatch.setattr(sys, 'argv', ['choices', '--rules=uniform,best', f'--out={tmp_path}'])
  with pytest.raises(SystemExit):
    choices.main()
  assert "--rules: 'best' is unknown; choose from: uniform, " in capsys.readouterr().err

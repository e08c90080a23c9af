"""Introductory jobs of verl and TRL with their data files; gsm8k.jsonl holds rows in verl's format."""

from __future__ import annotations

import json
import pathlib

import pytest

from jaxrl_llm import data, rewards
from jaxrl_llm.config import loading
from jaxrl_llm.rewards import verifiers

ROOT = pathlib.Path(__file__).parents[2]
FIXTURE = pathlib.Path(__file__).with_name('gsm8k.jsonl')
ASK = 'Let\'s think step by step and output the final answer after "####".'


class Letters:
  """One id a character; a chat is its messages between < and >."""

  def encode_chat(self, messages) -> list[int]:
    return [ord(c) for c in ''.join(f'<{m["role"]} {m["content"]}>' for m in messages)]


def config_of(name: str, **changes):
  c = loading.load(name)
  c.data.update(changes)
  return c


def fixture_rows() -> list[dict]:
  return [json.loads(line) for line in FIXTURE.read_text().splitlines()]


def parquet(path, rows) -> str:
  pa = pytest.importorskip('pyarrow')
  from pyarrow import parquet as writer

  writer.write_table(pa.Table.from_pylist(rows), path)
  return str(path)


def test_gsm8k_from_the_files_of_verl(tmp_path):
  """Parquet, and the same rows as JSON lines: same prompts and answers, and disjoint sets."""
  rows = fixture_rows()
  train = parquet(tmp_path / 'train.parquet', rows[:16])
  test = parquet(tmp_path / 'test.parquet', rows[14:])  # two of them are in both
  tables = data.load(config_of('gsm8k', files=(dict(path=train),), eval_path=test), Letters())
  assert (len(tables.train), len(tables.held_out)) == (14, 6)
  for row, tokens, expected in zip(tables.train.rows, tables.train.tokens, rows, strict=False):
    assert ''.join(map(chr, tokens)) == f'<user {expected["extra_info"]["question"]} {ASK}>'
    assert (row.answer, row.source) == (expected['reward_model']['ground_truth'], 'openai/gsm8k')
    assert row.extra['extra_info'] == expected['extra_info'] and row.extra['ability'] == 'math'
  lines = data.load(config_of('gsm8k', files=(dict(path=str(FIXTURE)),), eval_path=test), Letters())
  assert lines.train.rows == tables.train.rows and lines.held_out.rows == tables.held_out.rows


def test_gsm8k_from_raw_rows(tmp_path):
  """Questions and worked answers in the data set's own format give the same prompts and answers."""
  raw = [{k: row['extra_info'][k] for k in ('question', 'answer')} for row in fixture_rows()]
  path = parquet(tmp_path / 'raw.parquet', raw)
  changes = dict(eval_path='', answer_after='####', template=f'{{question}} {ASK}')
  c = config_of('gsm8k', files=(dict(path=path),), **changes)
  c.evaluation.prompts = 4
  tables = data.load(c, Letters())
  assert (len(tables.train), len(tables.held_out)) == (16, 4)
  whole = config_of('gsm8k', files=(dict(path=str(FIXTURE)),), eval_path='')
  whole.evaluation.prompts = 0
  expected = {t.tobytes(): row for t, row in _pairs(data.load(whole, Letters()).train)}
  for tokens, row in (*_pairs(tables.train), *_pairs(tables.held_out)):
    assert row.answer.replace(',', '') == expected[tokens.tobytes()].answer


def _pairs(table):
  return zip(table.tokens, table.rows, strict=True)


def test_gsm8k_is_graded_as_there():
  """A worked answer is right by the strict and the flexible rule; without #### by the flexible one alone."""
  c = config_of('gsm8k', files=(dict(path=str(FIXTURE)),), eval_path='')
  c.evaluation.prompts = 0
  rows = data.load(c, Letters()).train.rows
  grader = rewards.resolve(c.rewards)
  worked = [row.extra['extra_info']['answer'] for row in rows]
  assert all(grader(text, row) == 1 for text, row in zip(worked, rows, strict=True))
  for text, row in zip(worked, rows, strict=True):
    bare = text.replace('####', 'So the answer is')
    assert (grader(bare, row), verifiers.number(bare, row)) == (0, 1)
    assert grader(f'{text}9', row) == verifiers.number(f'{text}9', row) == 0


def test_a_reward_function_beside_the_job(monkeypatch):
  """A reward function in the config file, run in a worker, on rows with a `prompt` and no answer."""
  monkeypatch.chdir(ROOT)
  c = config_of('unique_letters')
  table = data.load(c, Letters()).train
  assert len(table) == 24 and not any(row.answer for row in table.rows)
  assert c.steps * c.prompts == 3 * len(table)
  scores = rewards.score(table.rows[:3], ['aab', '', 'the quick brown fox'], c.rewards)
  assert scores.parts_BxK[:, 0].tolist() == [2, 0, 16]
  assert not any(scores.counts.values())


def test_a_countdown_is_paid_by_its_answer_and_a_little_by_its_form():
  c = config_of('countdown', size=8)
  c.prompt_tokens, c.evaluation.prompts = 1000, 4
  tables = data.load(c, Letters())
  assert (len(tables.train), len(tables.held_out)) == (8, 4)
  graders_of = [(part.grader, part.weight) for part in rewards.resolve_parts(c.rewards)]
  pay = lambda text, row: sum(g(text, row) * weight for g, weight in graders_of)  # noqa: E731
  for row, tokens in zip(tables.train.rows, tables.train.tokens, strict=True):
    assert row.question.rstrip(':') in ''.join(map(chr, tokens))
    assert pay(f'<think>So.</think> <answer>{row.answer}</answer>', row) == pytest.approx(1.1)
    assert pay('<think>So.</think> <answer>0</answer>', row) == pytest.approx(0.1)
    assert pay(f'<think>So.</think> {row.answer}', row) == 0


def test_key_chains_are_long_and_paid_by_the_number():
  c = config_of('keychain', size=3)
  c.prompt_tokens, c.evaluation.prompts = 30_000, 1
  rows = data.load(c, Letters()).train.rows
  grader = rewards.resolve(c.rewards)
  for row in rows:
    assert len(row.question.split()) > 1500 and row.question.count('": "') == row.extra['pairs']
    assert row.extra['pairs'] == 4 * row.extra['links'] and row.extra['links'] in range(3, 7)
    assert grader(f'So it is {row.answer}', row) == 1 and grader('So it is -1', row) == 0


def test_every_row_of_the_rubrics_can_be_judged(monkeypatch, tmp_path):
  monkeypatch.chdir(ROOT)
  c = config_of('rubric')
  c.rewards.cache, c.prompt_tokens = str(tmp_path / 'judge.sqlite'), 200  # of a character each
  tables = data.load(c, Letters())
  named = [(part.name, part.grader) for part in rewards.resolve_parts(c.rewards)]
  for row in (*tables.train.rows, *tables.held_out.rows):
    rewards.check_rows(named, [row])
    assert any(criterion['points'] < 0 for criterion in row.extra['rubric'])
  assert (len(tables.train), len(tables.held_out)) == (13, 3)

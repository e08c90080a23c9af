"""Rows by a number in a column: demonstrations of the supervised start and prompts of RL are disjoint."""

from __future__ import annotations

import pytest
import tiny_job

from jaxrl_llm import data, train
from jaxrl_llm.config import loading
from jaxrl_llm.config.schema import typed
from jaxrl_llm.data import row_filters
from jaxrl_llm.data.tasks import make_row
from jaxrl_llm.runner import sft
from jaxrl_llm.types import UserError
from tests.data.test_pipeline import TOKENIZER, config_of

SCORES = (1, 2, 2.5, 3, 4, 5)


def rows_of(*values, column: str = 'difficulty') -> list:
  return [make_row('toy', f'q{i}', 'a', {column: value}) for i, value in enumerate(values)]


def kept(**settings) -> list:
  rows = row_filters.in_range(rows_of(*SCORES), 'config.data.keep', column='difficulty', **settings)
  return [row.extra['difficulty'] for row in rows]


def test_a_threshold_parts_the_rows():
  assert kept() == list(SCORES)
  assert kept(at_most=2.5) == [1, 2, 2.5] and kept(above=2.5) == [3, 4, 5]
  assert kept(above=1, at_most=3) == [2, 2.5, 3]


def test_a_nested_column():
  rows = rows_of(dict(score=1), dict(score=2), column='metadata')
  assert (
    row_filters.in_range(rows, 'config.data.keep', column='metadata.score', above=1) == rows[1:]
  )


@pytest.mark.parametrize(
  'values, settings, message',
  [
    ((1, None), {}, "config.data.keep.column='difficulty' is missing in row"),
    ((1, 2), dict(column='level'), "column='level' is missing in row .* or choose of: difficulty."),
    (('hard',), dict(column='level'), 'or choose of: no column is a number.'),
    ((1, 'hard'), {}, "of row .* is 'hard', which is no number; convert the column"),
    ((1, '3'), {}, "is '3', which is no number"),
    ((1, True), {}, 'is True, which is no number'),
    ((1, float('nan')), {}, 'is nan, which is no number'),
    ((1, 2.5), dict(above=3), r'keeps no row with 3 < difficulty <= inf; .* 2 rows are from 1 to 2.5'),
    ((1, 2), dict(above=1, at_most=1), 'keeps no row with 1 < difficulty <= 1; change above or'),
  ],
)  # fmt: skip
def test_bad_rows_and_ranges_are_told(values, settings, message):
  with pytest.raises(UserError, match=message) as error:
    row_filters.in_range(
      rows_of(*values), 'config.data.keep', **dict(column='difficulty') | settings
    )
  assert '\n' not in str(error.value)


def lengths(table) -> set[int]:
  return {row.extra['length'] for row in table.rows}


def split_job(**changes):
  c = config_of(size=60)
  c.evaluation.prompts = 20
  c.data.keep = dict(fn='in_range', column='length', above=3.0)
  c.sft.keep = dict(fn='in_range', column='length', at_most=3.0)
  c.sft.steps = 1
  c.update(changes)
  return c


def test_each_stage_has_its_rows_and_held_out_rows_stay():
  tables = data.load(typed(split_job()), TOKENIZER)
  job = split_job()
  job.data.keep = job.sft.keep = dict(fn='none')
  whole = data.load(typed(job), TOKENIZER)
  assert lengths(tables.train) == {4, 5, 6, 7, 8} and lengths(tables.demonstrations) == {1, 2, 3}
  ids = sorted(row.id for row in (*tables.train.rows, *tables.demonstrations.rows))
  assert ids == sorted(row.id for row in whole.train.rows)
  assert whole.demonstrations is whole.train
  assert min(lengths(tables.held_out)) < 4 < max(lengths(tables.held_out))


def test_a_filter_of_one_stage_leaves_the_other_alone():
  c = split_job()
  c.sft.keep = dict(fn='none')
  tables = data.load(typed(c), TOKENIZER)
  assert min(lengths(tables.train)) == 4 and min(lengths(tables.demonstrations)) == 1
  c = split_job()
  c.data.keep = dict(fn='none')
  tables = data.load(typed(c), TOKENIZER)
  assert max(lengths(tables.train)) == 8 and max(lengths(tables.demonstrations)) == 3
  c.sft.steps = 0  # no start: its rows are not even read
  c.sft.keep = dict(fn='in_range', column='none such')
  tables = data.load(typed(c), TOKENIZER)
  assert tables.demonstrations is tables.train


def test_messages_name_the_stage():
  c = split_job()
  c.sft.keep.column = 'level'
  with pytest.raises(UserError, match="config.sft.keep.column='level' is missing"):
    data.load(typed(c), TOKENIZER)
  c.sft.keep = dict(fn='in_rage')
  with pytest.raises(UserError, match="config.sft.keep.fn='in_rage' is unknown"):
    data.load(typed(c), TOKENIZER)
  c.sft.keep = dict(fn='in_range')
  with pytest.raises(UserError, match='config.sft.keep.column is missing'):
    data.load(typed(c), TOKENIZER)


def test_the_config_demonstrates_one_digit_and_leaves_the_rest_to_rl():
  c = loading.load('dereason')
  c.prompt_tokens = 1000
  tables = data.load(typed(c), TOKENIZER)
  digits = lambda table: {row.extra['metadata']['num_digits'] for row in table.rows}  # noqa: E731
  assert digits(tables.demonstrations) == {1} and digits(tables.train) == {2, 3}
  assert len(tables.demonstrations) + len(tables.train) == 780


class Started(Exception):
  """In place of the supervised start."""


def test_the_supervised_start_learns_from_its_own_rows(tmp_path, monkeypatch):
  def run(config, spec, state, table, tokenizer, on_loss):
    raise Started(table)

  monkeypatch.setattr(sft, 'run', run)
  keep = dict(fn='in_range', column='length', at_most=1.0)
  job = tiny_job.CONFIG | dict(
    sft=tiny_job.CONFIG['sft'] | dict(keep=keep),
    data=tiny_job.CONFIG['data'] | dict(keep=dict(fn='in_range', column='length', above=1.0)),
  )
  with pytest.raises(Started) as started:
    train.run(loading.load(tiny_job.config_file(tmp_path, **job)), str(tmp_path / 'run'))
  assert lengths(started.value.args[0]) == {1}

"""Shares of tasks, and disjoint training and held-out sets."""

from __future__ import annotations

import types

import pytest

from jaxrl_llm.data import tasks
from jaxrl_llm.types import UserError


def planned(entries, size=0, held_out=0):
  data = types.SimpleNamespace(source='toy', size=size)
  return tasks.plan(entries, data, held_out, ['left', 'right'], lambda name: ['low', 'high'])


def counts(*args, **settings):
  return [(t.rows, t.held_out) for t in planned(*args, **settings)]


def test_sizes_and_weights():
  assert counts([dict(name='left'), dict(name='right')]) == [(512, 0), (512, 0)]
  assert counts([dict(name='left', size=10), dict(name='right')], 100, 20) == [(10, 2), (90, 18)]
  assert counts([dict(name='left', weight=3), dict(name='right')], 101) == [(76, 0), (25, 0)]
  assert counts([dict(name='left', size=7), dict(name='right', size=5)], 0, 3) == [(7, 2), (5, 1)]
  assert counts([dict(name='left', size=2000)]) == [(2000, 0)]


def test_settings_are_kept_apart():
  (task,) = planned([dict(name='left', low=1, weight=2)])
  assert (task.field, task.name, task.settings) == ('config.data.tasks[0]', 'left', dict(low=1))


@pytest.mark.parametrize(
  'entry, message',
  [
    (dict(name='lfet'), "config.data.tasks[0].name='lfet' is no toy task; did you mean left"),
    (dict(name='zzz'), 'choose one of: left, right.'),
    (dict(low=1), 'config.data.tasks[0].name=None is no toy task'),
    (dict(name='left', hihg=1), ".hihg is no setting of 'left'; did you mean high"),
    (dict(name='left', size=1.5), 'config.data.tasks[0].size=1.5 must be a whole number'),
    (dict(name='left', weight=-1), 'config.data.tasks[0].weight=-1 must be a number'),
    (dict(name='left', weight=0), 'config.data.tasks[0] gets no row of config.data.size=0'),
  ],
)  # fmt: skip
def test_bad_entries_are_told(entry, message):
  with pytest.raises(UserError) as error:
    planned([entry])
  assert message in str(error.value)


def stream(questions):
  return lambda i: tasks.make_row('toy', questions[i], 'answer', {})


def filled(train, held_out, rows=100, held_out_rows=100):
  task = tasks.Task('config.data.tasks[0]', 'left', {}, rows, held_out_rows)
  sets = tasks.collect([task], [(stream(train), stream(held_out))], seed=0)
  return [[row.question for row in rows] for rows in sets]


def test_no_question_comes_twice():
  train, held_out = filled([str(i % 40) for i in range(500)], [str(i % 40) for i in range(500)])
  assert len(train) == len(set(train)) and len(held_out) == len(set(held_out))
  assert not set(train) & set(held_out)
  assert set(train) | set(held_out) == {str(i) for i in range(40)}


def test_space_around_makes_no_new_question():
  train, held_out = filled(['a', 'b'], [' a', 'c'], 2, 1)
  assert sorted(train) == ['a', 'b'] and held_out == ['c']


def test_few_questions_are_split_in_proportion(caplog):
  questions = [str(i % 50) for i in range(5000)]
  train, held_out = filled(questions, questions, 400, 100)
  assert (len(train), len(held_out)) == (40, 10)
  assert 'gave 40 training and 10 held-out rows, not 400 and 100' in caplog.text


def test_tasks_share_what_they_have_seen():
  both = [tasks.Task(f'tasks[{i}]', 'left', {}, 3, 1) for i in range(2)]
  streams = [
    (stream(['a', 'b', 'c']), stream(['d'])),
    (stream(['d', 'a', 'e']), stream(['b', 'f'])),
  ]
  train, held_out = tasks.collect(both, streams, seed=0)
  assert sorted(row.question for row in train) == ['a', 'b', 'c', 'e']
  assert [row.question for row in held_out] == ['d', 'f']


def test_a_task_without_questions_is_told():
  with pytest.raises(UserError, match="'left' gave no new question"):
    filled([], [])


def test_ids_tell_rows_apart_and_stay():
  row = tasks.make_row('toy', 'question', '7', dict(a=1))
  assert row.id == 'f8aa24bc48145a86'  # if this changes, no run made before resumes
  assert row.id == tasks.make_row('toy', 'question', '7', {}).id
  others = [('toy2', 'question', '7'), ('toy', 'question2', '7'), ('toy', 'question', '8')]
  assert len({row.id, *(tasks.make_row(*o, {}).id for o in others)}) == 4
  messages = [dict(role='user', content='question')]
  assert tasks.make_row('toy', messages, '7', {}).messages == tuple(messages)
  assert tasks.make_row('toy', messages, '7', {}).id != row.id


def test_seeds_lie_far_apart():
  seeds = sorted(tasks.derived_seed(s, 0, 'chain_sum', side) for s in range(50) for side in 'ab')
  assert min(b - a for a, b in zip(seeds, seeds[1:], strict=False)) > 10_000
  assert 0 <= seeds[0] and seeds[-1] < 2**31

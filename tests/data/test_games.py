"""Levels of games: within the settings, deterministic, and disjoint sets."""

from __future__ import annotations

import pytest

from jaxrl_llm.config import loading as configs
from jaxrl_llm.data import sources
from jaxrl_llm.types import UserError


def rows(held_out=10, **changes):
  data = configs.default().data
  data.source, data.size = 'games', 60
  for name, value in changes.items():
    data[name] = value
  return sources.games(data, held_out)


def test_levels_are_in_range_the_same_every_time_and_apart():
  tasks = (dict(name='guess', top=5, min_span=3, max_span=20), dict(name='walk', size=20))
  train, held_out = rows(tasks=tasks)
  assert (train, held_out) == rows(tasks=tasks)
  questions = [row.question for row in train + held_out]
  assert len(set(questions)) == len(questions) == 70
  for row in train + held_out:
    traits = row.extra
    if row.source == 'games/guess':
      assert 0 <= traits['low'] <= 5 and 3 <= traits['high'] - traits['low'] + 1 <= 20
      assert row.question == f'{traits["low"]}-{traits["high"]}:'
      assert traits['low'] <= int(row.answer) <= traits['high']
    else:
      assert 2 <= traits['size'] <= 5 and traits['walls'] == 2
      assert 0 < traits['goal_x'] + traits['goal_y'] < 2 * traits['size'] - 1
  assert sum(row.source == 'games/walk' for row in train) == 20
  assert rows(seed=1) != rows(seed=2)


@pytest.mark.parametrize(
  'task, message',
  [
    (dict(name='chess'), 'chess'),
    (dict(name='guess', walls=3), 'walls'),
    (dict(name='guess', min_span=9, max_span=3), 'min_span=9 is above max_span=3'),
    (dict(name='guess', top=-1), 'top=-1 must be a whole number of at least 0'),
    (dict(name='walk', walls=1.5), 'walls=1.5 must be a whole number'),
    (dict(name='walk', max_size='5'), "max_size='5' must be a whole number"),
  ],
)
def test_what_is_no_game_is_one_sentence(task, message):
  with pytest.raises(UserError, match='config.data.tasks') as error:
    rows(tasks=(task,))
  assert message in str(error.value)

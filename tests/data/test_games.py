"""Levels of games: as the settings say, the same every time, and none in both sets."""

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
  train, held = rows(tasks=tasks)
  assert (train, held) == rows(tasks=tasks)
  questions = [row.question for row in train + held]
  assert len(set(questions)) == len(questions) == 70
  for row in train + held:
    told = row.extra
    if row.source == 'games/guess':
      assert 0 <= told['low'] <= 5 and 3 <= told['high'] - told['low'] + 1 <= 20
      assert row.question == f'{told["low"]}-{told["high"]}:'
      assert told['low'] <= int(row.answer) <= told['high']
    else:
      assert 2 <= told['size'] <= 5 and told['walls'] == 2
      assert 0 < told['goal_x'] + told['goal_y'] < 2 * told['size'] - 1
  assert sum(row.source == 'games/walk' for row in train) == 20
  assert rows(seed=1) != rows(seed=2)


@pytest.mark.parametrize(
  'task, told',
  [
    (dict(name='chess'), 'chess'),
    (dict(name='guess', walls=3), 'walls'),
    (dict(name='guess', min_span=9, max_span=3), 'min_span=9 is above max_span=3'),
    (dict(name='guess', top=-1), 'top=-1 must be a whole number of at least 0'),
    (dict(name='walk', walls=1.5), 'walls=1.5 must be a whole number'),
    (dict(name='walk', max_size='5'), "max_size='5' must be a whole number"),
  ],
)
def test_what_is_no_game_is_one_sentence(task, told):
  with pytest.raises(UserError, match='config.data.tasks') as error:
    rows(tasks=(task,))
  assert told in str(error.value)

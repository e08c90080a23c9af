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
      size, walls = traits['size'], traits['walls']
      start, goal = ((traits[f'{at}_x'], traits[f'{at}_y']) for at in ('start', 'goal'))
      assert 2 <= size <= 5 and walls == 2 and {*start, *goal} <= set(range(size))
      assert row.question == f'{size}x{size} {start[0]},{start[1]} to {goal[0]},{goal[1]}:'
      x, y = dict(n=(0, -1), e=(1, 0), s=(0, 1), w=(-1, 0))[row.answer]
      moved = abs(start[0] + x - goal[0]) + abs(start[1] + y - goal[1])
      assert moved == abs(start[0] - goal[0]) + abs(start[1] - goal[1]) - 1
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

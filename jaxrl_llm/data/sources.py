"""Data sources: the functions that `config.data.source` may name.

Each is `f(data, held_out) -> (training rows, held-out rows)`, deterministic in data.seed. No question is in both sets.
`held_out` is the number of rows for evaluation.
"""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING

from jaxrl_llm.config import extras
from jaxrl_llm.config.loading import near
from jaxrl_llm.data import digits as operations
from jaxrl_llm.data import files as readers
from jaxrl_llm.data import games as levels
from jaxrl_llm.data import gym_rows, tasks
from jaxrl_llm.data import puzzles as puzzle_tasks
from jaxrl_llm.types import JsonObject, JsonValue, Row, UserError

if TYPE_CHECKING:
  from jaxrl_llm.config.schema import DataConfig

# A task that a small instruct model solves sometimes: sums of two or three small numbers.
_GYM_DEFAULT = (dict(name='chain_sum', min_terms=2, max_terms=3, min_digits=1, max_digits=2),)

# Their rows depend on the order of Python sets, which differs between processes.
_UNORDERED = (
  *('codeio', 'isomorphic_strings', 'knight_swap', 'list_functions'),
  *('polynomial_multiplication', 'ransom_note', 'word_ladder'),
)


def gym(data: DataConfig, held_out: int) -> tuple[list[Row], list[Row]]:
  """Rows of the reasoning-gym generators in data.tasks: dict(name=, size=|weight=, <its settings>).

  The setting levels=(0, 4) gives rows of each of these levels of the generator's own curriculum in equal parts, with
  their `level`; other settings of the task apply to all levels. Raises UserError without reasoning-gym, for unknown
  tasks or settings, and for values that a task refuses.
  """
  try:
    from reasoning_gym.factory import DATASETS
  except ImportError as error:
    raise UserError(
      f"config.data.source='gym' needs reasoning-gym; install the extra: {extras.install('gym')}."
    ) from error

  listed = list(data.tasks) or _GYM_DEFAULT
  planned = tasks.plan(listed, data, held_out, DATASETS, gym_rows.settings_of)
  streams = []
  for index, task in enumerate(planned):
    if task.name in _UNORDERED and not os.environ.get('PYTHONHASHSEED', '').isdigit():
      raise UserError(
        f'{task.field}.name={task.name!r} draws different rows in every process, so that no run could '
        'resume; set PYTHONHASHSEED=0 in the environment.'
      )
    seeds = [
      tasks.derived_seed(data.seed, index, task.name, side) for side in ('train', 'held_out')
    ]
    streams.append(tuple(gym_rows.stream(task, seed) for seed in seeds))
  return tasks.collect(planned, streams, data.seed)


def jsonl(data: DataConfig, held_out: int) -> tuple[list[Row], list[Row]]:
  """The first data.size rows (0 = all) of the JSON-lines file data.path, in its order.

  Rows may have any format of row_formats.py. Held-out rows come from data.eval_path, or from a seeded split of at
  most a fifth of the questions. Raises UserError for a missing, empty or damaged file, with the number of the line.
  """
  where = f'config.data.path={data.path!r}'
  all_rows = readers.read(data.path, 'config.data.path', data)
  read_eval = functools.partial(readers.read, data=data)
  training_rows, held_out_rows = readers.separate(all_rows, read_eval, data, held_out, where)
  return readers.first(training_rows, data.size, where), held_out_rows


_ENTRY_DEFAULTS = dict(path='', weight=1.0, source='', split='train', subset='')


def files(data: DataConfig, held_out: int) -> tuple[list[Row], list[Row]]:
  """Rows of several files: data.files, each dict(path=, weight=, source=<its name>, split='train', subset='').

  A path is a .parquet file, a folder saved by Hugging Face's `datasets`, 'hub:owner/name', or JSON lines; split and
  subset are for data sets. If an entry has a weight, training rows are in these proportions (default 1), as many as
  there are without repetition, at most data.size; without weights all rows are used. To use all rows and sample them in
  proportions, see config.curriculum.domain_mix. Held-out rows as for `jsonl`. Raises UserError as `jsonl` does, and for
  an invalid entry.
  """
  entries = [_parse_entry(index, entry) for index, entry in enumerate(data.files)]
  if not entries:
    raise UserError(
      "config.data.source='files' reads config.data.files, which is empty; give (dict(path='rows.parquet'),)."
    )
  rows: dict[str, tuple[int, Row]] = {}
  for index, entry in enumerate(entries):
    field, name = f'config.data.files[{index}].path', entry['source'] or _stem(entry['path'])
    selection = dict(split=entry['split'], subset=entry['subset'])
    for row in readers.read(entry['path'], field, data, name, **selection):
      rows.setdefault(row.id, (index, row))
  entry_of_row = {row.id: index for index, row in rows.values()}
  read_eval = functools.partial(readers.read, data=data, source=_stem(data.get('eval_path', '')))
  all_rows = [row for _, row in rows.values()]
  training_rows, held_out_rows = readers.separate(
    all_rows, read_eval, data, held_out, 'config.data.files'
  )
  parts: list[list[Row]] = [[] for _ in entries]
  for row in training_rows:
    parts[entry_of_row[row.id]].append(row)
  if any('weight' in entry for entry in data.files):
    weights = [entry['weight'] for entry in entries]
    parts = _weighted(parts, weights, data.size)
  training_rows = [row for part in parts for row in part]
  return readers.first(training_rows, data.size, 'config.data.files'), held_out_rows


def _parse_entry(index: int, entry: JsonValue) -> JsonObject:
  field = f'config.data.files[{index}]'
  if not hasattr(entry, 'items') or not entry.get('path'):
    raise UserError(f"{field}={entry!r} must be a dict with a path: dict(path='rows.parquet').")
  entry = dict(entry.items())
  for key, value in entry.items():
    if key not in _ENTRY_DEFAULTS:
      raise UserError(f'{field}.{key} is unknown; {near(key, _ENTRY_DEFAULTS)}.')
    if key != 'weight' and not isinstance(value, str):
      raise UserError(f'{field}.{key}={value!r} must be text.')
  tasks.check_number(field, 'weight', entry.get('weight', 1.0))
  return _ENTRY_DEFAULTS | entry


def _stem(path: str) -> str:
  return os.path.splitext(os.path.basename(os.path.normpath(path)))[0]


def _weighted(parts: list[list[Row]], weights: list[float], size: int) -> list[list[Row]]:
  """The first rows of each part, as many as the weights allow without repetition."""
  total = sum(weights)
  most = [int(len(p) * total / w) for p, w in zip(parts, weights, strict=True) if w]
  rows = min([*most, size or sum(map(len, parts))], default=0)
  if not rows:
    raise UserError(
      f'config.data.files: the weights {weights} leave no row of {list(map(len, parts))}; change the weights.'
    )
  counts = tasks.shares(rows, weights)
  return [part[:count] for part, count in zip(parts, counts, strict=True)]


def digits(data: DataConfig, held_out: int) -> tuple[list[Row], list[Row]]:
  """Rows such as 'rev:4821=' → '1284', of the operations in data.tasks (default: copy, rev, sort).

  A task is dict(name=, size=|weight=, min_length=1, max_length=8). Raises UserError for unknown
  tasks or settings and for invalid lengths.
  """
  defaults = dict.fromkeys(operations.OPERATIONS, operations.SETTINGS)
  return tasks.draw_tasks(
    'digits', data, held_out, defaults, operations.MINIMUM, operations.draw, operations.DEFAULT
  )


def games(data: DataConfig, held_out: int) -> tuple[list[Row], list[Row]]:
  """Levels of the games of config.environment in data.tasks (default: guess), such as '3-9:'.

  A task is dict(name=, size=|weight=, <settings>): guess(top=20, min_span=3, max_span=15), walk(min_size=2,
  max_size=5, walls=2), pair_walk(min_size=2, max_size=4, walls=1). Raises UserError for unknown games or settings, and
  for invalid values.
  """
  defaults = {name: settings for name, (_, settings) in levels.GAMES.items()}
  return tasks.draw_tasks(
    'games', data, held_out, defaults, levels.MINIMUM, levels.draw, ('guess',)
  )


def puzzles(data: DataConfig, held_out: int) -> tuple[list[Row], list[Row]]:
  """Puzzles of data.tasks (default: compose): compose (string functions), countdown, discussed (for
  config.environment.fn='discussion'), keychain (a long text), products (for a calculator).

  A task is dict(name=, size=|weight=, <settings>), see puzzles.py. Raises UserError as `games` does.
  """
  defaults = {name: settings for name, (_, settings) in puzzle_tasks.PUZZLES.items()}
  minimum, draw = puzzle_tasks.MINIMUM, puzzle_tasks.draw
  return tasks.draw_tasks('puzzles', data, held_out, defaults, minimum, draw, ('compose',))

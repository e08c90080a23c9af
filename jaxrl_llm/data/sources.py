"""Where rows come from: the functions that `config.data.source` may name.

Each is `f(data, held_out) -> (training rows, held-out rows)`, deterministic in data.seed, and no
question stands in both sets. `held_out` is how many rows evaluation wants.
"""

from __future__ import annotations

import os
from typing import Any

from jaxrl_llm.config.loading import near
from jaxrl_llm.data import digits as operations
from jaxrl_llm.data import files as reading
from jaxrl_llm.data import games as levels
from jaxrl_llm.data import gym_rows, tasks
from jaxrl_llm.data import puzzles as made
from jaxrl_llm.types import Row, UserError

# What a small instruct model gets sometimes right: sums of one to three small numbers.
_GYM_DEFAULT = (dict(name='chain_sum', min_terms=2, max_terms=3, min_digits=1, max_digits=2),)

# Their rows follow the order of Python sets, which changes from process to process.
_UNORDERED = (
  *('codeio', 'isomorphic_strings', 'knight_swap', 'list_functions'),
  *('polynomial_multiplication', 'ransom_note', 'word_ladder'),
)


def gym(data: Any, held_out: int) -> tuple[list[Row], list[Row]]:
  """Rows of the reasoning-gym generators in data.tasks: dict(name=, size=|weight=, <its settings>).

  levels=(0, 4) among the settings: rows of each of these levels of the generator's own curriculum, in equal parts, with
  their `level`; what the curriculum leaves open is as set beside it. Raises UserError without reasoning-gym, for
  unknown tasks or settings, and values its task refuses. Source: none.
  """
  try:
    from reasoning_gym.factory import DATASETS
  except ImportError as error:
    raise UserError(
      "config.data.source='gym' needs reasoning-gym; install the extra: "
      "pip install 'jaxrl_llm[gym]'."
    ) from error

  listed = list(data.tasks) or _GYM_DEFAULT
  planned = tasks.plan(listed, data, held_out, DATASETS, gym_rows.settings_of)
  streams = []
  for index, task in enumerate(planned):
    if task.name in _UNORDERED and not os.environ.get('PYTHONHASHSEED', '').isdigit():
      raise UserError(
        f'{task.field}.name={task.name!r} draws other rows in every process, so that no run could '
        'resume; set PYTHONHASHSEED=0 in the environment.'
      )
    seeds = [
      tasks.derived_seed(data.seed, index, task.name, side) for side in ('train', 'held_out')
    ]
    streams.append(tuple(gym_rows.stream(task, seed) for seed in seeds))
  return tasks.collect(planned, streams, data.seed)


def jsonl(data: Any, held_out: int) -> tuple[list[Row], list[Row]]:
  """Rows of the JSON-lines file data.path, in its order; the first data.size of them, 0 for all.

  Rows may have any of the shapes of shapes.py. Held-out rows come from data.eval_path, or from a seeded split of at
  most a fifth of the questions. Raises UserError for a missing, empty or broken file, with the number of the line.
  Source: none.
  """
  told = f'config.data.path={data.path!r}'
  rows, held = _parted(reading.read(data.path, 'config.data.path', data), data, held_out, told)
  return reading.first(rows, data.size, told), held


_ENTRY = dict(path='', weight=1.0, source='', split='train', subset='')


def files(data: Any, held_out: int) -> tuple[list[Row], list[Row]]:
  """Rows of several files: data.files, each dict(path=, weight=, source=<its name>, split='train', subset='').

  A path is a .parquet file, a folder that Hugging Face's `datasets` saved, 'hub:owner/name', or JSON lines; split and
  subset are for data sets. Where an entry has a weight, training rows are in these proportions (the others count 1), as
  many as there are without a row twice, at most data.size; without weights all rows are taken. To keep all and draw
  them in proportions, see config.curriculum.domain_mix. Held-out rows as for `jsonl`. Raises UserError as `jsonl` does, and
  for an entry that is none. Source: none.
  """
  entries = [_entry(index, told) for index, told in enumerate(data.files)]
  if not entries:
    raise UserError(
      "config.data.source='files' reads config.data.files, which is empty; give (dict(path='rows.parquet'),)."
    )
  rows: dict[str, tuple[int, Row]] = {}
  for index, entry in enumerate(entries):
    field, name = f'config.data.files[{index}].path', entry['source'] or _stem(entry['path'])
    told = dict(split=entry['split'], subset=entry['subset'])
    for row in reading.read(entry['path'], field, data, name, **told):
      rows.setdefault(row.id, (index, row))
  of = {row.id: index for index, row in rows.values()}
  ours, held = _parted([row for _, row in rows.values()], data, held_out, 'config.data.files')
  parts: list[list[Row]] = [[] for _ in entries]
  for row in ours:
    parts[of[row.id]].append(row)
  if any('weight' in told for told in data.files):
    weights = [entry['weight'] for entry in entries]
    parts = _weighted(parts, weights, data.size)
  return reading.first(
    [row for part in parts for row in part], data.size, 'config.data.files'
  ), held


def _entry(index: int, told: Any) -> dict[str, Any]:
  field = f'config.data.files[{index}]'
  if not hasattr(told, 'items') or not told.get('path'):
    raise UserError(f"{field}={told!r} must be a dict with a path: dict(path='rows.parquet').")
  told = dict(told.items())
  for key, value in told.items():
    if key not in _ENTRY:
      raise UserError(f'{field}.{key} is unknown; {near(key, _ENTRY)}.')
    if key != 'weight' and not isinstance(value, str):
      raise UserError(f'{field}.{key}={value!r} must be text.')
  tasks.check_number(field, 'weight', told.get('weight', 1.0))
  return _ENTRY | told


def _stem(path: str) -> str:
  return os.path.splitext(os.path.basename(os.path.normpath(path)))[0]


def _weighted(parts: list[list[Row]], weights: list[float], size: int) -> list[list[Row]]:
  """The first rows of each part, as many as the weights allow without a row twice."""
  total = sum(weights)
  most = [int(len(p) * total / w) for p, w in zip(parts, weights, strict=True) if w]
  rows = min([*most, size or sum(map(len, parts))], default=0)
  if not rows:
    raise UserError(
      f'config.data.files: by their weights {weights} no row is left of {list(map(len, parts))}; change the weights.'
    )
  taken = tasks.shares(rows, weights)
  return [part[:count] for part, count in zip(parts, taken, strict=True)]


def _parted(rows: list[Row], data: Any, held_out: int, told: str) -> tuple[list[Row], list[Row]]:
  """(training rows, held-out rows), no question in both."""
  if data.get('eval_path', ''):
    name = 'jsonl' if data.source == 'jsonl' else _stem(data.eval_path)
    other = reading.read(data.eval_path, 'config.data.eval_path', data, name)
    ours = reading.without(rows, other, told, data.eval_path)
    return ours, reading.choose(other, held_out, data.seed)
  return reading.split(rows, held_out, data.seed, told)


def digits(data: Any, held_out: int) -> tuple[list[Row], list[Row]]:
  """Rows such as 'rev:4821=' → '1284', of the operations in data.tasks (default: copy, rev, sort).

  A task is dict(name=, size=|weight=, min_length=1, max_length=8). Raises UserError for unknown
  tasks or settings and for lengths that are none. Source: none.
  """
  kinds = dict.fromkeys(operations.OPERATIONS, operations.SETTINGS)
  told = operations.LEAST, operations.draw, operations.DEFAULT
  return tasks.drawn('digits', data, held_out, kinds, *told)


def games(data: Any, held_out: int) -> tuple[list[Row], list[Row]]:
  """Levels of the games of config.environment, such as '3-9:', of those in data.tasks (default: guess).

  A task is dict(name=, size=|weight=, <settings>): guess(top=20, min_span=3, max_span=15), walk(min_size=2,
  max_size=5, walls=2). Raises UserError for unknown games or settings, and values that are none. Source: none.
  """
  kinds = {name: settings for name, (_, settings) in levels.GAMES.items()}
  return tasks.drawn('games', data, held_out, kinds, levels.LEAST, levels.draw, ('guess',))


def puzzles(data: Any, held_out: int) -> tuple[list[Row], list[Row]]:
  """Rows of data.tasks (default: compose): compose, composed string functions; countdown; keychain, a long text.

  A task is dict(name=, size=|weight=, <settings>), see puzzles.py. Raises UserError as `games`. Source: none.
  """
  kinds = {name: settings for name, (_, settings) in made.PUZZLES.items()}
  return tasks.drawn('puzzles', data, held_out, kinds, made.LEAST, made.draw, ('compose',))

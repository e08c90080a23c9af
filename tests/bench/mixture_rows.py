"""Rows of the mixture: questions of many reasoning-gym generators as JSON lines with question, answer and source.

python -m tests.bench.mixture_rows [--out data/mixture] [--rows 20000] [--held-out 20] [--seed 0] [--smoke]
                                   [--generators chain_sum,maze]

Data as people have it: the rows hold nothing of a generator's settings, level or metadata. rows.jsonl takes the
generators in turns, held_out.jsonl has --held-out rows of each, and no question is in both files or twice in one. The
rows depend on --seed and on the version of reasoning-gym alone; about.json states both, with the settings and the
checksums of the files. Files appear whole: about.json comes last, and a folder without it is written again.
configs/rewards/mixture.py trains on them.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import platform
from collections.abc import Iterator, Sequence
from importlib import metadata

from jaxrl_llm.checkpointing import safe_files
from jaxrl_llm.config.loading import near
from jaxrl_llm.data import gym_rows, tasks
from jaxrl_llm.types import JsonObject, Row, UserError
from tests.bench.lib import results, smoke

# Generator → settings with short questions, from easy ones for a small model to hard ones, and one short right answer.
GENERATORS: dict[str, JsonObject] = dict(
  # arithmetic
  chain_sum=dict(min_terms=2, max_terms=4, min_digits=1, max_digits=2),
  products=dict(min_digits=1, max_digits=2),
  gcd=dict(min_value=1, max_value=100),
  simple_equations=dict(min_terms=2, max_terms=2, min_value=1, max_value=20),
  leg_counting=dict(min_animals=1, max_animals=3, min_instances=1, max_instances=5),
  number_sequence=dict(min_terms=4, max_terms=6, min_value=0, max_value=50, max_complexity=2),
  count_bits=dict(min_n=1, max_n=4095),
  calendar_arithmetic=dict(tasks=('is_leap_year', 'weekday_offset')),
  # words
  letter_counting=dict(min_words=1, max_words=8),
  spell_backward=dict(min_word_len=3, max_word_len=6),
  word_sequence_reversal=dict(min_words=2, max_words=5),
  needle_haystack=dict(min_num_statements=2, max_num_statements=10),
  # logic
  aiw=dict(max_entities=6),
  syllogism=dict(),
  family_relationships=dict(min_family_size=3, max_family_size=6),
  # games
  color_cube_rotation=dict(min_rotations=1, max_rotations=2),
  maze=dict(min_dist=2, max_dist=6, min_grid_size=5, max_grid_size=6),
)
# File → the side of the split, which seeds the generators. Held-out questions are drawn first.
FILES = {'held_out.jsonl': 'held_out', 'rows.jsonl': 'train'}
ABOUT = 'about.json'
# Draws in a row without a new question after which a generator counts as exhausted.
MAX_MISSES = 500


def entries(name: str, side: str, count: int, seed: int) -> Iterator[Row]:
  """Yields the rows of a generator for one side of the split."""
  task = tasks.Task('GENERATORS', name, GENERATORS[name], count, 0)
  row_at = gym_rows.stream(task, tasks.derived_seed(seed, name, side))
  for index in itertools.count():
    try:
      yield row_at(index)
    except IndexError:
      return
    except tasks.NoQuestion:
      continue


def draw(name: str, side: str, count: int, seed: int, seen: set[str]) -> Iterator[JsonObject]:
  """Yields `count` rows of a generator whose questions are not in `seen`, to which they are added.

  Raises UserError where the generator has no more questions.
  """
  found = misses = 0
  for row in entries(name, side, count, seed):
    key = tasks.question_key(row)
    if key not in seen:
      seen.add(key)
      found, misses = found + 1, 0
      yield dict(question=row.question, answer=row.answer, source=name)
    else:
      misses += 1
    if found == count:
      return
    if misses == MAX_MISSES:
      break
  raise UserError(
    f'{name} has only {found} of {count} different questions for {side}; lower --rows or --held-out.'
  )


def in_turns(streams: Sequence[Iterator[JsonObject]]) -> Iterator[JsonObject]:
  """Yields one row of each stream in turns, until all have ended."""
  running = list(streams)
  while running:
    for stream in tuple(running):
      if (row := next(stream, None)) is None:
        running.remove(stream)
      else:
        yield row


def request(names: Sequence[str], rows: int, held_out: int, seed: int) -> JsonObject:
  """All that the rows depend on. Raises UserError for an unknown generator and for numbers without a row for each."""
  for name in names:
    if name not in GENERATORS:
      raise UserError(
        f'--generators: {name!r} is no generator of the mixture; {near(name, GENERATORS)}.'
      )
  if rows < len(names) or held_out < 1:
    raise UserError(
      f'--rows={rows} and --held-out={held_out} leave a generator without a row; there are {len(names)} generators.'
    )
  return dict(
    reasoning_gym=metadata.version('reasoning-gym'),
    seed=seed,
    rows=rows,
    held_out_of_each=held_out,
    generators={name: GENERATORS[name] for name in names},
  )


def write(folder: str, wanted: JsonObject) -> JsonObject:
  """Writes the files of a `request` into the folder unless it holds them, and returns the contents of about.json.

  Raises UserError where the folder holds other rows.
  """
  about = os.path.join(folder, ABOUT)
  if os.path.exists(about):
    found = json.loads(safe_files.read(about))
    if found['request'] != json.loads(json.dumps(wanted)):
      raise UserError(
        f'--out={folder} holds rows of another request, see {ABOUT}; give another --out.'
      )
    if all(
      checksum(os.path.join(folder, name)) == x['sha256'] for name, x in found['files'].items()
    ):
      return found
  os.makedirs(folder, exist_ok=True)
  names, seen, files = list(wanted['generators']), set(), {}
  shares = tasks.shares(wanted['rows'], [1] * len(names))
  counts = dict(train=shares, held_out=[wanted['held_out_of_each']] * len(names))
  for file, side in FILES.items():
    streams = [
      draw(name, side, count, wanted['seed'], seen)
      for name, count in zip(names, counts[side], strict=True)
    ]
    path = os.path.join(folder, file)
    with safe_files.replacing(path) as part, open(part, 'x', encoding='utf-8') as lines:
      lines.writelines(json.dumps(row, ensure_ascii=False) + '\n' for row in in_turns(streams))
      lines.flush()
      os.fsync(lines.fileno())
    files[file] = dict(rows=sum(counts[side]), sha256=checksum(path))
  contents = dict(
    request=wanted, files=files, python=platform.python_version(), written=results.today()
  )
  safe_files.write(about, json.dumps(contents, indent=1))
  return contents


def checksum(path: str) -> str:
  """sha256 of a file, '' without one."""
  if not os.path.isfile(path):
    return ''
  with open(path, 'rb') as file:
    return hashlib.file_digest(file, 'sha256').hexdigest()


def summary(folder: str) -> str:
  """A table of the training rows by source."""
  rows: dict[str, list[JsonObject]] = {}
  with open(os.path.join(folder, 'rows.jsonl'), encoding='utf-8') as lines:
    for line in lines:
      row = json.loads(line)
      rows.setdefault(row['source'], []).append(row)
  longest = lambda part, field: str(max(len(row[field]) for row in part))  # noqa: E731
  return results.table(
    ['source', 'rows', 'different answers', 'longest question, characters', 'longest answer'],
    [
      [
        name,
        str(len(part)),
        str(len({row['answer'] for row in part})),
        longest(part, 'question'),
        longest(part, 'answer'),
      ]
      for name, part in sorted(rows.items())
    ],
  )


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  names = lambda text: text.split(',')  # noqa: E731
  parser.add_argument('--out', default='data/mixture')
  parser.add_argument('--rows', type=int, default=20_000)
  parser.add_argument('--held-out', type=int, default=20, help='rows of each generator')
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument('--generators', type=names, default=list(GENERATORS))
  options = smoke.parse(parser, rows=60, held_out=2)
  try:
    write(options.out, request(options.generators, options.rows, options.held_out, options.seed))
  except UserError as error:
    raise SystemExit(str(error)) from None
  print(summary(options.out))


if __name__ == '__main__':
  main()

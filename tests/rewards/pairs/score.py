"""False accepts and false rejects of the text graders on labeled pairs.

python -m tests.rewards.pairs.score [--held-out | --held-out=2]

README.md beside this file has the conventions of the labels and the fields of a pair.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from jaxrl_llm import rewards
from jaxrl_llm.types import Row

FOLDER = pathlib.Path(__file__).parent
SPLITS = dict(open=FOLDER, held_out=FOLDER / 'held_out')  # one table, divided by hash
# A table of its own, written without sight of the graders; it has four of them.
SECOND = dict(held_out_2=FOLDER / 'held_out_2')
GRADERS = (
  'number', 'first_number', 'marked_number', 'numeric', 'math_verify', 'multiple_choice', 'countdown', 'json_schema',
)  # fmt: skip
MOST_REJECTED = 0.02  # of the pairs with label 1


class Tally(NamedTuple):
  """Counts over labeled pairs."""

  right: int = 0  # pairs with label 1
  wrong: int = 0  # pairs with label 0
  false_accepts: int = 0
  false_rejects: int = 0
  errors: int = 0  # the grader raised

  def __add__(self, other: Tally) -> Tally:
    return Tally(*(a + b for a, b in zip(self, other, strict=True)))


def pairs(grader: str, split: str) -> list[dict[str, Any]]:
  """The pairs of one grader, in file order."""
  path = (SPLITS | SECOND)[split] / f'{grader}.jsonl'
  return [json.loads(line) for line in path.read_text(encoding='utf-8').splitlines()]


def digest(grader: str, pair: Mapping[str, Any]) -> str:
  """SHA-256 over what the grader sees, in hex digits."""
  fields = [grader, *(pair.get(key) for key in ('answer', 'reply', 'settings', 'row'))]
  return _digest(fields)


def held_out(rows: Iterable[Mapping[str, Any]]) -> set[str]:
  """The replies that are held out, of the pairs of all graders: every third of each class, in the order of SHA-256.

  A reply is of the alphabetically first of its classes. The group's own digest says whether it starts at the 1st, 2nd
  or 3rd. All pairs with one reply are on one side.
  """
  classes: dict[str, str] = {}
  for row in rows:
    classes[row['reply']] = min(row['class'], classes.get(row['reply'], row['class']))
  groups = collections.defaultdict(list)
  for reply, name in classes.items():
    groups[name].append(reply)
  chosen: set[str] = set()
  for name, replies in groups.items():
    chosen.update(sorted(replies, key=_digest)[int(_digest(name), 16) % 3 :: 3])
  return chosen


def tally(grader: str, rows: Iterable[Mapping[str, Any]]) -> dict[str, Tally]:
  """Class → counts."""
  counts: dict[str, Tally] = collections.defaultdict(Tally)
  for row in rows:
    counts[row['class']] += _judge(grader, row)
  return dict(counts)


def total(counts: Mapping[str, Tally]) -> Tally:
  """Sum over the classes."""
  return sum(counts.values(), Tally())


def _digest(value: Any) -> str:
  return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _judge(grader: str, pair: Mapping[str, Any]) -> Tally:
  right = pair['label'] == 1
  counts = Tally(right=int(right), wrong=int(not right))
  function = rewards.resolve(dict(fn=grader) | pair.get('settings', {}))
  try:
    accepted = (
      function(pair['reply'], Row('id', '', (), pair['answer'], 'pairs', pair.get('row', {})))
      == 1.0
    )
  except (
    Exception
  ):  # whatever a grader raises is the finding; a worker would report an error of the row
    return counts._replace(errors=1)
  return counts._replace(
    false_accepts=int(accepted and not right), false_rejects=int(right and not accepted)
  )


def _line(name: str, counts: Tally) -> str:
  accepted = counts.false_accepts / max(counts.wrong, 1)
  rejected = counts.false_rejects / max(counts.right, 1)
  return (
    f'{name:<20} {counts.right + counts.wrong:>5} {counts.false_accepts:>4}/{counts.wrong:<4}{accepted:>7.1%}'
    f' {counts.false_rejects:>4}/{counts.right:<4}{rejected:>7.1%} {counts.errors:>4}'
  )


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument(
    '--held-out',
    nargs='?',
    type=int,
    const=1,
    choices=(1, 2),
    help='the held-out third, or with 2 the second held-out table; counts alone, never its pairs',
  )
  parser.add_argument(
    '--show', action='store_true', help='print each misjudged pair of the open split'
  )
  options = parser.parse_args()
  split = {None: 'open', 1: 'held_out', 2: 'held_out_2'}[options.held_out]
  print(f'{split}\n{"":<20} pairs  false accepts   false rejects   errors')
  for grader in GRADERS:
    if split in SECOND and not (SECOND[split] / f'{grader}.jsonl').exists():
      continue
    rows = pairs(grader, split)
    counts = tally(grader, rows)
    print(_line(grader, total(counts)))
    for name in sorted(counts):
      print(_line(f'  {name}', counts[name]))
    for row in rows if options.show and split == 'open' else ():
      if sum(_judge(grader, row)[2:]):
        print(f'    label {row["label"]}: {row["answer"]!r} {row["reply"]!r}')


if __name__ == '__main__':
  main()

"""False accepts and false rejects of the text graders on labeled pairs.

python -m tests.rewards.pairs.score [--held-out]

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
# The second held-out table has four of the graders; the first one is open.
SPLITS = dict(open=FOLDER, held_out=FOLDER / 'held_out_2')
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
  """The pairs of one grader, in file order; none where the split has no file of it."""
  path = SPLITS[split] / f'{grader}.jsonl'
  if not path.exists():
    return []
  return [json.loads(line) for line in path.read_text(encoding='utf-8').splitlines()]


def digest(grader: str, pair: Mapping[str, Any]) -> str:
  """SHA-256 over what the grader sees, in hex digits."""
  fields = [grader, *(pair.get(key) for key in ('answer', 'reply', 'settings', 'row'))]
  return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def tally(grader: str, rows: Iterable[Mapping[str, Any]]) -> dict[str, Tally]:
  """Class → counts."""
  counts: dict[str, Tally] = collections.defaultdict(Tally)
  for row in rows:
    counts[row['class']] += _judge(grader, row)
  return dict(counts)


def total(counts: Mapping[str, Tally]) -> Tally:
  """Sum over the classes."""
  return sum(counts.values(), Tally())


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
    '--held-out', action='store_true', help='the held-out pairs; counts alone, never the pairs'
  )
  parser.add_argument(
    '--show', action='store_true', help='print each misjudged pair of the open split'
  )
  options = parser.parse_args()
  split = 'held_out' if options.held_out else 'open'
  print(f'{split}\n{"":<20} pairs  false accepts   false rejects   errors')
  for grader in GRADERS:
    rows = pairs(grader, split)
    if not rows:
      continue
    counts = tally(grader, rows)
    print(_line(grader, total(counts)))
    for name in sorted(counts):
      print(_line(f'  {name}', counts[name]))
    for row in rows if options.show and split == 'open' else ():
      if sum(_judge(grader, row)[2:]):
        print(f'    label {row["label"]}: {row["answer"]!r} {row["reply"]!r}')


if __name__ == '__main__':
  main()

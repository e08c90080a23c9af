"""Completions graded per second, by reward function and number of worker processes.

python -m tests.bench.grading [--turns 5] [--answers 512] [--characters 400] [--smoke]
Completions of that many characters with the result at their end; half of them are correct. Reward functions of
bounded time
run in the trainer's process, without workers. `judge` is a user's function that only compares, so that its row shows
the cost of the pool. The table has medians over turns, minimum and maximum. Workers are warm: their start is measured
apart.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import statistics
import sys
import tempfile
import time

from jaxrl_llm import rewards
from jaxrl_llm.types import Row
from tests.bench.lib import smoke

JUDGE = """
def judge(data_source, solution_str, ground_truth, extra_info=None):
  return float(solution_str.endswith(f'{ground_truth}.'))
"""
PROSE = 'We add the first two terms, then the third, and look at what is left of it. '
# Grader → (the row's answer, how the text ends), n being a whole number.
ENDS = {
  'exact': ('{n}', None),
  'number': ('{n}', 'So the sum is {m}.'),
  'first_number': ('{n}', 'So the sum is {m}.'),
  'bare_number': ('{n}', None),
  'tagged': ('{n}', '<answer>{m}</answer>'),
  'marked_number': ('{n}', '#### {m}'),
  'numeric': ('{n}', 'So the answer is {m}.'),
  'multiple_choice': ('B', 'So the answer is {letter}.'),
  'math_verify': ('\\frac{{{n}}}{{7}}', 'so we get $\\frac{{{m}}}{{7}}$'),
  'own_bench:judge': ('{n}', 'So the sum is {m}.'),
}


def answers(grader: str, count: int, characters: int) -> tuple[list[Row], list[str]]:
  answer, end = ENDS[grader]
  rows, texts = [], []
  for index in range(count):
    n = 1000 + index
    m = n + index % 2
    ending = str(m) if end is None else end.format(m=m, letter='BC'[index % 2])
    prose = (
      '' if end is None else (PROSE * (characters // len(PROSE) + 1))[: characters - len(ending)]
    )
    rows.append(Row(str(index), 'question', (), answer.format(n=n), 'made', {}))
    texts.append(prose + ending)
  return rows, texts


def main(turns: int, count: int, characters: int) -> None:
  when = datetime.date.today().isoformat()
  print(
    f'{when}  {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}; '
    f'{count} answers of {characters} characters, medians of {turns} turns (least – most)'
  )
  with tempfile.TemporaryDirectory() as folder:
    with open(os.path.join(folder, 'own_bench.py'), 'w') as file:
      file.write(JUDGE)
    sys.path.insert(0, folder)
    os.environ['PYTHONPATH'] = f'{folder}:{os.environ.get("PYTHONPATH", "")}'
    for name in ENDS:
      rows, texts = answers(name, count, characters)
      for workers in (1, 2):
        with rewards.Pool(dict(fn=name, workers=workers, deadline_s=60.0, cpu_s=60.0)) as pool:
          began = time.perf_counter()
          right = pool.score(rows[:8], texts[:8]).reward_B.sum()
          start_s, rates = time.perf_counter() - began, []
          for _ in range(turns):
            began = time.perf_counter()
            scores = pool.score(rows, texts)
            rates.append(count / (time.perf_counter() - began))
          assert not scores.message and (right > 0)
          inline = pool._processes.newest is None
        where = 'inline' if inline else f'{workers} workers'
        print(
          f'{name:16} {where:9}  {statistics.median(rates):9.0f} /s  ({min(rates):.0f} – {max(rates):.0f})'
          f'  first 8 after {start_s:.1f} s',
          flush=True,
        )
        if inline:
          break


if __name__ == '__main__':
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--turns', type=int, default=5)
  parser.add_argument('--answers', type=int, default=512)
  parser.add_argument('--characters', type=int, default=400)
  arguments = smoke.parse(parser, turns=1, answers=16)
  main(arguments.turns, arguments.answers, arguments.characters)

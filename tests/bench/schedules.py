"""Simulated seconds per learned group: one program with its variants, against separate meshes for sampler and trainer.

python -m tests.bench.schedules [--mfu 0.4] [--machines '8B, v6e-64'] [--caps 2048,8192] [--smoke] [--write]
Costs are those of the compile reports: reads of weights and live cache columns, products and exchanges of a decode
iteration, and operations of update, prefill and encoding at a stated share of the peak. Log-normal lengths of groups of
8, half of the log's variance shared, sigma 0.8; grading of log-normal latency, as many completions at a time as are
waiting. First come the decode iterations of the real loop, with the lengths as caps on its rows, and those of the
simulation. Every schedule learns batches of equally many groups; only those that fit into memory are simulated.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from typing import NamedTuple

import numpy as np

from tests.bench import rounds
from tests.bench.lib import schedule_apart, schedule_costs, schedule_fused, schedule_jobs, smoke
from tests.bench.lib.schedule_apart import Apart
from tests.bench.lib.schedule_costs import ROLLOUTS, Lengths
from tests.bench.lib.schedule_fused import Fused
from tests.bench.lib.schedule_jobs import Costs, Job, Outcome

WARM_UP, SIGMA = 4, 0.8
# Prompt and mean of the completions in tokens, by the cap.
TOKENS = {2048: (512, 700.0), 8192: (1024, 2500.0), 32768: (1024, 9000.0)}


class Family(NamedTuple):
  """Schedules that differ in one number, in its order; the fastest one counts."""

  name: str
  kind: str  # 'built', 'not built', 'apart', or 'dropping', which learns less from long groups
  members: tuple[Fused | Apart, ...]


def families(costs: Costs, groups: int) -> list[Family]:
  """The schedules that fit a machine."""

  def partial(lag: int, encode: str, **settings: bool) -> tuple[Fused, ...]:
    return tuple(
      Fused(lag, submitted, encode=encode, **settings) for submitted in (1.25, 1.5, 2.0, 3.0, 4.5)
    )

  def apart(bound: int, **settings: bool) -> tuple[Apart, ...]:
    # Weights and optimizer fit into an eighth of each machine.
    return tuple(Apart(costs.chips * n // 8, bound, **settings) for n in range(1, 6))

  # A carried cache stays beside the loop's own, and every row needs a slot.
  carried = tuple(
    s for s in partial(0, 'none') if 2 * round(s.submitted * groups) * ROLLOUTS <= costs.slots
  )
  found = [
    Family('fused', 'built', (Fused(),)),
    Family('lag 1', 'built', (Fused(lag=1),)),
    Family('fused, partial', 'built', partial(0, 'slots')),
    Family('fused, partial, cache carried', 'built', carried),
    Family('lag 1, partial', 'built', partial(1, 'slots')),
    Family('lag 4', 'not built', (Fused(lag=4),)),
    Family('lag 4, partial, rows encoded', 'not built', partial(4, 'rows', at_once=True)),
    Family('lag 4, partial, cache in place', 'not built', partial(4, 'none', at_once=True)),
    Family('two meshes, bound 0', 'apart', apart(0)),
    Family('two meshes, bound 1', 'apart', apart(1)),
    Family('two meshes, bound 4', 'apart', apart(4)),
    Family('two meshes, bound 4, encoded', 'apart', apart(4, encode=True)),
    Family('two meshes, bound 4, dropping', 'dropping', apart(4, in_order=False)),
  ]
  return [family for family in found if family.members]


def fastest(family: Family, job: Job, costs: Costs, steps: int) -> tuple[Outcome, Fused | Apart]:
  """The fastest member, from the second one on towards the faster neighbor."""

  @functools.cache
  def of(n: int) -> Outcome:
    schedule = family.members[n]
    module = schedule_fused if isinstance(schedule, Fused) else schedule_apart
    return module.simulate(job, costs, schedule, steps, WARM_UP)

  last = len(family.members) - 1
  place, best = -1, min(1, last)
  while place != best:
    place = best
    best = min({max(place - 1, 0), place, min(place + 1, last)}, key=lambda n: of(n).each_s)
  return of(best), family.members[best]


def label(schedule: Fused | Apart, chips: int) -> str:
  """The numbers in which a schedule differs from its family."""
  if isinstance(schedule, Fused):
    return f'{schedule.submitted:g} x groups' if schedule.submitted > 1 else ''
  return f'trainer {schedule.trainer}, of {chips} chips'


def report(title: str, job: Job, costs: Costs, steps: int) -> str:
  """Prints a row for each family; returns the summary of the setting."""
  print(f'\n{title}')
  names = ('s/group', 'of fused', 'stale', 'max', 'idle', 'wasted', 'length')
  print(f'{"":30}', *(f'{name:>8}' for name in names), ' fastest with')
  best: dict[str, tuple[float, str]] = {}
  fused_s = 0.0
  for family in families(costs, job.groups):
    got, schedule = fastest(family, job, costs, steps)
    fused_s = fused_s or got.each_s
    print(
      f'{family.name:30} {got.each_s:8.3f} {got.each_s / fused_s:8.2f} {got.staleness_mean:8.2f} '
      f'{got.staleness_max:8} {got.idle:8.1%} {got.dropped / got.sampled:8.1%} {got.length:8.2f} ',
      label(schedule, costs.chips),
      flush=True,
    )
    best[family.kind] = min(best.get(family.kind, (np.inf, '')), (got.each_s, family.name))
  gain = best['built'][0] / best['apart'][0] - 1
  other = min(best['built'], best['not built'])
  more = other[0] / best['apart'][0] - 1
  return (
    f'{title:46} {best["built"][1]:30} {best["apart"][1]:20} {gain:+7.1%}   '
    f'{other[1]:30} {more:+7.1%}'
  )


def check_iterations(steps: int) -> None:
  """Decode iterations of the real loop, and those of the simulation with the same lengths."""
  print(f'{"decode iterations":30} {"real":>8} {"simulated":>9}')
  for submitted in (1.0, 4 / 3, 2.0):
    real, simulated = iterations(submitted, steps)
    print(f'{f"{submitted:.2f} x groups":30} {sum(real):8} {sum(simulated):9}', flush=True)


def iterations(submitted: float, steps: int) -> tuple[list[int], list[int]]:
  """(real, simulated) iterations of each rollout of the job of tests/bench/rounds.py."""
  target = round(rounds.P / submitted)
  real = rounds.iterations(steps, target / rounds.P)
  length_NxG = rounds.lengths(steps).astype(np.int64)
  job = Job(target, rounds.T, length_NxG, np.zeros(length_NxG.shape))
  costs = schedule_jobs.Costs(1, 1, rounds.SLOTS, rounds.SLOTS, *[1] * 10)
  schedule = Fused(submitted=rounds.P / target, max_age=steps)
  return real, schedule_fused.simulate(job, costs, schedule, steps - 1).iterations


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--mfu', type=float, default=0.4, help='0: of the compiled updates')
  parser.add_argument('--machines', default='8B, v5e-256;8B, v6e-64;1.7B, v5e-16')
  parser.add_argument('--caps', default='2048,8192')
  parser.add_argument('--latencies', default='0,1,10,60')
  parser.add_argument('--batch', type=float, default=1.0, help='times the groups of the machine')
  parser.add_argument('--steps', type=int, default=6)
  parser.add_argument('--seed', type=int, default=0)
  options = smoke.parse(parser, machines='1.7B, v5e-16', caps='2048', latencies='1', steps=1)
  check_iterations(2 if options.smoke else 8)
  machines = [m for m in schedule_costs.MACHINES if m.name in options.machines.split(';')]
  lines = []
  for machine, cap in itertools.product(machines, map(int, options.caps.split(','))):
    prompt, mean = TOKENS[cap]
    mfu = options.mfu or machine.mfu
    costs = schedule_costs.costs(machine, Lengths(prompt, cap, mean, SIGMA), mfu)
    for latency_s in map(float, options.latencies.split(',')):
      groups = round(machine.groups * options.batch)
      job = schedule_jobs.draw(
        options.seed, groups, ROLLOUTS, max_tokens=cap, mean_tokens=mean, sigma=SIGMA,
        latency_s=latency_s, count=groups * (options.steps + WARM_UP + 9) * 2,
      )  # fmt: skip
      title = f'{machine.name}, {prompt} + {cap} tokens, grading {latency_s:g} s'
      lines.append(report(title, job, costs, options.steps))
  header = (
    f'{"gain of two meshes over":46} {"best that is built":30} {"two meshes":20} {"gain":>7}   '
  )
  print(f'\n{header}{"best of one program":30} {"gain":>7}', *lines, sep='\n')


if __name__ == '__main__':
  main()

"""Simulated steps of one program, update and then rollout: plain, with partial rollouts, and with lag."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tests.bench.lib import schedule_jobs
from tests.bench.lib.schedule_jobs import Account, Costs, DecodeLoop, Job, Outcome, Row


class Fused(NamedTuple):
  """Settings of a schedule of one program."""

  lag: int = 0  # steps of the device beside which a batch is graded; above 1 is not built
  submitted: float = 1.0  # groups in a rollout, as a multiple of those after which it stops
  max_age: int = 4
  # Of continued rows. 'slots': all tokens of all slots are encoded, as the program does; 'rows': only those that the
  # rows have; 'none': the cache stays on the device.
  encode: str = 'slots'
  # Unfinished groups continue in the next step, before the complete ones are graded; with a lag this is not built.
  at_once: bool = False


def rollout(
  job: Job, loop: DecodeLoop, groups: list[int], age_NxG: np.ndarray, target: int
) -> list[int]:
  """Decodes `groups` until `target` of them are complete; writes their tokens so far to `age_NxG`.

  Returns the complete groups, in the order in which they ended. Continued rows come first, those with most tokens in
  front; then the others in their order.
  """
  length_NxG = job.length_NxG
  rows = [(g, j) for g in groups for j in range(length_NxG.shape[1])]
  age_NxG[groups] = np.maximum(age_NxG[groups], 1)
  left = {g: int((age_NxG[g] < length_NxG[g]).sum()) for g in groups}
  complete = [g for g in groups if not left[g]]
  queue = [row for row in rows if age_NxG[row] < length_NxG[row]]
  queue.sort(key=lambda row: -age_NxG[row] if age_NxG[row] > 1 else 0)
  queue.reverse()

  def fill() -> None:
    while queue and loop.free():
      row: Row = queue.pop()
      loop.start(row, int(age_NxG[row]), int(length_NxG[row]))

  fill()
  while loop.busy and len(complete) < target:
    for row in loop.advance(loop.to_next_end()):
      age_NxG[row] = length_NxG[row]
      left[row[0]] -= 1
      if not left[row[0]]:
        complete.append(row[0])
    fill()
  for row, age in loop.ages():
    age_NxG[row] = age
  return complete


class _Step(NamedTuple):
  """A rollout that has ended."""

  complete: list[int]
  unfinished: list[int]
  graded_s: float  # when


def simulate(job: Job, costs: Costs, schedule: Fused, steps: int, warm_up: int = 0) -> Outcome:
  """Takes `warm_up` + `steps` updates of complete rollouts; the first ones are not timed.

  Step i learns the batch of step i − 1 − lag and continues the unfinished groups of that step, as the loop of
  jaxrl_llm/train.py does. The device waits until that batch is graded.
  """
  B, G = job.groups, job.length_NxG.shape[1]
  P = round(schedule.submitted * B)
  slots = min(P * G, costs.slots)
  age_NxG, account, past = np.zeros_like(job.length_NxG), Account(), []
  born: dict[int, int] = {}
  now = idle = begun_s = begun_idle = 0.0
  begun_groups, begun_tokens, next_group, iterations = 0, 0, 0, []
  for i in range(1 + schedule.lag + warm_up + steps):
    if i == 1 + schedule.lag + warm_up:
      begun_s, begun_idle = now, idle
      begun_groups, begun_tokens = account.groups, account.learned
    before = i - 1 - schedule.lag
    landed = past[before] if before >= 0 else _Step([], [], 0.0)
    idle += max(landed.graded_s - now, 0.0)
    now = max(now, landed.graded_s)
    learned = sum(account.learn(g, i - 1) for g in landed.complete)
    continued = past[-1].unfinished if past and schedule.at_once else landed.unfinished
    fresh = [next_group + n for n in range(P - len(continued))]
    next_group += len(fresh)
    assert next_group <= len(age_NxG), 'draw more groups'
    born |= dict.fromkeys(fresh, i)
    groups = continued + fresh
    loop = DecodeLoop(costs, slots, 1 / G if slots == P * G else 1.0)
    loop.seconds = now + learned * costs.update_s + costs.push_s + P * costs.prefill_s
    loop.seconds += costs.encode_s * _encoded(job, schedule, age_NxG, continued, slots)
    began_NxG = age_NxG.copy()
    complete = rollout(job, loop, groups, age_NxG, B)
    for g in groups:
      account.sample(g, i, int((age_NxG[g] - began_NxG[g]).sum()))
    now = loop.seconds
    iterations.append(loop.iterations)
    rest = [g for g in groups if g not in set(complete)]
    old = {g for g in rest if i + 1 - born[g] > schedule.max_age}
    for g in old:
      account.drop(g)
    latency_s = job.latency_NxG[complete].max() if complete else 0.0
    # The host grades one batch after the other; more than one lag needs several at a time.
    grading_s = max(now, past[-1].graded_s) if past and schedule.lag == 1 else now
    past.append(_Step(complete, [g for g in rest if g not in old], grading_s + latency_s))
  counts = account.groups - begun_groups, account.learned - begun_tokens
  return schedule_jobs.outcome(job, account, now - begun_s, *counts, idle - begun_idle, iterations)


def _encoded(
  job: Job, schedule: Fused, age_NxG: np.ndarray, continued: list[int], slots: int
) -> int:
  """Tokens of continued rows that are encoded again."""
  age_HxG = age_NxG[continued]
  running_HxG = (age_HxG > 1) & (age_HxG < job.length_NxG[continued])
  if schedule.encode == 'none' or not running_HxG.any():
    return 0
  return slots * job.max_tokens if schedule.encode == 'slots' else int(age_HxG[running_HxG].sum())

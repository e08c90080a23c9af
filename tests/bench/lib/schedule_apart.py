"""Simulated training on two meshes: a sampler that never waits for a batch, and a trainer beside it."""

from __future__ import annotations

import heapq
from collections import deque
from typing import NamedTuple

import numpy as np

from tests.bench.lib import schedule_jobs
from tests.bench.lib.schedule_jobs import Account, Costs, DecodeLoop, Job, Outcome, Row


class Apart(NamedTuple):
  """Settings of a schedule of two meshes."""

  trainer: int  # chips
  bound: int  # updates between sampling a token and learning it, at most
  # Groups are learned in the order in which they were started, so that the trainer waits for the slowest; or as they
  # end, and those that are too old are dropped.
  in_order: bool = True
  encode: bool = False  # tokens of running rows with new weights; else their cache stays as it is
  window: int = 64  # decode iterations between two looks at the host: new weights, new prompts
  # Parts of a batch; the trainer accumulates the gradient of one as soon as its groups are graded.
  chunks: int = 8


class _Trainer:
  """Takes graded groups in chunks and makes a version of the weights of every `job.groups`."""

  def __init__(self, job: Job, costs: Costs, schedule: Apart, account: Account):
    self.job, self.costs, self.schedule, self.account = job, costs, schedule, account
    self.graded: list[tuple[float, int]] = []  # heap of (when, group)
    self.version, self.taken = 0, 0  # groups of this batch
    self.free_s, self.idle_s = 0.0, 0.0
    self.made_s = [0.0]  # when each version was ready
    self.learned = [0]  # tokens before each version

  def run(self, until_s: float, versions: int) -> None:
    """Learns what can begin until then, and makes at most `versions` versions in all."""
    while self.version < versions and self.free_s <= until_s:
      chunk = self._next_chunk()
      if chunk is None or chunk[-1][0] > until_s:
        return
      begin = max(self.free_s, chunk[-1][0])
      self.idle_s += begin - self.free_s
      self._remove(set(chunk))
      tokens = sum(self.account.learn(group, self.version) for _, group in chunk)
      self.free_s = begin + tokens * self.costs.update_s
      self.taken += len(chunk)
      if self.taken == self.job.groups:
        self.version, self.taken = self.version + 1, 0
        self.made_s.append(self.free_s)
        self.learned.append(self.account.learned)

  def _next_chunk(self) -> list[tuple[float, int]] | None:
    """The groups of the next chunk by the time of their grading; None while there are too few."""
    B = self.job.groups
    size = min(-(-B // self.schedule.chunks), B - self.taken)
    if len(self.graded) < size:
      return None
    if self.schedule.in_order:
      allowed = [entry for entry in self.graded if entry[1] // B == self.version]
    else:
      self.drop_old()
      allowed = self.graded
    return heapq.nsmallest(size, allowed) if len(allowed) >= size else None

  def drop_old(self) -> None:
    old = {entry for entry in self.graded if self.is_old(entry[1])}
    for _, group in old:
      self.account.drop(group)
    self._remove(old)

  def _remove(self, entries: set[tuple[float, int]]) -> None:
    self.graded = [entry for entry in self.graded if entry not in entries]
    heapq.heapify(self.graded)

  def is_old(self, group: int) -> bool:
    """Whether the group's first token is beyond the bound in every update to come."""
    return self.account.oldest(group) < self.version - self.schedule.bound


class _Sampler:
  """Decodes without end; the host looks after it every `window` iterations."""

  def __init__(self, job: Job, costs: Costs, schedule: Apart, trainer: _Trainer):
    self.job, self.costs, self.schedule, self.trainer = job, costs, schedule, trainer
    self.account, G = trainer.account, job.length_NxG.shape[1]
    rows = (schedule.bound + 1) * job.groups * G  # at most at a time
    slots = min(rows, costs.sampler_slots)
    self.loop = DecodeLoop(costs, slots, 1 / G if slots == rows else 1.0)
    self.waiting: deque[Row] = deque()
    self.left: dict[int, int] = {}  # rows of a group that run or wait
    self.graded_s: dict[int, float] = {}  # when the rows that have ended are graded
    self.counted: dict[Row, int] = {}  # tokens of a busy row that the account has
    self.version, self.started, self.idle_s = 0, 0, 0.0

  def look(self) -> None:
    """Takes the newest weights that are ready, drops groups that are too old, and starts new ones."""
    newest = int(np.searchsorted(self.trainer.made_s, self.loop.seconds, side='right')) - 1
    if newest > self.version:
      for row, age in self.loop.ages():
        self._count(row, age)
      self.version = newest
      self.loop.seconds += self.costs.push_s
      if self.schedule.encode:
        self.loop.seconds += self.loop.columns * self.costs.encode_s
      if not self.schedule.in_order:
        self._drop_old()
    while self._may_start():
      members = self.job.length_NxG.shape[1]
      assert self.started < len(self.job.length_NxG), 'draw more groups'
      self.waiting.extend((self.started, j) for j in range(members))
      self.left[self.started] = members
      self.graded_s[self.started] = 0.0
      self.started += 1
    self.fill()

  def _may_start(self) -> bool:
    """AReaL's rule, arXiv:2505.24298: what runs, waits or was learned fits into the batches up to the bound."""
    B, limit = self.job.groups, (self.version + self.schedule.bound + 1) * self.job.groups
    if len(self.waiting) >= self.loop.slots:
      return False  # enough to fill every slot
    if self.schedule.in_order:
      return self.started < limit
    trainer = self.trainer
    return len(self.left) + len(trainer.graded) + trainer.version * B + trainer.taken < limit

  def _drop_old(self) -> None:
    old = {g for g in self.left if g in self.account.tokens and self.trainer.is_old(g)}
    self.loop.remove(lambda row: row[0] in old)
    self.waiting = deque(row for row in self.waiting if row[0] not in old)
    self.counted = {row: n for row, n in self.counted.items() if row[0] not in old}
    for g in old:
      self.account.drop(g)
      del self.left[g], self.graded_s[g]

  def fill(self) -> None:
    """Gives slots to waiting rows; the first row of a group encodes its prompt."""
    while self.waiting and self.loop.free():
      row = self.waiting.popleft()
      if row[0] not in self.account.tokens:
        self.loop.seconds += self.costs.prefill_s
      self._count(row, 1)
      if self.job.length_NxG[row] == 1:
        self._end(row)
      else:
        self.loop.start(row, 1, int(self.job.length_NxG[row]))

  def tick(self) -> None:
    """Decodes until a row ends or the host looks again."""
    to_look = self.schedule.window - self.loop.iterations % self.schedule.window
    for row in self.loop.advance(min(self.loop.to_next_end(), to_look)):
      self._end(row)
    self.fill()

  def _count(self, row: Row, age: int) -> None:
    self.account.sample(row[0], self.version, age - self.counted.get(row, 0))
    self.counted[row] = age

  def _end(self, row: Row) -> None:
    """Counts a row's tokens and hands its group to the trainer where it is complete."""
    self._count(row, int(self.job.length_NxG[row]))
    del self.counted[row]
    group = row[0]
    graded = self.loop.seconds + self.job.latency_NxG[row]
    self.graded_s[group] = max(self.graded_s[group], graded)
    self.left[group] -= 1
    if not self.left[group]:
      heapq.heappush(self.trainer.graded, (self.graded_s.pop(group), group))
      del self.left[group]


def simulate(job: Job, costs: Costs, schedule: Apart, steps: int, warm_up: int = 0) -> Outcome:
  """Makes `warm_up` + `steps` versions of the weights on `costs.chips` chips; the first ones are not timed."""
  account, chips = Account(), costs.chips
  trainer_costs = schedule_jobs.part(costs, schedule.trainer)
  trainer = _Trainer(job, trainer_costs, schedule, account)
  sampler = _Sampler(job, schedule_jobs.part(costs, chips - schedule.trainer), schedule, trainer)
  begun = None
  while trainer.version < warm_up + steps:
    trainer.run(sampler.loop.seconds, warm_up + steps)
    if begun is None and trainer.version >= warm_up:
      begun = trainer.made_s[warm_up], trainer.idle_s, sampler.idle_s
    if sampler.loop.iterations % schedule.window == 0 or not sampler.loop.busy:
      sampler.look()
    if sampler.loop.busy:
      sampler.tick()
    else:
      _wait(sampler, trainer, warm_up + steps)
  assert begun is not None
  seconds = trainer.made_s[-1] - begun[0]
  idle = (trainer.idle_s - begun[1]) * schedule.trainer
  idle += (sampler.idle_s - begun[2]) * (chips - schedule.trainer)
  tokens = trainer.learned[-1] - trainer.learned[warm_up]
  return schedule_jobs.outcome(job, account, seconds, steps * job.groups, tokens, idle / chips, [])


def _wait(sampler: _Sampler, trainer: _Trainer, versions: int) -> None:
  """The sampler may start nothing: it waits for the next version of the weights."""
  now, dropped = sampler.loop.seconds, trainer.account.dropped
  if trainer.made_s[-1] <= now:
    trainer.run(np.inf, min(trainer.version + 1, versions))
  if trainer.made_s[-1] > now:
    after = trainer.made_s[np.searchsorted(trainer.made_s, now, side='right')]
    sampler.idle_s += after - now
    sampler.loop.seconds = after
  else:  # groups were dropped, and others may start
    assert trainer.account.dropped > dropped, 'neither sampler nor trainer can go on'

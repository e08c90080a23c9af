"""Costs and draws of the simulated training schedules of tests/bench/schedules.py."""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np

from jaxrl_llm.profiling import step_estimate


class Costs(NamedTuple):
  """Seconds of the parts of a step on `chips` chips; a row occupies the chips of one of `shards`."""

  chips: int
  shards: int
  slots: int  # of all shards; with more, caches do not fit beside weights and optimizer
  sampler_slots: int  # the same without an optimizer
  weights_s: float  # reading the sampler's weights once
  column_s: float  # reading one token's keys and values of one row of a shard
  block_tokens: int  # tokens that the attention kernel reads beyond those of a row
  prompt_s: float  # reading the keys and values of one row's prompt
  compute_s: float  # products of one row of a shard
  links_s: float  # exchanges of one row of a shard
  prefill_s: float  # encoding one prompt
  encode_s: float  # encoding one token of a continued row
  update_s: float  # learning one token
  push_s: float  # moving the weights to where the sampler reads them


def part(costs: Costs, chips: int) -> Costs:
  """The same work on `chips` chips, a multiple of those of a shard."""
  shards, rest = divmod(chips * costs.shards, costs.chips)
  if rest or not shards:
    raise ValueError(f'{chips} of {costs.chips} chips hold no whole number of shards')
  more = costs.chips / chips
  return costs._replace(
    chips=chips,
    shards=shards,
    slots=costs.slots * shards // costs.shards,
    sampler_slots=costs.sampler_slots * shards // costs.shards,
    prefill_s=costs.prefill_s * more,
    encode_s=costs.encode_s * more,
    update_s=costs.update_s * more,
  )


class Job(NamedTuple):
  """Groups in the order in which they are started."""

  groups: int  # B: learned in one update
  max_tokens: int  # T
  length_NxG: np.ndarray  # tokens
  latency_NxG: np.ndarray  # seconds of grading one completion


def draw(
  seed: int, groups: int, rollouts: int, *, max_tokens: int, mean_tokens: float, sigma: float,
  latency_s: float, count: int = 4096,
) -> Job:  # fmt: skip
  """Log-normal lengths, half of the log's variance shared by a group, and grading of a log-normal latency.

  Grading ends at its deadline, four times the mean. `count`: groups drawn.
  """
  r = np.random.default_rng(seed)
  normal_NxG = (r.normal(size=(count, 1)) + r.normal(size=(count, rollouts))) / np.sqrt(2)
  length_NxG = np.exp(np.log(mean_tokens) - sigma**2 / 2 + sigma * normal_NxG)
  length_NxG = np.clip(np.round(length_NxG), 1, max_tokens).astype(np.int64)
  spread = 0.8
  latency_NxG = np.exp(spread * r.normal(size=(count, rollouts)) - spread**2 / 2)
  return Job(groups, max_tokens, length_NxG, latency_s * np.minimum(latency_NxG, 4.0))


Row = tuple[int, int]  # group, member


class DecodeLoop:
  """A decode loop of static shape whose slots take waiting rows: its clock, iterations and rows.

  A row's first token is sampled from its prompt, each further one in an iteration.
  """

  def __init__(self, costs: Costs, slots: int, prompt_share: float = 1.0):
    """`prompt_share`: reads of a prompt's cache per row of it; 1 / G where a group's rows are read together."""
    self.costs, self.slots, self.prompt_share = costs, slots, prompt_share
    self.iterations, self.seconds = 0, 0.0
    self.columns = 0  # tokens of all busy rows
    self.busy: list[tuple[int, int, Row]] = []  # heap of (last iteration, length, row)

  def start(self, row: Row, age: int, length: int) -> None:
    """Gives a slot to a row with `age` of its `length` tokens."""
    heapq.heappush(self.busy, (self.iterations + length - age, length, row))
    self.columns += age

  def free(self) -> int:
    """Idle slots."""
    return self.slots - len(self.busy)

  def iteration_s(self, columns: float) -> float:
    """Seconds of an iteration in which the busy rows have `columns` tokens together."""
    c, busy = self.costs, len(self.busy)
    cache_s = (columns + busy * c.block_tokens) * c.column_s + busy * self.prompt_share * c.prompt_s
    seconds = dict(
      weights=c.weights_s,
      cache=cache_s / c.shards,
      links=self.slots / c.shards * c.links_s,
      compute=self.slots / c.shards * c.compute_s,
    )
    return step_estimate.iteration_seconds(seconds)[0]

  def to_next_end(self) -> int:
    """Iterations until a row ends."""
    return self.busy[0][0] - self.iterations

  def advance(self, count: int) -> list[Row]:
    """Takes `count` iterations, in which no row ends before the last; returns the rows that ended.

    Seconds are those of the first and the last iteration on average: an iteration's time is linear in the columns,
    except where it changes from products to reads.
    """
    if count:
      last = self.columns + (count - 1) * len(self.busy)
      self.seconds += count * (self.iteration_s(self.columns) + self.iteration_s(last)) / 2
    self.iterations += count
    self.columns += count * len(self.busy)
    ended = []
    while self.busy and self.busy[0][0] <= self.iterations:
      _, length, row = heapq.heappop(self.busy)
      self.columns -= length
      ended.append(row)
    return ended

  def ages(self) -> list[tuple[Row, int]]:
    """Busy rows with their tokens so far."""
    return [(row, length - (last - self.iterations)) for last, length, row in self.busy]

  def remove(self, is_removed) -> None:
    """Frees the slots of the rows for which `is_removed(row)`."""
    self.columns -= sum(age for row, age in self.ages() if is_removed(row))
    self.busy = [entry for entry in self.busy if not is_removed(entry[2])]
    heapq.heapify(self.busy)


class Account:
  """Tokens by group and the version of the weights that sampled them, until they are learned or dropped."""

  def __init__(self):
    self.tokens: dict[int, dict[int, int]] = {}  # of each group, by version
    self.sampled = self.learned = self.dropped = 0
    self.groups = 0  # learned
    self.staleness_sum, self.staleness_max = 0, 0

  def sample(self, group: int, version: int, tokens: int) -> None:
    by_version = self.tokens.setdefault(group, {})
    by_version[version] = by_version.get(version, 0) + tokens
    self.sampled += tokens

  def oldest(self, group: int) -> int:
    """The version of its first token."""
    return min(self.tokens[group])

  def learn(self, group: int, version: int) -> int:
    """Learns a group in an update of the weights `version`; returns its tokens."""
    by_version = self.tokens.pop(group)
    count = sum(by_version.values())
    self.learned += count
    self.groups += 1
    self.staleness_sum += sum((version - v) * n for v, n in by_version.items())
    self.staleness_max = max(self.staleness_max, *(version - v for v in by_version))
    return count

  def drop(self, group: int) -> None:
    self.dropped += sum(self.tokens.pop(group, {}).values())

  def waiting(self) -> int:
    """Tokens that are neither learned nor dropped."""
    return sum(sum(by_version.values()) for by_version in self.tokens.values())


class Outcome(NamedTuple):
  """A simulated schedule. The first five leave out the steps before the timed ones; the others count from the start."""

  seconds: float
  groups: int  # learned
  each_s: float  # seconds for the learned tokens of a group of mean length
  length: float  # mean of the learned groups, as a share of that of all: below 1 where long ones are dropped
  idle: float  # share of the chips' time
  staleness_mean: float  # updates between sampling and learning a token
  staleness_max: int
  sampled: int
  learned: int
  dropped: int
  waiting: int
  iterations: list[int]  # of each rollout of a fused schedule


def outcome(
  job: Job, account: Account, seconds: float, groups: int, tokens: int, idle_s: float,
  iterations: list[int],
) -> Outcome:  # fmt: skip
  """`groups` and `tokens` were learned in `seconds`, of which all chips together were idle for `idle_s`."""
  mean = float(job.length_NxG.sum(1).mean())
  return Outcome(
    seconds, groups, seconds / tokens * mean, tokens / groups / mean, idle_s / seconds,
    account.staleness_sum / account.learned, account.staleness_max, account.sampled, account.learned,
    account.dropped, account.waiting(), iterations,
  )  # fmt: skip

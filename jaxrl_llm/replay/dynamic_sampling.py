"""Dynamic sampling: graded groups wait until a batch is full, and surplus groups wait for the next batch.

Every public function may be named in `config.replay.collect.fn`; it returns the rule of a `Collector`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from absl import logging

from jaxrl_llm.replay import group_batches
from jaxrl_llm.rewards import outcomes
from jaxrl_llm.types import Batch, JsonObject, Settings, UserError


class Rule(NamedTuple):
  """Settings for the graded rows of a prompt: n rows with a success mass k, the number of right ones."""

  keeps: Callable[[bool], bool]  # mixed group → True if the update uses it
  lacks: Callable[[float, int], int]  # (k, n) → number of further rollouts
  patience: int  # calls after which a partial batch is used
  max_age: int  # largest number of calls that a group waits; older groups are dropped
  top_ups: int  # slots of a call for further rollouts; 0: no prompt gets any
  most: int  # largest number of slots of one prompt


class Group(NamedTuple):
  """All graded slots of a prompt."""

  batch: Batch  # of these slots alone
  step: int  # of its first slots
  lacking: int = 0  # number of further slots
  requested: bool = False  # the further slots are being sampled


class Collector:
  """Graded groups before the update: those that wait for further rollouts, and those that wait for a batch."""

  def __init__(
    self,
    rule: Rule,
    prompts: int,
    rollouts: int,
    compared: Callable[[Batch], np.ndarray] = lambda batch: batch.reward_B[:, None],
  ):
    """Batches of `prompts` slots of `rollouts` rows; `compared` returns the scores [B, K] that define mixed groups."""
    self.rule, self.P, self.G, self._compared = rule, prompts, rollouts, compared
    self.queue: list[Group] = []
    self.lacking: dict[int, Group] = {}  # prompt → its group
    self.calls = 0  # since the last batch

  @property
  def waiting_prompts(self) -> np.ndarray:
    """Prompts that wait for further rollouts and must not be proposed."""
    return np.array(sorted(self.lacking), np.int32)

  def requests(self) -> tuple[np.ndarray, np.ndarray]:
    """(index, part) of the further slots of prompts, lowest success rate first, at most `top_ups`, each once.

    A prompt whose slots do not all fit gets fewer. arXiv:2508.13755 (DARS).
    """
    slots, room = [], self.rule.top_ups
    waiting = [(index, group) for index, group in self.lacking.items() if not group.requested]
    for index, group in sorted(waiting, key=lambda pair: _hardness(pair[1])):
      count = min(group.lacking, room)
      room -= count
      landed = len(group.batch.prompts.index_P)
      slots += [(index, landed + i) for i in range(count)]
      self.lacking[index] = group._replace(lacking=count, requested=True)
    # Groups without any further slot are used as they are.
    for index in [i for i, group in self.lacking.items() if not group.lacking]:
      self._queue(self.lacking.pop(index))
    index, part = np.array(slots, np.int32).reshape(-1, 2).T
    return index, part

  def add(self, batch: Batch, step: int) -> dict[str, float]:
    """Adds the groups of a graded batch; returns metrics. arXiv:2503.14476 (DAPO)."""
    index_P = np.asarray(batch.prompts.index_P)
    real_P = (np.asarray(batch.rollout.length_B).reshape(len(index_P), -1) > 0).any(1)
    unmet = 0
    for index in dict.fromkeys(index_P.tolist()):
      landed = group_batches.slots(batch, np.flatnonzero((index_P == index) & real_P))
      earlier = self.lacking.pop(index, None)
      if earlier is not None:  # also where its further slots have no rows
        self._queue(Group(group_batches.joined([earlier.batch, landed]), earlier.step))
        continue
      if not len(landed.prompts.index_P):
        continue
      wanted = math.ceil(self.rule.lacks(*_mass(landed)) / self.G)
      count = min(wanted, self.rule.most - len(landed.prompts.index_P), self.rule.top_ups)
      unmet += wanted - count
      if count > 0:
        self.lacking[index] = Group(landed, step, lacking=count)
      else:
        self._queue(Group(landed, step))
    return {'collect/unmet_slots': unmet, 'collect/lacking': len(self.lacking)}

  def _queue(self, group: Group) -> None:
    batch = group.batch
    exists_B = np.asarray(batch.rollout.length_B) > 0
    one_B = np.zeros(len(exists_B), int)
    if self.rule.keeps(bool(outcomes.mixed(self._compared(batch), exists_B, one_B, 1)[0])):
      self.queue.append(group._replace(batch=batch._replace(success_B=None)))

  def take(self, empty: Batch, step: int) -> tuple[Batch, dict[str, float]]:
    """A full batch of the oldest groups, or `empty` where there is none; other groups stay.

    After `patience` calls without a full batch, returns a partial one. arXiv:2503.14476 (DAPO; its rounds of sampling
    are calls of the program here, and surplus groups are stored instead of discarded).
    """
    young = [group for group in self.queue if step - group.step <= self.rule.max_age]
    dropped, self.calls = len(self.queue) - len(young), self.calls + 1
    taken, rest, room, indices = [], [], self.P, set()
    for group in young:
      index_P = group.batch.prompts.index_P
      # Two visits to a prompt are two groups, which one batch would merge into one.
      fits = len(index_P) <= room and int(index_P[0]) not in indices
      (taken if fits else rest).append(group)
      indices.add(int(index_P[0]))
      room -= len(index_P) if fits else 0
    short = room > 0 and all(len(group.batch.prompts.index_P) <= room for group in rest)
    metrics = {'collect/dropped': dropped, 'collect/short': 0}
    if short and self.calls < self.rule.patience:
      self.queue = young
      return empty, metrics | {'collect/queued': len(young)}
    if short:
      logging.warning(
        'config.replay.collect.patience=%d calls filled %d of %d slots; the batch is used as it is.',
        self.rule.patience, self.P - room, self.P,
      )  # fmt: skip
    self.queue, self.calls = rest, 0
    metrics |= {'collect/queued': len(rest), 'collect/short': int(short)}
    blank = group_batches.empty_slots(empty, room)
    return group_batches.joined([*(group.batch for group in taken), blank]), metrics

  def state_dict(self) -> JsonObject:
    """State for the checkpoint."""
    groups = [*self.queue, *self.lacking.values()]
    states = [dict(group._asdict(), batch=group_batches.plain(group.batch)) for group in groups]
    return dict(calls=self.calls, queued=len(self.queue), groups=states)

  def load_state_dict(self, state: Settings) -> None:
    """Restore from `state_dict`."""
    groups = [
      Group(**dict(group, batch=group_batches.from_plain(group['batch'])))
      for group in state['groups']
    ]
    self.calls, self.queue = state['calls'], groups[: state['queued']]
    self.lacking = {int(g.batch.prompts.index_P[0]): g for g in groups[state['queued'] :]}


def none() -> Rule | None:
  """Every graded batch is used as it is."""
  return None


def mixed(*, patience: int = 10, max_age: int = 4) -> Rule:
  """Zero-variance groups are left out, and a batch waits until mixed groups fill it.

  The weights do not change in calls without a full batch, at most `patience` of them. Surplus groups wait for the next
  batch, at most `max_age` calls. arXiv:2503.14476 (DAPO: up to 10 rounds; surplus discarded).
  """
  _check_integer('patience', patience, 1)
  _check_integer('max_age', max_age, 0)
  return Rule(lambda mixed: mixed, lambda k, n: 0, patience, max_age, 0, 1)


def dars(
  *, top_ups: int, schedule: str = 'ET', most: int = 4, patience: int = 10, max_age: int = 4
) -> Rule:
  """Prompts with a success rate below ½ get further rollouts in slots of a later call, to balance Σ|A| over prompts.

  With p = max(k, 0.5)/n: ET ⌈n(1 − 2p)² / (4p(1 − p))⌉ more, HW ⌈n(1 − 2p) / (2p)⌉, in slots of `config.rollouts`, at
  most `most` per prompt and `top_ups` per call. All rows of a prompt are one group, and zero-variance groups are left
  out. arXiv:2508.13755 (DARS; n = 8, at most 32 rollouts for ET and 64 for HW, which is most = 4 and 8).
  """
  rules = dict(ET=_equal_treatment, HW=_hardness_weighted)
  if schedule not in rules:
    raise UserError(
      f'config.replay.collect.schedule={schedule!r} must be one of: {", ".join(rules)}.'
    )
  _check_integer('top_ups', top_ups, 1)
  _check_integer('most', most, 2)
  _check_integer('patience', patience, 1)
  _check_integer('max_age', max_age, 1)
  return Rule(lambda mixed: mixed, rules[schedule], patience, max_age, top_ups, most)


def _equal_treatment(k: float, n: int) -> int:
  p = max(k, 0.5) / n
  return math.ceil(n * (1 - 2 * p) ** 2 / (4 * p * (1 - p))) if p < 0.5 else 0


def _hardness_weighted(k: float, n: int) -> int:
  p = max(k, 0.5) / n
  return math.ceil(n * (1 - 2 * p) / (2 * p)) if p < 0.5 else 0


def _check_integer(name: str, value: int, least: int) -> None:
  if type(value) is not int or value < least:
    raise UserError(
      f'config.replay.collect.{name}={value!r} must be a whole number of at least {least}.'
    )


def _mass(batch: Batch) -> tuple[float, int]:
  """(successes of a group, its rows)."""
  real_B = np.asarray(batch.rollout.length_B) > 0
  return float(np.asarray(batch.success, float)[real_B].sum()), int(real_B.sum())


def _hardness(group: Group) -> tuple[float, int]:
  k, n = _mass(group.batch)
  return k / n, int(group.batch.prompts.index_P[0])

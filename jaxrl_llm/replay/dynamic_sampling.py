"""Which landed groups are learned from, and when: a batch waits until it is full, what is too much for the next one.

Every public function here may be named in `config.replay.collect.fn`; it makes the rule of a `Collector`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from absl import logging

from jaxrl_llm.rewards import outcomes
from jaxrl_llm.types import Batch, Prompts, Rollout, UserError


class Rule(NamedTuple):
  """What is done with a prompt's landed rows, n with a success mass k: of binary scores k were right."""

  keeps: Callable[[bool], bool]  # whether they are learned from, by whether their scores differ
  lacks: Callable[[float, int], int]  # (k, n) → rollouts that it is to get besides
  patience: int  # calls after which a batch is learned although it is not full
  max_age: int  # calls that a group may wait; older ones are dropped
  top_ups: int  # slots of a call that go to prompts that lack rollouts; 0: none lacks any
  most: int  # slots that one prompt may fill


class Group(NamedTuple):
  """All landed slots of a prompt."""

  batch: Batch  # of these slots alone
  step: int  # of its first landing
  lacking: int = 0  # slots that are still to come
  asked: bool = False  # whether these are on their way


class Collector:
  """Between landing and learning: groups that wait for more rollouts, and those that wait for a batch."""

  def __init__(
    self,
    rule: Rule,
    prompts: int,
    rollouts: int,
    compared: Callable[[Batch], np.ndarray] = lambda batch: batch.reward_B[:, None],
  ):
    """Batches of `prompts` slots of `rollouts` rows; `compared` returns the scores [B, K] that decide what is mixed."""
    self.rule, self.P, self.G, self._compared = rule, prompts, rollouts, compared
    self.queue: list[Group] = []
    self.lacking: dict[int, Group] = {}  # prompt → its group
    self.calls = 0  # since a batch was learned

  @property
  def held(self) -> np.ndarray:
    """Prompts that may not be proposed anew: they wait for rollouts. Source: none."""
    return np.array(sorted(self.lacking), np.int32)

  def requests(self) -> tuple[np.ndarray, np.ndarray]:
    """(index, part) of the slots that prompts lack, hardest first; at most `top_ups`, and asked for once.

    A prompt whose slots do not all fit gets what there is room for. Source: arXiv:2508.13755 (DARS).
    """
    slots, room = [], self.rule.top_ups
    waiting = [(index, group) for index, group in self.lacking.items() if not group.asked]
    for index, group in sorted(waiting, key=lambda pair: _hardness(pair[1])):
      count = min(group.lacking, room)
      room -= count
      begun = len(group.batch.prompts.index_P)
      slots += [(index, begun + i) for i in range(count)]
      self.lacking[index] = group._replace(lacking=count, asked=True)
    # What there was no room for is learned as it is.
    for index in [i for i, group in self.lacking.items() if not group.lacking]:
      self._queue(self.lacking.pop(index))
    index, part = np.array(slots, np.int32).reshape(-1, 2).T
    return index, part

  def add(self, batch: Batch, step: int) -> dict[str, float]:
    """Takes the groups of a landed batch apart; returns numbers for the log. Source: arXiv:2503.14476 (DAPO)."""
    index_P = np.asarray(batch.prompts.index_P)
    real_P = (np.asarray(batch.rollout.length_B).reshape(len(index_P), -1) > 0).any(1)
    unmet = 0
    for index in dict.fromkeys(index_P.tolist()):
      landed = _slots(batch, np.flatnonzero((index_P == index) & real_P))
      earlier = self.lacking.pop(index, None)
      if earlier is not None:  # also where nothing came of its top-ups
        self._queue(Group(_joined([earlier.batch, landed]), earlier.step))
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
    """A full batch, or `empty` where there is none; the oldest go first, and what does not fit stays.

    After `patience` calls without one, the batch is learned with what there is. Source: arXiv:2503.14476 (DAPO;
    its rounds of sampling are calls of the program here, and its surplus is kept).
    """
    young = [group for group in self.queue if step - group.step <= self.rule.max_age]
    dropped, self.calls = len(self.queue) - len(young), self.calls + 1
    taken, rest, room, there = [], [], self.P, set()
    for group in young:
      index_P = group.batch.prompts.index_P
      # Two visits to a prompt are two groups: one batch would take them for one.
      fits = len(index_P) <= room and int(index_P[0]) not in there
      (taken if fits else rest).append(group)
      there.add(int(index_P[0]))
      room -= len(index_P) if fits else 0
    short = room > 0 and all(len(group.batch.prompts.index_P) <= room for group in rest)
    told = {'collect/dropped': dropped, 'collect/short': 0}
    if short and self.calls < self.rule.patience:
      self.queue = young
      return empty, told | {'collect/queued': len(young)}
    if short:
      logging.warning(
        'config.replay.collect.patience=%d calls gave %d of %d slots worth learning from; that batch is learned short.',
        self.rule.patience, self.P - room, self.P,
      )  # fmt: skip
    self.queue, self.calls = rest, 0
    told |= {'collect/queued': len(rest), 'collect/short': int(short)}
    blank = _slots(empty, np.arange(room))
    # No prompt of the data: a group is told by its number.
    blank = blank._replace(prompts=blank.prompts._replace(index_P=np.full(room, -1, np.int32)))
    return _joined([*(group.batch for group in taken), blank]), told

  def state_dict(self) -> dict:
    """For the checkpoint. Source: none."""
    groups = [*self.queue, *self.lacking.values()]
    told = [dict(group._asdict(), batch=_plain(group.batch)) for group in groups]
    return dict(calls=self.calls, queued=len(self.queue), groups=told)

  def load_state_dict(self, state: dict) -> None:
    """Back from `state_dict`. Source: none."""
    groups = [Group(**dict(told, batch=_batch(told['batch']))) for told in state['groups']]
    self.calls, self.queue = state['calls'], groups[: state['queued']]
    self.lacking = {int(g.batch.prompts.index_P[0]): g for g in groups[state['queued'] :]}


def none() -> Rule | None:
  """Every landed batch is learned as it is. Source: none."""
  return None


def mixed(*, patience: int = 10, max_age: int = 4) -> Rule:
  """Groups whose scores are all equal are left out, and a batch waits until the others fill it.

  A call without a full batch samples with the weights as they are, up to `patience` of them. What is too much waits
  for the next batch, at most `max_age` calls. Source: arXiv:2503.14476 (DAPO: up to 10 rounds; surplus discarded).
  """
  _at_least('patience', patience, 1)
  _at_least('max_age', max_age, 0)
  return Rule(lambda mixed: mixed, lambda k, n: 0, patience, max_age, 0, 1)


def dars(
  *, top_ups: int, schedule: str = 'ET', most: int = 4, patience: int = 10, max_age: int = 4
) -> Rule:
  """Prompts of which fewer than half were right get more rollouts, in slots of a later call, until all weigh the same.

  With p = k/n, and 0.5/n where that is more: ET ⌈n(1 − 2p)² / (4p(1 − p))⌉ more, HW ⌈n(1 − 2p) / (2p)⌉; as many slots
  of `config.rollouts` as hold them, `most` a prompt and `top_ups` a call. All of a prompt's rows are one group, and
  groups whose scores are all equal are left out. Source: arXiv:2508.13755 (DARS; n = 8, at most 32 rollouts for
  ET and 64 for HW, which is most = 4 and 8).
  """
  rules = dict(ET=_equal_treatment, HW=_hardness_weighted)
  if schedule not in rules:
    raise UserError(
      f'config.replay.collect.schedule={schedule!r} must be one of: {", ".join(rules)}.'
    )
  _at_least('top_ups', top_ups, 1)
  _at_least('most', most, 2)
  _at_least('patience', patience, 1)
  _at_least('max_age', max_age, 1)
  return Rule(lambda mixed: mixed, rules[schedule], patience, max_age, top_ups, most)


def _equal_treatment(k: float, n: int) -> int:
  p = max(k, 0.5) / n
  return math.ceil(n * (1 - 2 * p) ** 2 / (4 * p * (1 - p))) if p < 0.5 else 0


def _hardness_weighted(k: float, n: int) -> int:
  p = max(k, 0.5) / n
  return math.ceil(n * (1 - 2 * p) / (2 * p)) if p < 0.5 else 0


def _at_least(name: str, value: int, least: int) -> None:
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


_NESTED = ('prompts', 'rollout', 'demo')


def _map(f: Callable, batch: Batch, *others: Batch) -> Batch:
  """f(a batch's array, that of the others, …) for all arrays, of prompts and of rows."""
  each = lambda *parts: None if parts[0] is None else f(*map(np.asarray, parts))  # noqa: E731
  told = {}
  for name in Batch._fields:
    parts = [getattr(b, name) for b in (batch, *others)]
    nested = name in _NESTED and parts[0] is not None
    told[name] = type(parts[0])(*map(each, *parts)) if nested else each(*parts)
  return Batch(**told)


def _slots(batch: Batch, slot_N: np.ndarray) -> Batch:
  """These slots of a batch, with their rows."""
  P = len(batch.prompts.index_P)

  def cut(x):
    if not len(x):
      return x
    by_slot = x.reshape(P, len(x) // P, *x.shape[1:])[slot_N]
    return by_slot.reshape(len(slot_N) * (len(x) // P), *x.shape[1:])

  return _map(cut, batch)


def _joined(batches: list[Batch]) -> Batch:
  return _map(lambda *parts: np.concatenate(parts), *batches)


def _plain(batch: Batch) -> dict:
  """A batch as nested dicts of arrays; what is None is left out."""
  told = {}
  for name, value in batch._asdict().items():
    if value is not None:
      told[name] = value if not hasattr(value, '_asdict') else _plain(value)
  return told


def _batch(told: dict) -> Batch:
  kinds = dict(zip(_NESTED, (Prompts, Rollout, Rollout), strict=True))
  return Batch(**{n: kinds[n](**x) if n in kinds else x for n, x in told.items()})

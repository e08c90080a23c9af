"""A buffer of graded groups of recent steps, bounded in bytes, and its replay beside fresh groups."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import numpy as np

from jaxrl_llm.replay import group_batches
from jaxrl_llm.types import Batch, JsonObject, Prompts, Rollout, Settings, UserError

Record = TypeVar('Record', Prompts, Rollout)
# Memory of an array beside its numbers. Tests measure that the sum is an upper bound.
_ARRAY_BYTES = 160


class StoredGroup(NamedTuple):
  """The rows of one prompt, as graded: everything that the update reads."""

  batch: Batch  # one slot; columns of padding are cut off
  step: int  # the step that landed it

  @property
  def prompt(self) -> int:
    """The prompt's row in the data set."""
    return int(self.batch.prompts.index_P[0])


class RolloutBuffer:
  """The newest group of each prompt, oldest first, in at most `memory_mb` MiB of the host's memory."""

  def __init__(self, max_age: float, memory_mb: int):
    """Groups older than `max_age` steps are dropped, then the oldest ones that do not fit."""
    self.max_age, self._max_bytes = max_age, memory_mb * 2**20
    self.groups: dict[int, StoredGroup] = {}  # by prompt; the newest last
    self.bytes = 0

  def add(self, group: StoredGroup) -> None:
    """Stores a group in place of its prompt's earlier one, and drops the oldest that do not fit."""
    self.drop(group.prompt)
    self.groups[group.prompt] = group
    self.bytes += _size(group.batch)
    while self.bytes > self._max_bytes:
      self.drop(next(iter(self.groups)))

  def drop_old(self, step: int) -> None:
    """Drops the groups that are more than `max_age` steps old at `step`."""
    for prompt in [p for p, g in self.groups.items() if step - g.step > self.max_age]:
      self.drop(prompt)

  def draw(self, count: int, seed: int, step: int, without: set[int]) -> list[StoredGroup]:
    """Up to `count` groups, uniformly without replacement, by (seed, step); none of the prompts `without`."""
    groups = [group for prompt, group in self.groups.items() if prompt not in without]
    random = np.random.default_rng((seed, 7, step))
    return [groups[i] for i in random.permutation(len(groups))[:count]]

  def drop(self, prompt: int) -> None:
    """Drops the group of a prompt, if there is one."""
    group = self.groups.pop(prompt, None)
    self.bytes -= 0 if group is None else _size(group.batch)

  def metrics(self) -> dict[str, float]:
    """Its size."""
    return {'replay/groups': len(self.groups), 'replay/memory_mb': self.bytes / 2**20}

  def clear(self) -> None:
    """Drops all groups."""
    self.groups, self.bytes = {}, 0

  def state_dict(self) -> list[JsonObject]:
    """State for the checkpoint, the oldest group first."""
    return [dict(g._asdict(), batch=group_batches.plain(g.batch)) for g in self.groups.values()]

  def load_state_dict(self, state: list[Settings]) -> None:
    """Restore from `state_dict`."""
    self.clear()
    for group in state:
      self.add(StoredGroup(group_batches.from_plain(group['batch']), int(group['step'])))


class RolloutReplay:
  """Groups of recent steps in slots of their own, behind those sampled in this step. arXiv:2506.05316 (DOTS)."""

  rows = 0  # that join the groups of fresh rows

  def __init__(self, share: float, buffer: RolloutBuffer, steps: float = math.inf):
    """`share` of a batch's slots are for replayed groups, in the first `steps` steps of a run."""
    self.share, self.buffer, self.steps = share, buffer, steps

  def slots(self, prompts: int) -> int:
    """Slots for replayed groups beside those of `prompts` sampled ones. Raises UserError where there is none."""
    return slots_of_share(self.share, prompts)

  def join(self, batch: Batch, seed: int, step: int) -> Batch:
    """Adds slots behind the fresh ones: stored groups drawn by (seed, step), then empty slots.

    Their rows keep the log-probs and weight versions of their sampling. A prompt of the fresh slots is not drawn, so
    that a batch has one group a prompt. (The paper's code may draw it.)
    """
    batch = batch._replace(success_B=None)  # of the host alone, and not stored
    fresh = np.asarray(batch.prompts.index_P)
    self.buffer.drop_old(step)
    count = self.slots(len(fresh))
    replays = count if step < self.steps else 0
    drawn = self.buffer.draw(replays, seed, step, set(fresh.tolist()))
    empty = group_batches.empty_slots(batch, count - len(drawn))
    return group_batches.joined([batch, *(padded(g.batch, batch) for g in drawn), empty])

  def keep(self, batch: Batch, mixed_P: np.ndarray, step: int) -> None:
    """Stores the mixed groups of a graded batch; an all-right or all-wrong one teaches nothing."""
    for slot in np.flatnonzero(mixed_P):
      group = cut(group_batches.slots(batch._replace(success_B=None), np.array([slot])))
      self.buffer.add(StoredGroup(group, step))

  def metrics(self, batch: Batch, fresh: int) -> dict[str, float]:
    """Metrics of a batch with `fresh` sampled slots, and of the buffer."""
    length_PxG = np.asarray(batch.rollout.length_B).reshape(len(batch.prompts.index_P), -1)
    return {'replay/rows': int((length_PxG[fresh:] > 0).sum())} | self.buffer.metrics()

  def state_dict(self) -> JsonObject:
    """State for the checkpoint."""
    return dict(groups=self.buffer.state_dict())

  def load_state_dict(self, state: Settings) -> None:
    """Restore from `state_dict`."""
    self.buffer.load_state_dict(state['groups'])


def row_metrics(batch: Batch, buffer: RolloutBuffer) -> dict[str, float]:
  """Metrics of a batch with replayed rows in the slots of sampled ones, and of the buffer they are from."""
  if batch.replayed_B is None:
    return {}
  length_B = batch.rollout.length_B[batch.replayed_B > 0]
  return {'replay/rows': int((length_B > 0).sum())} | buffer.metrics()


def behind(rows: Batch, count: int) -> Batch:
  """Rows without their first `count` tokens, for a prompt that ends with these."""
  rollout = _columns(lambda _, x: x[:, count:], rows.rollout)
  return rows._replace(rollout=rollout._replace(length_B=np.asarray(rollout.length_B) - count))


def slots_of_share(share: float, prompts: int) -> int:
  """Slots that are `share` of a batch, beside `prompts` sampled groups. Raises UserError where there is none."""
  count = round(prompts * share / (1 - share))
  if not count:
    raise UserError(
      f'config.replay.reuse.share={share} leaves no slot for replayed groups beside config.prompts={prompts} sampled '
      'ones; raise one of them.'
    )
  return count


def _columns(f: Callable[[str, np.ndarray], np.ndarray], record: Record) -> Record:
  """A record with f(axis, x) for its arrays with a token axis, which is 'L' for prompts and 'T' for completions."""
  fields = {}
  for name, x in record._asdict().items():
    axes = name.rsplit('_', 1)[-1].split('x')
    if x is not None and len(axes) > 1 and axes[1] in 'LT':
      fields[name] = f(axes[1], x)
  return record._replace(**fields)


def cut(batch: Batch) -> Batch:
  """A copy without the columns that are padding in all rows."""
  width = dict(L=int(batch.prompts.length_P.max()), T=int(batch.rollout.length_B.max()))
  narrow = lambda axis, x: x[:, : width[axis]]  # noqa: E731
  prompts, rollout = _columns(narrow, batch.prompts), _columns(narrow, batch.rollout)
  # Copies: a view would keep the padding in memory.
  return group_batches.mapped(np.array, batch._replace(prompts=prompts, rollout=rollout))


def padded(group: Batch, like: Batch) -> Batch:
  """The inverse of `cut`, with the widths of `like`: padding is 0."""
  width = dict(L=like.prompts.tokens_PxL.shape[1], T=like.rollout.tokens_BxT.shape[1])

  def pad(axis: str, x: np.ndarray) -> np.ndarray:
    return np.pad(x, [(0, 0), (0, width[axis] - x.shape[1])] + [(0, 0)] * (x.ndim - 2))

  return group._replace(prompts=_columns(pad, group.prompts), rollout=_columns(pad, group.rollout))


def _size(batch: Batch) -> int:
  """Bytes of a group in memory."""
  arrays: list[np.ndarray] = []
  group_batches.mapped(lambda x: arrays.append(x) or x, batch)
  return sum(x.nbytes + _ARRAY_BYTES for x in arrays)

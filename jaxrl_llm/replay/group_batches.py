"""Batches of single groups on the host: cut out of a batch, joined, and as plain dicts for the checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from jaxrl_llm.types import Batch, JsonObject, Prompts, Rollout, Settings

SAME = 1e-6  # a smaller difference of rewards is one of rounding
_NESTED = ('prompts', 'rollout', 'demo')


def mapped(f: Callable[..., np.ndarray], batch: Batch, *others: Batch) -> Batch:
  """f(array of the first batch, of the second, …) for all arrays of prompts and rows."""

  def each(*parts: Any) -> Any:
    return None if parts[0] is None else f(*map(np.asarray, parts))

  fields = {}
  for name in Batch._fields:
    parts = [getattr(b, name) for b in (batch, *others)]
    nested = name in _NESTED and parts[0] is not None
    fields[name] = type(parts[0])(*map(each, *parts)) if nested else each(*parts)
  return Batch(**fields)


def slots(batch: Batch, slot_N: np.ndarray) -> Batch:
  """A batch of these slots and their rows."""
  P = len(batch.prompts.index_P)

  def cut(x: np.ndarray) -> np.ndarray:
    if not len(x):
      return x
    by_slot = x.reshape(P, len(x) // P, *x.shape[1:])[slot_N]
    return by_slot.reshape(len(slot_N) * (len(x) // P), *x.shape[1:])

  return mapped(cut, batch)


def rows(batch: Batch, row_N: np.ndarray) -> Batch:
  """A batch of one slot with these of its rows, without its demonstration."""
  return _of_rows(batch, lambda x: x[row_N])


def with_rows(batch: Batch, count: int) -> Batch:
  """A batch of one slot with `count` rows: its own, then rows of no tokens."""

  def pad(x: np.ndarray) -> np.ndarray:
    return np.pad(x, [(0, count - len(x))] + [(0, 0)] * (x.ndim - 1))

  return _of_rows(batch, pad)


def without_log_probs(rows: Batch) -> Batch:
  """Rows as replayed ones: without log-probs and versions of weights, with weight 1, `replayed_B` set."""
  rollout = rows.rollout._replace(
    logp_BxT=np.zeros_like(rows.rollout.logp_BxT),
    version_BxT=np.full_like(rows.rollout.version_BxT, -1),
    weight_B=np.ones_like(rows.rollout.weight_B),
  )
  return rows._replace(rollout=rollout, replayed_B=np.ones_like(rows.reward_B))


def spliced(first: Batch, start: int, rest: Batch) -> Batch:
  """A row of the first `start` tokens of one row and the tokens of another, each as it was recorded.

  All else, such as the reward, is that of `rest`. Both are batches of one row with equally many columns.
  """
  width, fields = rest.rollout.tokens_BxT.shape[1], {}
  for name, x in rest.rollout._asdict().items():
    axes = name.rsplit('_', 1)[-1].split('x')
    if isinstance(x, np.ndarray) and axes[1:2] == ['T']:
      before = getattr(first.rollout, name)[:, :start]
      fields[name] = np.concatenate([before, x], axis=1)[:, :width]
  length_B = (rest.rollout.length_B + start).astype(rest.rollout.length_B.dtype)
  return rest._replace(rollout=rest.rollout._replace(length_B=length_B, **fields))


def with_row(group: Batch, at: int, row: Batch) -> Batch:
  """A batch of one slot with `row`, a batch of one row, in place of the one `at`; prompt and demonstration stay."""
  order = np.arange(1, 1 + len(group.reward_B))
  order[at] = 0
  whole = one_slot([row._replace(demo=None), group])
  return rows(whole, order)._replace(demo=group.demo)


def in_copies(batch: Batch, copies_B: np.ndarray) -> Batch:
  """The batch with weight = copies · Σ|y| / Σ copies·|y|.

  With `aggregation=token_mean` the loss is the mean over the tokens of a batch that has each row so often, with the
  advantages of whole groups.
  """
  length_B, weight_B = (np.asarray(x) for x in (batch.rollout.length_B, batch.rollout.weight_B))
  scale = length_B.sum() / max((copies_B * length_B).sum(), 1)
  weight_B = (weight_B * copies_B * scale).astype(weight_B.dtype)
  return batch._replace(rollout=batch.rollout._replace(weight_B=weight_B))


def one_slot(batches: list[Batch]) -> Batch:
  """The rows of several batches of one slot as one slot, with the prompt of the last one."""
  return joined(batches)._replace(prompts=batches[-1].prompts)


def beside(batch: Batch, more: Batch) -> Batch:
  """Slots with the rows of both batches, whose slots are of the same prompts; fields of the first."""
  P = len(batch.prompts.index_P)

  def both(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    # Sizes are explicit because reshape with −1 fails for arrays of no features.
    by_slot = [x.reshape(P, len(x) // P, *x.shape[1:]) for x in (a, b)]
    whole = np.concatenate(by_slot, axis=1)
    return whole.reshape(len(a) + len(b), *whole.shape[2:])

  whole = mapped(both, batch._replace(demo=None), more)
  return whole._replace(prompts=batch.prompts, demo=batch.demo)


def _of_rows(batch: Batch, f: Callable[[np.ndarray], np.ndarray]) -> Batch:
  each = lambda x: None if x is None else f(np.asarray(x))  # noqa: E731
  fields = {name: each(x) for name, x in batch._asdict().items() if name not in _NESTED}
  return batch._replace(rollout=Rollout(*map(each, batch.rollout)), demo=None, **fields)


def empty_slots(like: Batch, count: int) -> Batch:
  """`count` slots of no tokens, with the fields, shapes and types of `like`."""
  first = slots(like, np.zeros(count, int))
  empty = mapped(np.zeros_like, first)
  prompts = first.prompts._replace(
    tokens_PxL=empty.prompts.tokens_PxL,
    length_P=empty.prompts.length_P,
    # No prompt of the data, so that empty slots form no group with others.
    index_P=np.full(count, -1, np.int32),
  )
  rollout = empty.rollout._replace(weight_B=np.ones_like(empty.rollout.weight_B))
  return empty._replace(prompts=prompts, rollout=rollout)


def joined(batches: list[Batch]) -> Batch:
  """All slots of the batches, in order; fields that are None in the first must be so in all."""
  return mapped(lambda *parts: np.concatenate(parts), *batches)


def plain(batch: Any) -> JsonObject:
  """A batch or its part as nested dicts of arrays, without None."""
  fields = {}
  for name, value in batch._asdict().items():
    if value is not None:
      fields[name] = value if not hasattr(value, '_asdict') else plain(value)
  return fields


def from_plain(fields: Settings) -> Batch:
  """The inverse of `plain`."""
  kinds = dict(zip(_NESTED, (Prompts, Rollout, Rollout), strict=True))
  return Batch(**{n: kinds[n](**x) if n in kinds else x for n, x in fields.items()})

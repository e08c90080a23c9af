"""Records of the curriculum: what its stages are given, what a step told, and what is proposed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.types import UserError

State = dict[str, np.ndarray]  # what a stage has learned: saved, restored, never changed in place


Index = np.ndarray | slice  # which prompts
Mean = Callable[[], np.ndarray]


class DatasetInfo(NamedTuple):
  """Known before any rollout."""

  size: int  # prompts, N
  group: int  # rollouts of a prompt in a step, on average
  kind_N: np.ndarray  # int32, which are alike
  kind_decay: float  # of a kind's evidence, per visit
  columns: Mapping[str, Any]  # arrays [N] or [N, F] that rows bring with them, by name


class HintedPosteriors(NamedTuple):
  """Prompts that would be asked with a hint: what is known of their success then."""

  index: np.ndarray  # int [H], distinct
  alpha: np.ndarray  # float [H]
  beta: np.ndarray


class Proposal(NamedTuple):
  """The prompts of a step, with what the posterior expected of them."""

  index: np.ndarray  # int32 [slots], distinct
  p_mean: np.ndarray  # float64 [slots], expected success rate
  p_mixed: np.ndarray  # float64 [slots], probability that the group is mixed
  worth: np.ndarray  # float64 [slots], the utility it was chosen by; nan where it was drawn
  mean_worth: float  # of all candidates; nan where all were drawn
  why: tuple[
    str, ...
  ]  # picked, audit (drawn to test beliefs), reference (drawn for the features' sake)
  # candidates that the step uses up, for `Curriculum.accept`: the stream goes on behind them
  used: np.ndarray = np.zeros(0, np.int64)


class StepEvidence(NamedTuple):
  """One step's evidence, in order of prompt numbers."""

  step: int  # steps told before
  index_V: np.ndarray
  right_V: np.ndarray  # k, a real number in [0, n]
  count_V: np.ndarray  # n, above 0
  first_V: np.ndarray  # bool, never visited before


class PriorPool(NamedTuple):
  """Made by a function of share.py."""

  state: State  # as it begins
  prior: Callable[[State, Index], np.ndarray]  # (state, index) → float32 [2, I] pseudo-counts
  # (state, seen) → state, and float32 [2, N] where every prompt gains evidence, the seen counts included
  learn: Callable[[State, StepEvidence], tuple[State, np.ndarray | None]]
  reference: Callable[[int], bool] = lambda step: False  # steps whose prompts are drawn evenly


class EligibilityRule(NamedTuple):
  """Made by a function of gate.py."""

  state: State
  # (state, index, visits, how to get the posterior mean) → probability [I] of being barred; None: of nobody
  barred: Callable[[State, Index, np.ndarray, Mean], np.ndarray] | None = None
  learn: Callable[[State, StepEvidence], State] = lambda state, seen: state
  audit: float = 0.0  # share of slots that goes to the barred, or where there are none to anyone


def column(dataset: DatasetInfo, field: str, name: str, low: float, high: float) -> np.ndarray:
  """The column that config.curriculum.<field> names, float32, its values checked against [low, high].

  Raises UserError where rows lack it, or hold something else. Source: none.
  """
  told = f'config.curriculum.{field}={name!r}'
  if name not in dataset.columns:
    raise UserError(f'{told} is no field of the data; name one that every row has.')
  try:
    values = np.asarray(dataset.columns[name], np.float32)
  except (TypeError, ValueError) as error:
    raise UserError(f'{told} does not hold numbers, as many in every row ({error}).') from error
  if len(values) != dataset.size:
    raise ValueError(f'{told} has {len(values)} rows, not {dataset.size}')
  bad = ~(np.isfinite(values) & (values >= low) & (values <= high)).reshape(dataset.size, -1).all(1)
  if bad.any():
    row = int(np.flatnonzero(bad)[0])
    bounds = 'finite numbers' if low == -np.inf else f'numbers from {low} to {high}'
    raise UserError(f'{told}: row {row} holds {values[row]!r}; all rows must hold {bounds}.')
  return values

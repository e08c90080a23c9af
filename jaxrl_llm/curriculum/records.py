"""Records of the curriculum: inputs and results of its stages, the evidence of a step, proposals, saved states."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jaxrl_llm.types import Settings, UserError

if TYPE_CHECKING:
  from jaxrl_llm.curriculum.prompt_features import PromptFeatures

State = dict[str, np.ndarray]  # of a stage: saved, restored, never changed in place
Index = np.ndarray | slice  # of prompts
Mean = Callable[[], np.ndarray]  # computes posterior means on demand


class DatasetInfo(NamedTuple):
  """Properties of the data that are known before any rollout."""

  size: int  # prompts, N
  group: int  # rollouts of a prompt in a step, on average
  kind_N: np.ndarray  # int32, the kind of each prompt
  kind_decay: float  # of a kind's evidence, per visit
  columns: Settings  # fields of the rows by name, arrays [N] or [N, F]
  seed: int = 0

  @property
  def kinds(self) -> int:
    """The number of kinds."""
    return int(self.kind_N.max(initial=0)) + 1


class HintedPosteriors(NamedTuple):
  """Posteriors of prompts that would get a hint, with that hint."""

  index: np.ndarray  # int [H], distinct
  alpha: np.ndarray  # float [H]
  beta: np.ndarray


class Proposal(NamedTuple):
  """The prompts of a step, with the predictions of the posterior."""

  index: np.ndarray  # int32 [slots], distinct
  p_mean: np.ndarray  # float64 [slots], expected success rate
  p_mixed: np.ndarray  # float64 [slots], probability that the group is mixed
  worth: np.ndarray  # float64 [slots], the utility; nan for a prompt drawn uniformly
  mean_worth: float  # mean utility of all candidates; nan where all prompts were drawn uniformly
  why: tuple[str, ...]  # picked by utility, audit, or reference (of `prior_pooling.kernel`)
  # candidates that the step consumes: `Curriculum.accept` moves the stream past them
  used: np.ndarray = np.zeros(0, np.int64)


class StepEvidence(NamedTuple):
  """The evidence of one step, in the order of prompt indices."""

  step: int  # number of steps observed before
  index_V: np.ndarray
  right_V: np.ndarray  # k, a real number in [0, n]
  count_V: np.ndarray  # n, above 0
  first_V: np.ndarray  # bool, the first visit of the prompt
  graded_V: np.ndarray  # Σ x(1 − x) over the scores x of the group, 0 for binary ones


class PriorPool(NamedTuple):
  """The result of a function of prior_pooling.py."""

  state: State  # initial
  prior: Callable[[State, Index], np.ndarray]  # (state, index) → float32 [2, I] pseudo-counts
  # (state, evidence) → state, and None or float32 [2, N], gains of all prompts that include the evidence
  learn: Callable[[State, StepEvidence], tuple[State, np.ndarray | None]]
  # steps whose prompts are drawn uniformly; None: no step
  reference: Callable[[int], bool] | None = None
  features: PromptFeatures | None = None  # hidden states that `prior` and `learn` read; None: none


class EligibilityRule(NamedTuple):
  """The result of a function of eligibility.py."""

  state: State  # initial
  # (state, index, visits, posterior means) → probability [I] of being barred; None: no prompt is barred
  barred: Callable[[State, Index, np.ndarray, Mean], np.ndarray] | None = None
  learn: Callable[[State, StepEvidence], State] | None = None  # None: the state does not change
  audit: float = 0.0  # share of slots for barred prompts, or for any where none are barred


def column(dataset: DatasetInfo, field: str, name: str, low: float, high: float) -> np.ndarray:
  """The column that config.curriculum.<field> names, float32.

  Raises UserError where rows lack it or hold other values than numbers in [low, high].
  """
  setting = f'config.curriculum.{field}={name!r}'
  if name not in dataset.columns:
    raise UserError(f'{setting} is not a field of the data; name one that every row has.')
  try:
    values = np.asarray(dataset.columns[name], np.float32)
  except (TypeError, ValueError) as error:
    raise UserError(f'{setting} does not hold numbers, as many in every row ({error}).') from error
  if len(values) != dataset.size:
    raise ValueError(f'{setting} has {len(values)} rows, not {dataset.size}')
  bad = ~(np.isfinite(values) & (values >= low) & (values <= high)).reshape(dataset.size, -1).all(1)
  if bad.any():
    row = int(np.flatnonzero(bad)[0])
    bounds = 'finite numbers' if low == -np.inf else f'numbers from {low} to {high}'
    raise UserError(f'{setting}: row {row} holds {values[row]!r}; all rows must hold {bounds}.')
  return values


def checked_kinds(kind: np.ndarray | None, size: int) -> np.ndarray:
  """int32 [size], the kind of each prompt; all are of kind 0 where none are given. Raises ValueError."""
  kind_N = np.zeros(size, np.int32) if kind is None else np.asarray(kind, np.int32)
  if kind_N.shape != (size,) or kind_N.min(initial=0) < 0:
    raise ValueError(f'kind must hold {size} codes of at least 0, not {kind_N.shape} of them')
  return kind_N


def domain_codes(fn: str, dataset: DatasetInfo) -> tuple[list[str], np.ndarray]:
  """The names of the domains and the domain of each prompt; one unnamed domain where they are not used."""
  if fn == 'none':
    return [''], np.zeros(0, np.int32)
  if 'source' not in dataset.columns:
    raise UserError(
      f'config.curriculum.domain_mix.fn={fn!r} needs the source of every prompt; pass it in `columns`.'
    )
  names, codes = np.unique(np.asarray(dataset.columns['source']), return_inverse=True)
  return names.tolist(), codes.astype(np.int32)


# In saved states, but not in those of older checkpoints.
_LATER = ('accepted', 'graded_log_exponent', 'graded_information', 'graded_found')


def checked_state(saved: State, now: State) -> State:
  """A saved state with the types of the state `now`, and its arrays where older checkpoints have none.

  Raises UserError for other arrays or other sizes.
  """
  saved = {name: now[name] for name in _LATER} | saved
  if now.keys() != saved.keys():
    names = ', '.join(sorted(now.keys() ^ saved.keys()))
    raise UserError(
      f'the saved curriculum has other stages ({names}); restore config.curriculum, or start another --workdir.'
    )
  items = dict(evidence='prompts', share_pooled='kinds of prompts', done='domains')
  items |= dict(graded_found='kinds of prompts')
  for name in now.keys() & items.keys():
    found, expected = np.shape(saved[name])[-1], now[name].shape[-1]
    if found != expected:
      raise UserError(
        f'the saved curriculum has {found} {items[name]}, not {expected}; config.data changed: '
        'restore it, or start another --workdir.'
      )
  return {name: np.array(array, now[name].dtype) for name, array in saved.items()}

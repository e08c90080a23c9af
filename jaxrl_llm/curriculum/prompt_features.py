"""Features of prompts: hidden states of the policy at the last prompt token, in a few float16 numbers a prompt.

The projection is fixed by the first states: their mean is removed, and the principal components of largest variance are
scaled to unit variance. A random projection of a state of hundreds of features would keep a small share of each. The
log-odds of the known answer, where they are read, are kept beside them as they are, or alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from jaxrl_llm.curriculum import answer_wording
from jaxrl_llm.curriculum.records import State

STATES = 64  # that the projection is fitted to; 256 lower the log loss by 2 % at most, and the first step encodes them
_LARGEST = 60000.0  # finite in float16
_LARGEST_ODDS = 10.0  # of an answer that is never or always given


class PromptFeatures:
  """Features of `size` prompts. Arrays of `state` change in place, as copies of them would take most of a step."""

  def __init__(
    self,
    size: int,
    dimensions: int,
    multiple: int,
    seed: int,
    answer_tokens: int = 0,
    considered: int = 1,
  ):
    """Each step encodes `multiple` times as many prompts as it has, and its own unless the last step did.

    They are chosen from `considered` times as many. K features of the hidden state: `dimensions`, which may be 0 with
    `answer_tokens`: the log-odds of the answer, which is cut at so many tokens, are one more value of a prompt.
    """
    self.multiple, self.answer_tokens, self._considered = multiple, answer_tokens, considered
    self.latest = np.zeros(0, np.int64)  # prompts of the last `put`
    self._seed = seed
    self.state: State = dict(
      values=np.zeros((size, dimensions + (answer_tokens > 0)), np.float16),
      known=np.zeros(size, bool),
      center=np.zeros(0, np.float32),  # [D], empty until the projection is fitted
      basis=np.zeros((0, dimensions), np.float32),  # [D, K]
      newest=np.zeros(0, np.int64),  # prompts of the last `put`, without the step's own
      wordings=answer_wording.none(),  # of right completions; none where answers are not read
    )

  @property
  def ready(self) -> bool:
    """Whether the projection is fitted, or none is needed."""
    return len(self.state['center']) > 0 or not self._dimensions

  @property
  def idle(self) -> bool:
    """Whether encoding is of no use yet: odds alone are kept, and the words of answers are unknown."""
    return not self._dimensions and answer_wording.commonest(self.state['wordings']) is None

  @property
  def _dimensions(self) -> int:
    return self.state['basis'].shape[1]

  def are_new(self, index_P: np.ndarray) -> bool:
    """Whether the last step encoded all these prompts, of which none was its own."""
    return bool(np.isin(index_P, self.state['newest']).all())

  def others(self, step: int, block: int) -> np.ndarray:
    """The prompts that a step may encode besides its own `block` of them; over steps, each prompt in turn.

    A multiple of `block`, or all prompts. Until the projection is fitted, they are enough of them to fit it.
    """
    size = len(self.state['known'])
    first = -(-min(STATES, size) // block) * block
    least = self.multiple * block
    count = max(least, min(least * self._considered, size))
    start, count = (first + step * count, count) if self.ready else (0, first)
    # A stride without a common divisor with the number of prompts needs no stored order.
    stride = int(np.random.default_rng((self._seed, 2)).integers(size)) or 1
    while math.gcd(stride, size) > 1:
      stride += 1
    return (start + np.arange(count)) % size * stride % size

  def fit(self, states_MxF: np.ndarray) -> None:
    """Fits the projection. Fewer states than features leave features of 0."""
    hidden_MxD, _ = self._parts(np.asarray(states_MxF, np.float64))
    center_D, basis_DxK = _principal(hidden_MxD, self._dimensions)
    self.state['center'] = center_D.astype(np.float32)
    self.state['basis'] = basis_DxK.astype(np.float32)

  def put(
    self, index_M: np.ndarray, states_MxF: np.ndarray, own_P: np.ndarray | Sequence[int] = ()
  ) -> None:
    """Stores the features of these prompts; for one that occurs twice, the states are equal.

    `own_P`: the prompts of the step, encoded in it or before. Odds of an unknown answer are nan.
    """
    hidden_MxD, odds_MxA = self._parts(np.asarray(states_MxF, np.float32))
    if not self._dimensions:
      hidden_MxD = hidden_MxD[:, :0]
    values_MxK = (hidden_MxD - self.state['center']) @ self.state['basis']
    values_MxK = np.clip(values_MxK, -_LARGEST, _LARGEST)
    odds_MxA = np.clip(odds_MxA, -_LARGEST_ODDS, _LARGEST_ODDS)
    self.state['values'][index_M] = np.concatenate([values_MxK, odds_MxA], axis=1)
    self.state['known'][index_M] = True
    self.latest = np.unique(index_M)
    self.state['newest'] = np.setdiff1d(index_M, own_P)

  def put_nothing(self) -> None:
    """Of a step that encoded nothing: what an earlier one encoded would be chosen again and again."""
    self.latest, self.state['newest'] = self.latest[:0], self.state['newest'][:0]

  @property
  def phrase(self) -> Callable[[str, str], str]:
    """(question, answer) → the answer in the words of right completions; '' as long as these are unknown."""
    wording = answer_wording.commonest(self.state['wordings'])
    return wording.phrase if wording is not None else lambda question, answer: ''

  def observe(self, groups: Iterable[answer_wording.Group]) -> None:
    """Learns the words from right completions of a step that an end token ended."""
    self.state['wordings'] = answer_wording.updated(self.state['wordings'], groups)

  def with_odds(self) -> float:
    """The share of the prompts of the last `put` whose answer has odds."""
    odds = self._parts(self.state['values'][self.latest])[1]
    return float(np.isfinite(odds).mean()) if odds.size else 0.0

  def newest(self, free_N: np.ndarray, slots: int) -> np.ndarray:
    """bool [N]: the free prompts of the last `put` besides the step's own; all free ones where these are too few."""
    newest_N = np.zeros_like(free_N)
    newest_N[self.state['newest']] = True
    newest_N &= free_N
    return newest_N if newest_N.sum() >= slots else free_N

  def load(self, state: State) -> None:
    """Continues with the arrays of a restored state."""
    self.state, self.latest = state, np.zeros(0, np.int64)

  def _parts(self, states_MxF: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Hidden states [M, D] and the odds of answers [M, 1], or [M, 0] where they are not read."""
    width = states_MxF.shape[1] - (self.answer_tokens > 0)
    return states_MxF[:, :width], states_MxF[:, width:]

  def design(self, index: np.ndarray | slice) -> np.ndarray:
    """float32 [I, K + 1], or [I, K + 2] with the odds, which may be nan: the values and a constant."""
    values = self.state['values'][index].astype(np.float32)  # at once: row by row is slower
    design = np.ones((len(values), values.shape[1] + 1), np.float32)
    design[:, :-1] = values
    return design


def _principal(states_MxD: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
  """The mean [D] and `count` principal directions [D, count], for projections of unit variance."""
  center_D = states_MxD.mean(0)
  _, scale, rows = np.linalg.svd(states_MxD - center_D, full_matrices=False)
  basis_DxK = np.zeros((len(center_D), count))
  # Directions without variance among the states have none to be scaled.
  kept = min(int((scale > 1e-6 * max(scale[0], 1e-30)).sum()), count)
  basis_DxK[:, :kept] = rows[:kept].T / scale[:kept] * len(states_MxD) ** 0.5
  return center_D, basis_DxK

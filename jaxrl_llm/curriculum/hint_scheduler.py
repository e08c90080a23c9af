"""The hint of each prompt at a step: a rule of `hint_rules`, and the record of earlier visits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxrl_llm.curriculum.hint_rules import Rule, Visit

_MAX_VISITS = 16  # stored per prompt


class HintScheduler:
  """A rule and the last visits of each prompt, at most 16.

  The share of a prompt depends on its visits alone and is computed when a visit is added, so that the cost of a step
  depends on the visited prompts only. (seed, step, prompt) determine the randomness.
  """

  def __init__(self, rule: Rule, seed: int):
    self.rule, self.seed = rule, seed
    self._clear()

  def _clear(self) -> None:
    self.visits: dict[int, list[Visit]] = {}
    # Prompts 0 to N − 1, where N grows with the largest visited index; nan where not visited.
    self._share_N = np.zeros(0)
    self._counts_Nx2 = np.zeros((0, 2))  # right and wrong counts of the last hinted visit

  def choose(self, index_P: np.ndarray, step: int) -> np.ndarray:
    """The share of its answer to reveal to each prompt at this step, float32 [P]."""
    index_P = np.asarray(index_P, np.int64)
    stored_P = index_P < len(self._share_N)
    share_P = np.full(len(index_P), np.nan)
    share_P[stored_P] = self._share_N[index_P[stored_P]]
    share_P = np.where(np.isnan(share_P), self.rule.share([]), share_P)
    return self._randomized(share_P, index_P, step).astype(np.float32)

  def evidence(self, step: int) -> tuple[np.ndarray, np.ndarray]:
    """(visited prompts that would get a hint at this step, (right, wrong) of their last hinted visit)."""
    visited = np.flatnonzero(self._share_N > 0)
    hinted = visited[self._randomized(self._share_N[visited], visited, step) > 0]
    return hinted, self._counts_Nx2[hinted]

  def observe(
    self, index_P: np.ndarray, share_P: np.ndarray, right_P: np.ndarray, n_P: np.ndarray
  ) -> None:
    """Records the graded groups of distinct prompts, hinted and plain."""
    columns = (x.tolist() for x in (index_P, share_P, right_P, n_P))
    for index, *visit in zip(*columns, strict=True):
      visits = [*self.visits.get(index, []), Visit(*visit)]
      self._record(index, visits[-_MAX_VISITS:])

  def _record(self, index: int, visits: list[Visit]) -> None:
    self.visits[index] = visits
    if (size := len(self._share_N)) <= index:
      more = max(2 * size, index + 1) - size
      self._share_N = np.concatenate([self._share_N, np.full(more, np.nan)])
      self._counts_Nx2 = np.concatenate([self._counts_Nx2, np.zeros((more, 2))])
    last = next((v for v in reversed(visits) if v.share > 0), Visit(0.0, 0, 0))
    self._share_N[index] = self.rule.share(visits)
    self._counts_Nx2[index] = last.right, last.n - last.right

  def _randomized(self, share_P: np.ndarray, index_P: np.ndarray, step: int) -> np.ndarray:
    """Shares after noise and skips; the draw for a prompt does not depend on the other prompts."""
    if not len(index_P) or not (self.rule.skip or self.rule.noise):
      return share_P
    size, hinted_P = int(index_P.max()) + 1, share_P > 0
    if self.rule.noise:
      noise_N = np.random.default_rng((self.seed, 4, step, 1)).standard_normal(size)
      share_P = np.clip(share_P + self.rule.noise * noise_N[index_P], 0, 1)
    if self.rule.skip:
      chance_N = np.random.default_rng((self.seed, 4, step, 0)).random(size)
      hinted_P &= chance_N[index_P] >= self.rule.skip
    return np.where(hinted_P, share_P, 0.0)

  def state_dict(self) -> dict[str, list[list[Any]]]:
    """State for the checkpoint."""
    return {str(index): [list(v) for v in visits] for index, visits in self.visits.items()}

  def load_state_dict(self, state: Mapping[str, list[list[Any]]]) -> None:
    """Restore from `state_dict`."""
    self._clear()
    for index, visits in state.items():
      self._record(int(index), [Visit(*v) for v in visits])

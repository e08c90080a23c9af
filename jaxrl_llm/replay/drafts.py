"""The latest rollouts of every prompt, stored as drafts for its next visit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from jaxrl_llm.replay.array_records import each
from jaxrl_llm.types import UNFINISHED, Rollout

Arrays = tuple[np.ndarray | None, ...]  # tokens_GxS, logp_GxS, length_G, noise_GxS


class Drafts:
  """Prompt → its last finished group: tokens, log-probabilities and noise, cut to the longest row.

  At most `memory_mb` MiB: the drafts of the prompts visited longest ago are dropped first.
  """

  def __init__(self, rollouts: int, memory_mb: int):
    """Groups of `rollouts`. arXiv:2509.23232 (SPEC-RL)."""
    self.G, self._max_bytes = rollouts, memory_mb * 2**20
    self.groups: dict[int, Arrays] = {}  # the latest visit last
    self.bytes = 0

  def take(self, index_N: np.ndarray, empty: Rollout) -> Rollout:
    """A rollout for these prompts: their drafts, and rows of `empty` for prompts without one."""
    out = each(np.copy, empty)
    for n, index in enumerate(index_N.tolist()):
      if index in self.groups:
        tokens_GxS, logp_GxS, length_G, noise_GxS = self.groups[index]
        rows, width = slice(n * self.G, (n + 1) * self.G), tokens_GxS.shape[1]
        out.tokens_BxT[rows, :width], out.logp_BxT[rows, :width] = tokens_GxS, logp_GxS
        out.length_B[rows] = length_G
        if noise_GxS is not None:
          out.noise_BxT[rows, :width] = noise_GxS
    return out

  def keep(self, index_P: np.ndarray, rollout: Rollout) -> None:
    """Replaces the drafts of these prompts, except for unfinished or empty groups."""
    for p, index in enumerate(index_P.tolist()):
      rows = slice(p * self.G, (p + 1) * self.G)
      length_G, reason_G = rollout.length_B[rows], rollout.reason_B[rows]
      if (reason_G != UNFINISHED).all() and (length_G > 0).all():
        width = int(length_G.max())
        noise_BxT = rollout.noise_BxT
        noise_GxS = None if noise_BxT is None else noise_BxT[rows, :width].copy()
        cut = (rollout.tokens_BxT[rows, :width], rollout.logp_BxT[rows, :width], length_G)
        self._add(index, (*(x.copy() for x in cut), noise_GxS))

  def _add(self, index: int, arrays: Arrays) -> None:
    self._drop(index)
    self.groups[index] = arrays
    self.bytes += _size(arrays)
    while self.bytes > self._max_bytes:
      self._drop(next(iter(self.groups)))

  def _drop(self, index: int) -> None:
    self.bytes -= _size(self.groups.pop(index, ()))

  def metrics(self) -> dict[str, float]:
    """The number of prompts with a draft, and the host memory of the drafts."""
    return {
      'generate/draft_prompts': len(self.groups),
      'generate/draft_memory_mb': self.bytes / 2**20,
    }

  def state_dict(self) -> dict[str, list[np.ndarray | None]]:
    """State for the checkpoint, the oldest visit first."""
    return {str(index): list(arrays) for index, arrays in self.groups.items()}

  def load_state_dict(self, state: Mapping[str, Sequence[np.ndarray | None]]) -> None:
    """Restore from `state_dict`."""
    self.groups, self.bytes = {}, 0
    for index, arrays in state.items():
      self._add(int(index), tuple(x if x is None else np.asarray(x) for x in arrays))


def _size(arrays: Arrays) -> int:
  return sum(x.nbytes for x in arrays if x is not None)

"""The newest rollouts of every prompt, kept as drafts for its next visit."""

from __future__ import annotations

import numpy as np

from jaxrl_llm.replay.records import each
from jaxrl_llm.types import UNFINISHED, Rollout


class Drafts:
  """Prompt → its last whole group: tokens and their log-probabilities, cut to the longest row."""

  def __init__(self, rollouts: int):
    """Groups of `rollouts`. Source: arXiv:2509.23232 (SPEC-RL)."""
    self.G, self.held = rollouts, {}

  def take(self, index_N: np.ndarray, empty: Rollout) -> Rollout:
    """A rollout for these prompts: drafts where there are any, else `empty`'s rows. Source: none."""
    out = each(np.copy, empty)
    for n, index in enumerate(index_N.tolist()):
      if index in self.held:
        tokens_GxS, logp_GxS, length_G, reason_G = self.held[index]
        rows, width = slice(n * self.G, (n + 1) * self.G), tokens_GxS.shape[1]
        out.tokens_BxT[rows, :width], out.logp_BxT[rows, :width] = tokens_GxS, logp_GxS
        out.length_B[rows], out.reason_B[rows] = length_G, reason_G
    return out

  def keep(self, index_P: np.ndarray, rollout: Rollout) -> None:
    """Replaces the drafts of these prompts; unfinished or empty groups leave the old ones. Source: none."""
    for p, index in enumerate(index_P.tolist()):
      rows = slice(p * self.G, (p + 1) * self.G)
      length_G, reason_G = rollout.length_B[rows], rollout.reason_B[rows]
      if (reason_G != UNFINISHED).all() and (length_G > 0).all():
        width = int(length_G.max())
        cut = rollout.tokens_BxT[rows, :width], rollout.logp_BxT[rows, :width]
        self.held[index] = tuple(x.copy() for x in (*cut, length_G, reason_G))

  def state_dict(self) -> dict:
    """For the checkpoint. Source: none."""
    return {str(index): list(arrays) for index, arrays in self.held.items()}

  def load_state_dict(self, state: dict) -> None:
    """Back from `state_dict`. Source: none."""
    self.held = {int(index): tuple(map(np.asarray, arrays)) for index, arrays in state.items()}

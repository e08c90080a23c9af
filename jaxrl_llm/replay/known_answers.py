"""Known right replies: the run's own, the newest of each prompt."""

from __future__ import annotations

import numpy as np

from jaxrl_llm.types import STOPPED, Batch


class KnownAnswers:
  """Prompt → the tokens of its newest right reply, the end token not among them."""

  def __init__(self):
    """Source: none."""
    self.held: dict[int, np.ndarray] = {}

  def keep(self, batch: Batch, begun: list[np.ndarray]) -> None:
    """The shortest right row of each prompt that ended by itself, behind the tokens it was given. Source: none."""
    rollout, index_P = batch.rollout, np.asarray(batch.prompts.index_P)
    G = len(batch.correct_B) // len(index_P)
    right_B = (batch.correct_B > 0.5) & (rollout.length_B > 0) & (rollout.reason_B == STOPPED)
    for p, index in enumerate(index_P.tolist()):
      rows = p * G + np.flatnonzero(right_B[p * G : (p + 1) * G])
      if len(rows):
        b = rows[np.argmin(rollout.length_B[rows])]
        said = rollout.tokens_BxT[b, : rollout.length_B[b] - 1]
        self.held[index] = np.concatenate([begun[p], said]).astype(np.int32)

  def state_dict(self) -> dict:
    """For the checkpoint. Source: none."""
    return {str(index): tokens for index, tokens in self.held.items()}

  def load_state_dict(self, state: dict) -> None:
    """Back from `state_dict`. Source: none."""
    self.held = {int(index): np.asarray(tokens, np.int32) for index, tokens in state.items()}

"""Known right completions of each prompt, from the run itself."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from jaxrl_llm.types import STOPPED, Batch


class KnownAnswers:
  """Prompt → tokens of its latest right completion, without the end token."""

  def __init__(self) -> None:
    self.tokens: dict[int, np.ndarray] = {}

  def keep(self, batch: Batch, prefixes: list[np.ndarray]) -> None:
    """Stores the shortest right row of each prompt that ended with an end token, after its hint of `prefixes`."""
    rollout, index_P = batch.rollout, np.asarray(batch.prompts.index_P)
    G = len(batch.correct_B) // len(index_P)
    right_B = (batch.correct_B > 0.5) & (rollout.length_B > 0) & (rollout.reason_B == STOPPED)
    for p, index in enumerate(index_P.tolist()):
      rows = p * G + np.flatnonzero(right_B[p * G : (p + 1) * G])
      if len(rows):
        b = rows[np.argmin(rollout.length_B[rows])]
        completion = rollout.tokens_BxT[b, : rollout.length_B[b] - 1]
        self.tokens[index] = np.concatenate([prefixes[p], completion]).astype(np.int32)

  def state_dict(self) -> dict[str, np.ndarray]:
    """State for the checkpoint."""
    return {str(index): tokens for index, tokens in self.tokens.items()}

  def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
    """Restore from `state_dict`."""
    self.tokens = {int(index): np.asarray(tokens, np.int32) for index, tokens in state.items()}

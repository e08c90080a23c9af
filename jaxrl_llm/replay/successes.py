"""Right rollouts of earlier visits, learned from again beside the fresh ones of their prompt.

Every public function here may be named in `config.replay.reuse.fn`; it makes what is kept, empty at first.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxrl_llm.replay.array_records import each
from jaxrl_llm.types import Batch, UserError


class StoredRollout(NamedTuple):
  """One right rollout."""

  tokens: np.ndarray  # int32 [its length]
  reward: float
  reason: int


class Successes:
  """Prompt → its newest right rollouts, no two of the same tokens."""

  def __init__(self, count: int, most: int):
    """`count` are replayed at a visit, of the `most` that are kept of a prompt; 0 and 0: nothing is."""
    self.count, self.most = count, most
    self.held: dict[int, list[StoredRollout]] = {}

  def keep(self, batch: Batch) -> None:
    """Adds the right rows of a batch; the oldest give way. Source: arXiv:2507.07451 (RLEP)."""
    if not self.count:
      return
    rollout, index_P = batch.rollout, np.asarray(batch.prompts.index_P)
    G = len(rollout.length_B) // len(index_P)
    for b in np.flatnonzero((batch.correct_B > 0.5) & (rollout.length_B > 0)):
      tokens = rollout.tokens_BxT[b, : rollout.length_B[b]].astype(np.int32)
      held = self.held.setdefault(int(index_P[b // G]), [])
      held[:] = [old for old in held if not np.array_equal(old.tokens, tokens)]
      held.append(StoredRollout(tokens, float(batch.reward_B[b]), int(rollout.reason_B[b])))
      del held[: -self.most]

  def join(self, batch: Batch, seed: int, step: int) -> Batch:
    """Each group's G fresh rows and `count` more: replays drawn by (seed, step, prompt), empty where there are too few.

    `replayed_B` is 1 for them: no log-probability of theirs is kept, the update takes those of its start.
    A group without fresh rows gets none. Source: arXiv:2507.07451 (RLEP).
    """
    if not self.count:
      return batch
    index_P = np.asarray(batch.prompts.index_P)
    P, M = len(index_P), self.count
    fresh_P = (np.asarray(batch.rollout.length_B).reshape(P, -1) > 0).any(1)
    # One row of each prompt, M times and emptied: shapes and types are the batch's.
    first = np.repeat(np.arange(P) * (len(batch.reward_B) // P), M)
    more = each(lambda x: np.zeros_like(np.asarray(x)[first]), batch.rollout)
    more = more._replace(
      weight_B=np.ones_like(more.weight_B), version_BxT=np.full_like(more.version_BxT, -1)
    )
    reward_B, right_B = (np.zeros_like(np.asarray(batch.reward_B)[first]) for _ in range(2))
    for p in np.flatnonzero(fresh_P):
      for at, kept in enumerate(self._draw(int(index_P[p]), seed, step), start=p * M):
        more.tokens_BxT[at, : len(kept.tokens)] = kept.tokens
        more.length_B[at], more.reason_B[at] = len(kept.tokens), kept.reason
        reward_B[at], right_B[at] = kept.reward, 1
    joined = lambda a, b: _joined(np.asarray(a), b, P)  # noqa: E731
    return batch._replace(
      rollout=each(joined, batch.rollout, more),
      reward_B=joined(batch.reward_B, reward_B),
      correct_B=joined(batch.correct_B, right_B),
      success_B=None if batch.success_B is None else joined(batch.success_B, right_B),
      replayed_B=joined(np.zeros_like(batch.reward_B), np.ones_like(reward_B)),
    )

  def _draw(self, index: int, seed: int, step: int) -> list[StoredRollout]:
    held = self.held.get(index, [])
    random = np.random.default_rng((seed, 3, step, index))
    return [held[i] for i in random.permutation(len(held))[: self.count]]

  def state_dict(self) -> dict:
    """For the checkpoint. Source: none."""
    return {str(index): [list(kept) for kept in held] for index, held in self.held.items()}

  def load_state_dict(self, state: dict) -> None:
    """Back from `state_dict`. Source: none."""
    self.held = {
      int(index): [StoredRollout(np.asarray(t, np.int32), float(r), int(s)) for t, r, s in held]
      for index, held in state.items()
    }


def none() -> Successes:
  """Nothing is replayed. Source: none."""
  return Successes(0, 0)


def successes(*, count: int, keep: int = 8) -> Successes:
  """Groups of G fresh and up to `count` replayed right rows, standardised together; `keep` are kept of a prompt.

  The paper collects them in a first run and begins anew; here they are those of the run itself.
  Source: arXiv:2507.07451 (RLEP).
  """
  if not 1 <= count <= keep:
    raise UserError(
      f'config.replay.reuse.count={count} must be from 1 to config.replay.reuse.keep={keep}; the paper replays 2.'
    )
  return Successes(count, keep)


def _joined(a: np.ndarray, b: np.ndarray, prompts: int) -> np.ndarray:
  """Rows of a and of b, group by group."""
  # No −1: an array of features may be empty.
  by_prompt = [x.reshape(prompts, len(x) // prompts, *x.shape[1:]) for x in (a, b)]
  both = np.concatenate(by_prompt, axis=1)
  return both.reshape(len(a) + len(b), *both.shape[2:])

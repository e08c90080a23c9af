"""Loops of several optimizer steps on one minibatch, named in `config.optimizer.outer.fn`.

A function returns the settings of a loop, or None for one step. `learner.update` runs the loop; the train state holds
its LoopState.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.objective import turn_masks
from jaxrl_llm.objective.token_inputs import requires
from jaxrl_llm.types import Params, UserError


class LoopState(NamedTuple):
  """What SFPO's loop observes over the run."""

  entropy_W: jax.Array  # nats, of the last W minibatches, as a ring
  observed: jax.Array  # int32, minibatches
  stopped: jax.Array  # int32, 1 once there are no more inner steps


class SlowFast(NamedTuple):
  """Settings of `slow_fast`, and its formulas."""

  fast_steps: int
  alpha: float
  window: int
  threshold: float

  def max_steps(self, turns: int) -> int:
    """The largest number of optimizer steps on a minibatch."""
    del turns
    return self.fast_steps + 1

  def init(self) -> LoopState:
    """The state at the start of a run."""
    return LoopState(jnp.zeros(self.window, jnp.float32), jnp.int32(0), jnp.int32(self.alpha == 0))

  def steps(self, state: LoopState) -> jax.Array:
    """The number of inner steps on the next minibatch."""
    return jnp.where(state.stopped > 0, 0, self.fast_steps)

  def reposition(self, start: Params, end: Params) -> Params:
    """θ0 + α·(θK − θ0), written so that it equals θK bit for bit for α = 1, and θ0 where θK = θ0."""
    return jax.tree.map(lambda x, y: y + (1 - self.alpha) * (x - y), start, end)

  def observe(self, state: LoopState, entropy: jax.Array, real: jax.Array) -> LoopState:
    """Stops for good once entropy − mean ≥ threshold·(std + 1e-9) over a full window that ends with `entropy`.

    std divides by n. Nothing changes where `real` is False.
    """
    entropy_W = state.entropy_W.at[state.observed % self.window].set(entropy)
    deviation = entropy - entropy_W.mean()
    full = state.observed + 1 >= self.window
    risen = full & (deviation >= self.threshold * (entropy_W.std() + 1e-9))
    stopped = (state.stopped > 0) | risen
    new = LoopState(entropy_W, state.observed + 1, stopped.astype(jnp.int32))
    return jax.tree.map(lambda x, y: jnp.where(real, x, y), new, state)


class LastTurnFirst(NamedTuple):
  """Settings of `last_turn_first`, and its formula."""

  eps: float

  def max_steps(self, turns: int) -> int:
    """The largest number of optimizer steps on a minibatch: one per turn."""
    return turns

  def init(self) -> None:
    """This loop has no state."""
    return None

  def multiplier(
    self,
    multiplier_B: jax.Array,
    logp_BxT: jax.Array,
    before_BxT: jax.Array,
    learned_BxT: jax.Array,
  ) -> jax.Array:
    """M [B] after the step of one more turn."""
    return turn_masks.multiplier(multiplier_B, logp_BxT, before_BxT, learned_BxT, eps=self.eps)


def none() -> None:
  """One optimizer step on a minibatch."""
  return None


def slow_fast(
  *, fast_steps: int = 3, alpha: float = 0.8, window: int = 30, threshold: float = 1.0
) -> SlowFast:
  """SFPO: K = `fast_steps` inner steps from θ0 to θK, back to θ̃ = θ0 + α·(θK − θ0), one outer step from there.

  Adam's moments run through all K + 1 steps; only the weights go back. The inner steps end for good once the entropy
  of the outer step is `threshold` standard deviations above the mean of the last `window` minibatches, which include
  it. The loop takes K more passes and one more copy of the weights. The official code counts its window in batches and
  takes each inner step over all minibatches of a batch, which is the same with one minibatch; its schedule counts
  batches, ours counts steps. Raises UserError for settings out of range. arXiv:2510.04072 (SFPO).
  """
  where = 'config.optimizer.outer'
  if fast_steps < 1:
    raise UserError(f'{where}.fast_steps={fast_steps} must be at least 1; fn=none takes none.')
  if not 0 <= alpha <= 1:
    raise UserError(f'{where}.alpha={alpha} must be from 0 to 1.')
  if window < 2:
    raise UserError(f'{where}.window={window} must be at least 2, to have a standard deviation.')
  if threshold <= 0:
    raise UserError(f'{where}.threshold={threshold} must be above 0; 1e9 never stops.')
  return SlowFast(fast_steps, alpha, window, threshold)


@requires('the multiplier of a turn is the ratio of whole turns', ratio=('sequence',))
def last_turn_first(*, eps: float = 0.2) -> LastTurnFirst:
  """SeeUPO: a step for every turn of a minibatch's rows, from the last to the first, as if rows were that turn alone.

  The advantages of turn k are multiplied by M = Π over the row's later turns of e^{mean(log π_after − log π_before)}
  of their steps; M and each factor are clipped to 1 ± eps. M measures how much more likely the row's own later turns
  have become. The old policy of a step is the policy before it, which takes one more forward pass per turn. The
  schedule counts the largest number of turns of an episode; a minibatch of shorter episodes takes fewer steps. Raises
  UserError for eps out of range. arXiv:2602.06554 (SeeUPO), from its abstract and its code.
  """
  if not 0 <= eps < 1:
    raise UserError(f'config.optimizer.outer.eps={eps} must be from 0 to 1, 1 not included.')
  return LastTurnFirst(eps)

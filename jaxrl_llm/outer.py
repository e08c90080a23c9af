"""What is done with a minibatch besides one optimizer step. Named in `config.optimizer.outer.fn`.

A function here returns None, or the settings of a loop around the steps; `update` runs it, the train state keeps what
it has seen.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.objective import turns
from jaxrl_llm.types import UserError


class Seen(NamedTuple):
  """What the loop remembers of the run so far."""

  entropy_W: jax.Array  # nats, of the last minibatches, as a ring
  count: jax.Array  # int32, minibatches seen
  stopped: jax.Array  # int32, 1 once there are no fast steps any more


class SlowFast(NamedTuple):
  """Settings of `slow_fast`, and its three formulas."""

  fast_steps: int
  alpha: float
  window: int
  threshold: float

  def most(self, turns: int) -> int:
    """Optimizer steps on a minibatch, at most."""
    del turns
    return self.fast_steps + 1

  def fresh(self) -> Seen:
    return Seen(jnp.zeros(self.window, jnp.float32), jnp.int32(0), jnp.int32(self.alpha == 0))

  def steps(self, seen: Seen) -> jax.Array:
    """How many fast steps the next minibatch gets."""
    return jnp.where(seen.stopped > 0, 0, self.fast_steps)

  def reposition(self, start: Any, end: Any) -> Any:
    """θ0 + α·(θK − θ0), written so that it is θK to the bit for α = 1 and θ0 where nothing moved."""
    return jax.tree.map(lambda x, y: y + (1 - self.alpha) * (x - y), start, end)

  def observe(self, seen: Seen, entropy: jax.Array, real: jax.Array) -> Seen:
    """Stops for ever once |entropy − mean| ≥ threshold·std over a full window of what came before it."""
    off = jnp.abs(entropy - seen.entropy_W.mean())
    std = seen.entropy_W.std(ddof=1)
    full = seen.count >= self.window
    stopped = (seen.stopped > 0) | (full & (std > 0) & (off >= self.threshold * std))
    new = Seen(
      seen.entropy_W.at[seen.count % self.window].set(entropy),
      seen.count + 1,
      stopped.astype(jnp.int32),
    )
    return jax.tree.map(lambda x, y: jnp.where(real, x, y), new, seen)


class LastTurnFirst(NamedTuple):
  """Settings of `last_turn_first`, and its formula."""

  eps: float

  def most(self, turns: int) -> int:
    """Optimizer steps on a minibatch, at most: one for every turn."""
    return turns

  def fresh(self) -> None:
    return None

  def multiplier(self, multiplier_B, logp_BxT, before_BxT, learnt_BxT) -> jax.Array:
    """M of every row after one more turn was learnt."""
    return turns.multiplier(multiplier_B, logp_BxT, before_BxT, learnt_BxT, eps=self.eps)


def none() -> None:
  """One optimizer step a minibatch. Source: none."""
  return None


def slow_fast(
  *, fast_steps: int = 3, alpha: float = 0.5, window: int = 10, threshold: float = 2.0
) -> SlowFast:
  """K = `fast_steps` steps on one minibatch from θ0 to θK, back to θ̃ = θ0 + α·(θK − θ0), one slow step from there.

  Adam's moments and the schedule run on through all K + 1 steps; only the weights go back. Once the entropy of the
  policy at θ0 lies `threshold` standard deviations off the mean of the `window` minibatches before it, α is 0 from the
  next minibatch on: there are no fast steps then, moments included, and what is left is the plain step. It takes K
  more passes and one more copy of the weights. The formulas are from third-party notes; what becomes of the moments,
  the two-sided test on earlier values alone, and the defaults are ours. Raises UserError for settings out of range.
  Source: arXiv:2510.04072 (SFPO).
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


def last_turn_first(*, eps: float = 0.2) -> LastTurnFirst:
  """A step for every turn of a minibatch's rows, from the last to the first, each as if rows were that turn alone.

  Turn k's advantages count M times, M = Π over the row's later turns of e^{mean(log π_after − log π_before)} of their
  steps, M and each factor held within 1 ± eps: how much likelier the row's own later turns have become. The old policy
  of a step is the one that it begins with, which takes one more forward pass a turn. The schedule counts the most
  turns that an episode may take; a minibatch of shorter ones takes fewer steps. Raises UserError for eps out of range.
  Source: arXiv:2602.06554 (SeeUPO), from its abstract and its code.
  """
  if not 0 <= eps < 1:
    raise UserError(f'config.optimizer.outer.eps={eps} must be from 0 to 1, 1 not included.')
  return LastTurnFirst(eps)

"""What is done with a minibatch besides one optimizer step. Named in `config.optimizer.outer.fn`.

A function here returns None, or the settings of a loop around the steps; `update` runs it, the train state keeps what
it has seen.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.objective import turn_masks
from jaxrl_llm.objective.token_inputs import requires
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
    """Stops for ever once entropy − mean ≥ threshold·(std + 1e-9) over a full window that ends with it; std over n."""
    entropy_W = seen.entropy_W.at[seen.count % self.window].set(entropy)
    off = entropy - entropy_W.mean()
    full = seen.count + 1 >= self.window
    risen = full & (off >= self.threshold * (entropy_W.std() + 1e-9))
    stopped = (seen.stopped > 0) | risen
    new = Seen(entropy_W, seen.count + 1, stopped.astype(jnp.int32))
    return jax.tree.map(lambda x, y: jnp.where(real, x, y), new, seen)


class LastTurnFirst(NamedTuple):
  """Settings of `last_turn_first`, and its formula."""

  eps: float

  def most(self, turns: int) -> int:
    """Optimizer steps on a minibatch, at most: one for every turn."""
    return turns

  def fresh(self) -> None:
    return None

  def multiplier(self, multiplier_B, logp_BxT, before_BxT, learned_BxT) -> jax.Array:
    """M of every row after one more turn was learned."""
    return turn_masks.multiplier(multiplier_B, logp_BxT, before_BxT, learned_BxT, eps=self.eps)


def none() -> None:
  """One optimizer step a minibatch. Source: none."""
  return None


def slow_fast(
  *, fast_steps: int = 3, alpha: float = 0.8, window: int = 30, threshold: float = 1.0
) -> SlowFast:
  """K = `fast_steps` steps on one minibatch from θ0 to θK, back to θ̃ = θ0 + α·(θK − θ0), one slow step from there.

  Adam's moments run on through all K + 1 steps; only the weights go back. Once the entropy of the policy in the slow
  step is `threshold` standard deviations above the mean of the last `window` minibatches, itself one of them, there are
  no fast steps from the next minibatch on, and what is left is the plain step. It takes K more passes and one more copy
  of the weights. The official code counts its window in batches and takes each fast step over all minibatches of one,
  which is the same with one minibatch; its schedule counts batches, ours steps. Raises UserError for settings out of
  range. Source: arXiv:2510.04072 (SFPO).
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


@requires('what a turn multiplies the others by is the ratio of whole turns', ratio=('sequence',))
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

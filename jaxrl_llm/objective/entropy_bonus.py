"""Entropy bonuses: the loss is lowered by coef · Σ w·H, w the denominator of the policy term.

A public function, named in `config.objective.entropy_bonus.fn`, returns None or settings. H is the exact entropy of a
token's distribution, and its gradient goes through all logits; no other stage has such a term. All rows with tokens are
learned, those with an advantage of 0 included.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.types import UserError


class BonusState(NamedTuple):
  """The coefficient of an adaptive bonus."""

  coef: jax.Array
  active: jax.Array  # int32, 1 where the last entropy was below the target


class EntropyBonus(NamedTuple):
  """Settings of a bonus, and its rule."""

  coef: float
  target: float | None = None  # nats; None: the coefficient is fixed
  delta: float = 0.0
  low: float = 0.0
  high: float = 0.0

  def init(self) -> BonusState | None:
    """The state at the start of a run; None for a fixed coefficient."""
    return None if self.target is None else BonusState(jnp.float32(self.coef), jnp.int32(1))

  def coefficient(self, state: BonusState | None) -> jax.Array | float:
    """The coefficient of the next optimizer step."""
    return self.coef if state is None else state.coef * state.active

  def observe(
    self, state: BonusState | None, entropy: jax.Array, real: jax.Array
  ) -> BonusState | None:
    """The state after a minibatch with this mean entropy; as it was where `real` is False."""
    if state is None or self.target is None:
      return None
    below = entropy < self.target
    moved = jnp.clip(state.coef + jnp.where(below, self.delta, -self.delta), self.low, self.high)
    new = BonusState(moved, below.astype(jnp.int32))
    return jax.tree.map(lambda x, y: jnp.where(real, x, y), new, state)


def none() -> None:
  """No bonus."""
  return None


def fixed(*, coef: float = 0.001) -> EntropyBonus:
  """The coefficient stays the same. arXiv:1602.01783 (A3C).

  Raises UserError for one below 0.
  """
  _check(coef >= 0, f'coef={coef} must not be below 0, which would lower the entropy')
  return EntropyBonus(coef)


def adaptive(
  *,
  target: float = 0.2,
  coef: float = 0.0,
  delta: float = 1e-4,
  low: float = 0.0,
  high: float = 0.005,
) -> EntropyBonus:
  """coef ← clip(coef ± delta, low, high): up where the mean entropy was below `target` (nats), down where not.

  The bonus applies only after a minibatch whose entropy was below the target. As in the official code the entropy is
  that of the step before, and `coef` is the first value; its entropy is −mean log π of the sampled tokens, ours is
  exact, and it counts batches where we count minibatches. Raises UserError for settings out of range.
  arXiv:2505.22312 (Skywork-OR1).
  """
  _check(target > 0, f'target={target} must be above 0 nats; fn=none has no bonus')
  _check(delta > 0, f'delta={delta} must be above 0; fn=fixed keeps the coefficient')
  ordered = 0 <= low <= coef <= high
  _check(ordered, f'coef={coef} must be from low={low} to high={high}, and low not below 0')
  return EntropyBonus(coef, target, delta, low, high)


def _check(valid: bool, problem: str) -> None:
  if not valid:
    raise UserError(f'config.objective.entropy_bonus.{problem}.')

"""KL penalties in the reward: old_BxT, reference_BxT → penalty_BxT, subtracted from the rewards before advantages.

Inputs are log-probs of the old policy (where a correction needs it, else of the sampler) and of the reference model.
With the credit `row`, R − Σ_t penalty_t is the reward of a row, after reward shaping; credits that sum rewards over
tokens subtract a token's penalty where it arises. A baseline thus includes the penalty, unlike the stage `kl`, whose
term is added to the loss. d = log π_old − log π_ref. Every public function may be named in
`config.objective.reward_kl.fn`. Detached.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.objective.token_inputs import exp, needs, requires

_WHERE = 'other credits do not sum rewards over tokens'
_CREDITS = ('row', 'gae', 'return_whitened')


def none() -> None:
  """No penalty."""


@needs('reward_reference')
@requires(_WHERE, credit_assignment=_CREDITS)
def k1(old_BxT: jax.Array, reference_BxT: jax.Array, *, coef: float = 0.001) -> jax.Array:
  """coef·d, negative for some tokens: unbiased (verl's 'kl'). arXiv:1909.08593."""
  return coef * (old_BxT - reference_BxT)


@needs('reward_reference')
@requires(_WHERE, credit_assignment=_CREDITS)
def k2(old_BxT: jax.Array, reference_BxT: jax.Array, *, coef: float = 0.001) -> jax.Array:
  """coef·d²/2 (verl's 'mse')."""
  return coef * (old_BxT - reference_BxT) ** 2 / 2


@needs('reward_reference')
@requires(_WHERE, credit_assignment=_CREDITS)
def k3(old_BxT: jax.Array, reference_BxT: jax.Array, *, coef: float = 0.001) -> jax.Array:
  """coef·(e^{−d} + d − 1) (verl's 'low_var_kl', which bounds it by 10)."""
  d = old_BxT - reference_BxT
  return coef * (exp(-d) + d - 1)


@needs('reward_reference')
@requires(_WHERE, credit_assignment=_CREDITS)
def absolute(old_BxT: jax.Array, reference_BxT: jax.Array, *, coef: float = 0.001) -> jax.Array:
  """coef·|d| (verl's 'abs')."""
  return coef * jnp.abs(old_BxT - reference_BxT)

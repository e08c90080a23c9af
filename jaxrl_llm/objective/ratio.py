"""Log-ratios of the current policy to an earlier one: tokens → log_ratio_BxT, 0 where the mask is 0.

Every public function may be named in `config.objective.ratio.fn`. Detached: the trust region defines the gradient.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.objective.token_inputs import Tokens, requires, row_mean, row_sum


def token(tokens: Tokens) -> jax.Array:
  """log r = log π − log π_old for each token. arXiv:1707.06347 (PPO)."""
  return jnp.where(tokens.mask_BxT > 0, tokens.logp_BxT - tokens.old_BxT, 0.0)


# corrections of weight 1
_NO_WEIGHT = (
  *('none', 'divergent_negatives', 'second_moment_mask'),
  *('token_divergence', 'sequence_divergence'),
)
_TWICE = 'it counts the mismatch with the sampler, which would count twice'


@requires('a ratio of rows is one term for each row', aggregation=('sequence_mean', 'sequence_sum'))
def sequence(tokens: Tokens) -> jax.Array:
  """log s = mean over the row of log r, the same for all its tokens. arXiv:2507.18071 (GSPO)."""
  return _spread(row_mean(token(tokens), tokens.mask_BxT), tokens)


def product(tokens: Tokens) -> jax.Array:
  """log Πr = sum over the row of log r, the same for all its tokens. arXiv:2503.14286 (TOPR)."""
  return _spread(row_sum(token(tokens), tokens.mask_BxT), tokens)


def prefix_min(tokens: Tokens) -> jax.Array:
  """log r_t + min_{i<t} log r_i, the minimum 0 before the first token and detached.

  From third-party notes; not verified: whether the minimum is also clamped at 1, and that it carries no gradient.
  arXiv:2601.22718 (MinPRO).
  """
  own = token(tokens)
  # Environment tokens between two turns must not be the minimum.
  before = jax.lax.cummin(jnp.where(tokens.mask_BxT > 0, own, jnp.inf), axis=1)[:, :-1]
  before = jnp.pad(before, ((0, 0), (1, 0)))
  return jnp.where(tokens.mask_BxT > 0, own + before, 0.0)


@requires(_TWICE, importance_correction=_NO_WEIGHT)
def direct(tokens: Tokens) -> jax.Array:
  """log v = log π − log π_b: both corrections in one ratio (bypass)."""
  return jnp.where(tokens.mask_BxT > 0, tokens.logp_BxT - tokens.behavior_BxT, 0.0)


@requires(_TWICE, importance_correction=_NO_WEIGHT)
def direct_product(tokens: Tokens) -> jax.Array:
  """log Πv = sum over the row of log v: unbiased for whole rows. arXiv:2602.17616 (VCPO)."""
  return _spread(row_sum(direct(tokens), tokens.mask_BxT), tokens)


def one(tokens: Tokens) -> jax.Array:
  """log r = 0: no correction, as in REINFORCE."""
  return jnp.zeros_like(tokens.logp_BxT)


def _spread(x_Bx1: jax.Array, tokens: Tokens) -> jax.Array:
  return jnp.where(tokens.mask_BxT > 0, x_Bx1, 0.0)

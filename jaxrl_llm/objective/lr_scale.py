"""Learning-rate factors of a minibatch: tokens → a factor on the learning rate of its optimizer step, [].

Every public function may be named in `config.objective.lr_scale.fn`. Detached.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.objective.token_inputs import Tokens, needs, requires, row_sum


def none() -> None:
  """1."""


@needs('rows')
@requires(
  'the effective sample size is that of whole-row weights Π π/π_b', ratio=('direct_product',)
)
def effective_sample_size(tokens: Tokens, *, base: float = 1.0, floor: float = 1e-8) -> jax.Array:
  """√min(1, (ESS / rows) / base), ESS = (Σw)² / (Σw² + floor) with w = Πv of each row, v = π/π_b.

  w is uncapped even where the loss caps it. arXiv:2602.17616 (VCPO).
  """
  exists_B = tokens.mask_BxT.sum(1) > 0
  log_w_B = row_sum(tokens.logp_BxT - tokens.behavior_BxT, tokens.mask_BxT)[:, 0]
  # Relative to the largest weight, because squares of products of ratios overflow.
  top = jnp.max(jnp.where(exists_B, log_w_B, -jnp.inf))
  top = jnp.where(exists_B.any(), top, 0.0)
  w_B = jnp.where(exists_B, jnp.exp(log_w_B - top), 0.0)
  ess = w_B.sum() ** 2 / ((w_B**2).sum() + floor * jnp.exp(-2 * top))
  share = ess / jnp.maximum(exists_B.sum(), 1)
  return jnp.where(exists_B.any(), jnp.sqrt(jnp.minimum(share / base, 1.0)), 1.0)

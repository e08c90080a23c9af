"""Parts of methods that a step does not run: noise on the inputs.

Pure functions of arrays, each with its proving identity in tests/objective/test_pieces.py. None of them is a choice of
a config. A coefficient array here stands for the loss −Σ sg(c)·log π, like those of `compose.coefficients`; terms of
different kinds are added with their own denominators, so that one never dilutes another.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def noisy_posterior(
  reward_PxG: jax.Array,
  noise_PxG: jax.Array,
  *,
  spread: float = 0.01,
  trust: float = 0.1,
  eps: float = 1e-4,
) -> jax.Array:
  """A = z_group(s + k·(n − s)), s = z_group(R), n = z_group(1 − noise), k = clip(P / (trust + P), 0, 1).

  P = spread / (var_g(R) + spread): the less the rewards of a group tell, the more the noise that its inputs had does.
  Constant noise is GRPO. The official code's, `spread` (p_alpha) and `trust` (r_value) of its 3B script.
  Source: arXiv:2510.21122 (NoisyGRPO).
  """
  prior = spread / (jnp.var(reward_PxG, axis=1, ddof=1, keepdims=True) + spread)
  gain = jnp.clip(prior / (trust + prior), 0.0, 1.0)
  seen, clean = _standard(reward_PxG, 1, eps), _standard(1 - noise_PxG, 1, eps)
  return _standard(seen + gain * (clean - seen), 1, eps)


def _standard(x: jax.Array, axis: int, eps: float) -> jax.Array:
  off = x - x.mean(axis, keepdims=True)
  return off / (jnp.std(x, axis=axis, ddof=1, keepdims=True) + eps)

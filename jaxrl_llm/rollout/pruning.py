"""Pruning: a group starts more rollouts than are learned from, and after a few tokens only some survive.

The functions named in `config.rollout.pruning.fn` return PruningSettings. Exactly `config.rollouts` candidates of a
group survive. A survivor's weight is one over its survival probability.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.rollout import survival


class PruningSettings(NamedTuple):
  """Settings that are fixed when pruning is compiled."""

  candidates: int  # C, rollouts started per prompt
  at_tokens: int  # length at which candidates are scored
  # (p_PxC, survivors) → survival probabilities s_PxC
  survival: Callable[[jax.Array, int], jax.Array]
  warmup_steps: int  # updates of the correctness head before its scores are used
  learning_rate: float  # of the correctness head
  floor: float = 0.0  # least survival probability of a candidate


def none() -> None:
  """No pruning: every rollout that starts is finished and learned from."""
  return None


def uniform(*, candidates: int, at_tokens: int) -> PruningSettings:
  """Random survivors, s = survivors/C: the baseline of `quality`."""
  even = lambda p_PxC, survivors: jnp.full_like(p_PxC, survivors / p_PxC.shape[1])  # noqa: E731
  return PruningSettings(candidates, at_tokens, even, 0, 0.0)


def quality(
  *,
  candidates: int,
  at_tokens: int,
  share: float = 0.5,
  floor: float = 0.05,
  warmup_steps: int = 20,
  learning_rate: float = 3e-4,
) -> PruningSettings:
  """The correctness head predicts success from a hidden state; a share `share` of survivors is to succeed.

  s = clip(λ·[share·p/p̄ + (1 − share)·(1 − p)/(1 − p̄)], floor, 1), with λ such that Σs = survivors; this requires
  floor · candidates ≤ config.rollouts. p is the head's score calibrated by counts in 20 bins, p̄ its mean in the group.
  arXiv:2603.24840 (ARRoL); its survival formula was not found and is reconstructed here from its two aims, its
  defaults are those of another project's re-implementation.
  """
  fn = functools.partial(survival.probabilities, share=share, floor=floor)
  return PruningSettings(candidates, at_tokens, fn, warmup_steps, learning_rate, floor)

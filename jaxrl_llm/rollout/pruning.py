"""Sampling more rollouts than are learned from: after a few tokens each group keeps the ones worth finishing.

Named in `config.rollout.pruning.fn`. A function here returns a PruningSettings: how many rollouts a prompt begins,
after how many tokens they are judged, and with which probability each one survives. Exactly
`config.rollouts` of a group do; a survivor's weight is one over its probability.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp

from jaxrl_llm.rollout import pruned_decode


class PruningSettings(NamedTuple):
  """What is fixed when pruning is compiled."""

  candidates: int  # C, rollouts begun per prompt
  at_tokens: int  # judged when they hold so many
  survival: Callable  # (p_PxC, keep) → s_PxC
  warmup_steps: int  # updates of the judge before it is listened to
  learning_rate: float  # of the judge
  floor: float = 0.0  # the least probability of surviving that a candidate is promised


def none() -> None:
  """All rollouts that begin are finished and learned from. Source: none."""
  return None


def uniform(*, candidates: int, at_tokens: int) -> PruningSettings:
  """Survivors at random, s = keep/C: what a judge must beat. Source: none."""
  even = lambda p_PxC, keep: jnp.full_like(p_PxC, keep / p_PxC.shape[1])  # noqa: E731
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
  """A head on the hidden state guesses who will be right; survivors are to be right in a share of `share`.

  s = clip(λ·[share·p/p̄ + (1 − share)·(1 − p)/(1 − p̄)], floor, 1), λ so that Σs = keep, for which floor · candidates
  must not exceed config.rollouts; p comes from the
  head's score through counts in 20 bins, p̄ is its mean in the group. Source: arXiv:2603.24840 (ARRoL);
  its survival formula was not found and is reconstructed here from its two aims, its defaults are those
  of another project's re-implementation.
  """
  fn = functools.partial(pruned_decode.survival_probabilities, share=share, floor=floor)
  return PruningSettings(candidates, at_tokens, fn, warmup_steps, learning_rate, floor)

"""REINFORCE++ with a baseline, by verl."""

from __future__ import annotations

from jaxrl_llm.objective import advantage
from tests.objective.official import lib, verl_core

OFFICIAL = lib.Official(*verl_core.PINNED)
SETTINGS = dict(
  advantage='group_whitened',
  trust_region=dict(fn='clip', low=0.2, high=0.2),
  aggregation='token_mean',
)
MUTANTS = {
  'no baseline': (
    advantage,
    'token_whitened(group_centered(reward_PxG, length_PxG)',
    'token_whitened((reward_PxG)',
  ),
  'biased': (
    advantage,
    'var = (off**2 * weight).sum() / jnp.maximum(n - 1, 1)',
    'var = (off**2 * weight).sum() / jnp.maximum(n, 1)',
  ),
}


def official(torch, read, data):
  return verl_core.policy(
    torch, read, data, 'vanilla', 'reinforce_plus_plus_baseline', 'token-mean', clip_ratio_c=1e9
  )


lib.main(__name__)

"""OPO's baseline, by verl, with its clipped loss."""

from __future__ import annotations

from jaxrl_llm.objective import advantage
from tests.objective.official import lib, verl_core

OFFICIAL = lib.Official(*verl_core.PINNED)
SETTINGS = dict(
  advantage='length_weighted',
  trust_region=dict(fn='clip', low=0.2, high=0.2),
  aggregation='token_mean',
)
MUTANTS = {
  'mean of rows': (
    advantage,
    'weight = jnp.asarray(length_PxG, reward_PxG.dtype)\n  baseline',
    'weight = _exists(length_PxG)\n  baseline',
  ),
}


def official(torch, read, data):
  return verl_core.policy(torch, read, data, 'vanilla', 'opo', 'token-mean', clip_ratio_c=1e9)


lib.main(__name__)

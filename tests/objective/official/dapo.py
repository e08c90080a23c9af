"""DAPO's clip and denominator, by verl, without its mask of all-equal groups and its shaping of rewards."""

from __future__ import annotations

from jaxrl_llm.objective import clip_masks, trust_region
from tests.objective.official import lib, verl_core

OFFICIAL = lib.Official(*verl_core.PINNED)
SETTINGS = dict(trust_region=dict(fn='clip', low=0.2, high=0.28), aggregation='token_mean')
MUTANTS = {
  'swapped bounds': (
    trust_region,
    'clip_masks.clip(log_ratio_BxT, tokens.advantage_BxT, 1 - low, 1 + high)',
    'clip_masks.clip(log_ratio_BxT, tokens.advantage_BxT, 1 - high, 1 + low)',
  ),
  'no clip': (clip_masks, 'jnp.where(up | down, 0.0, ratio)', 'ratio'),
}


def official(torch, read, data):
  return verl_core.policy(
    torch,
    read,
    data,
    'vanilla',
    'grpo',
    'token-mean',
    clip_ratio_low=0.2,
    clip_ratio_high=0.28,
    clip_ratio_c=1e9,
  )


lib.main(__name__)

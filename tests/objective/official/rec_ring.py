"""REC-Ring as its authors run it: the two-side band and a rim where the gradient pulls back, no importance weights."""

from __future__ import annotations

import numpy as np

from jaxrl_llm.objective import trust_region
from tests.objective.official import lib, trinity_core

PATHS = (
  'trinity/algorithm/policy_loss_fn/rec_policy_loss.py',
  'trinity/algorithm/advantage_fn/rec_advantage.py',
)
OFFICIAL = lib.Official(*trinity_core.pinned(*PATHS))
SETTINGS = dict(
  advantage='group_centered',
  trust_region=dict(fn='ring', low=0.2, high=0.2, outer_low=0.6, outer_high=2.0, corrected=False),
  aggregation='token_mean',
)
SEEDS = (0, 1, 2)
MUTANTS = {
  'rim of falling tokens': (trust_region, 'ratio <= 1 - outer_low', 'ratio <= 1 - outer_low / 2'),
  'rim of rising tokens': (trust_region, 'ratio >= 1 + outer_high', 'ratio >= 1 + outer_high / 2'),
  'rims swapped': (
    trust_region,
    '(advantage > 0) & (ratio <= 1 - outer_low)',
    '(advantage < 0) & (ratio <= 1 - outer_low)',
  ),
  'one side for the band': (
    trust_region,
    'keep = clip_masks.within(ratio, 1 - low, 1 + high)\n  keep |=',
    'keep = clip_masks.one_side(ratio, advantage, 1 - low, 1 + high)\n  keep |=',
  ),
}


def draw(seed):
  """As everywhere, with ratios beyond both rims for both signs of the advantage."""
  data = lib.draw(seed)
  for row, gap in ((0, 1.4), (1, 1.4), (16, -1.2), (17, -1.2), (0, -1.1), (1, -1.1)):
    data['length'][row] = lib.T
    data['old'][row, 4 if gap > 0 else 5] = np.round(
      data['logp'][row, 4 if gap > 0 else 5] - gap, 4
    )
  return data


def official(torch, read, data):
  how = dict(
    clip_mode='ring',
    epsilon_low=0.2,
    epsilon_high=0.2,
    epsilon_low_prime=0.6,
    epsilon_high_prime=2.0,
  )
  return trinity_core.run(
    torch, read, data, PATHS, ('RECPolicyLossFn', how), ('RECGroupedAdvantage', {})
  )


lib.main(__name__)

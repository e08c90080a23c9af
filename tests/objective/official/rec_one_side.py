"""REC-OneSide with importance weights, whose gradient is PPO's for advantages that are not divided."""

from __future__ import annotations

from jaxrl_llm.objective import clip_masks
from tests.objective.official import lib, trinity_core

PATHS = (
  'trinity/algorithm/policy_loss_fn/rec_policy_loss.py',
  'trinity/algorithm/advantage_fn/rec_advantage.py',
)
OFFICIAL = lib.Official(*trinity_core.pinned(*PATHS))
SETTINGS = dict(
  advantage='group_centered',
  trust_region=dict(fn='one_side', low=0.2, high=0.2, corrected=True),
  aggregation='token_mean',
)
SEEDS = (0, 1)
MUTANTS = {
  'both signs alike': (
    clip_masks,
    '~beyond(ratio > high, ratio < low, advantage)',
    '(ratio <= high) & (ratio >= low)',
  ),
  'no weight': (clip_masks, 'exp(log_ratio) if corrected else 1.0', '1.0'),
}


def official(torch, read, data):
  how = dict(clip_mode='one-side', weight='importance_sampling', epsilon_low=0.2, epsilon_high=0.2)
  return trinity_core.run(
    torch, read, data, PATHS, ('RECPolicyLossFn', how), ('RECGroupedAdvantage', {})
  )


lib.main(__name__)

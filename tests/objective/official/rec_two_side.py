"""REC-TwoSide without importance weights."""

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
  trust_region=dict(fn='two_side', low=0.2, high=0.2, corrected=False),
  aggregation='token_mean',
)
SEEDS = (0, 1)
MUTANTS = {
  'wider band': (
    clip_masks,
    '(ratio >= low) & (ratio <= high)',
    '(ratio >= low) & (ratio <= 2 * high)',
  ),
  'weights': (clip_masks, 'exp(log_ratio) if corrected else 1.0', 'exp(log_ratio)'),
}


def official(torch, read, data):
  how = dict(clip_mode='two-side', epsilon_low=0.2, epsilon_high=0.2)
  return trinity_core.run(
    torch, read, data, PATHS, ('RECPolicyLossFn', how), ('RECGroupedAdvantage', {})
  )


lib.main(__name__)

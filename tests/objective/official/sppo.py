"""sPPO: its band is 1/(1 + ε) to 1 + ε."""

from __future__ import annotations

from jaxrl_llm.objective import clip_masks
from tests.objective.official import lib, trinity_core

PATHS = (
  'trinity/algorithm/policy_loss_fn/sppo_loss_fn.py',
  'trinity/algorithm/advantage_fn/opmd_advantage.py',
)
OFFICIAL = lib.Official(*trinity_core.pinned(*PATHS))
SETTINGS = dict(
  advantage='group_centered',
  trust_region=dict(fn='two_side', low=3 / 13, high=0.3, corrected=False),
  aggregation='token_mean',
)
IDLE = ('ratio',)  # upside down it is in the same band, and it weighs nothing
MUTANTS = {
  'ratio': (clip_masks, 'exp(log_ratio) if corrected else 1.0', 'exp(log_ratio)'),
  'one side': (clip_masks, 'return (ratio >= low) & (ratio', 'return (ratio >= 0) & (ratio'),
}


def official(torch, read, data):
  return trinity_core.run(
    torch, read, data, PATHS, ('sPPOPolicyLossFn', dict(epsilon=0.3)), ('OPMDGroupAdvantage', {})
  )


lib.main(__name__)

"""CISPO with the clip of its weights on both sides."""

from __future__ import annotations

from jaxrl_llm.objective import trust_region
from tests.objective.official import lib, trinity_core

PATHS = (
  'trinity/algorithm/policy_loss_fn/cispo_policy_loss.py',
  'trinity/algorithm/advantage_fn/opmd_advantage.py',
)
OFFICIAL = lib.Official(*trinity_core.pinned(*PATHS))
SETTINGS = dict(
  advantage='group_centered',
  trust_region=dict(fn='cap_band', low=0.3, high=0.28),
  aggregation='token_mean',
)
MUTANTS = {
  'bounds': (
    trust_region,
    'jnp.clip(exp(log_ratio_BxT), 1 - low, 1 + high)',
    'jnp.clip(exp(log_ratio_BxT), 1 - high, 1 + low)',
  ),
}


def official(torch, read, data):
  return trinity_core.run(
    torch,
    read,
    data,
    PATHS,
    ('CISPOPolicyLossFn', dict(clip_range_low=0.3, clip_range_high=0.28)),
    ('OPMDGroupAdvantage', {}),
  )


lib.main(__name__)

"""AsymRE: REINFORCE from a baseline below the mean."""

from __future__ import annotations

from jaxrl_llm.objective import advantage
from tests.objective.official import lib, trinity_core

PATHS = (
  'trinity/algorithm/policy_loss_fn/opmd_policy_loss.py',
  'trinity/algorithm/advantage_fn/asymre_advantage.py',
)
OFFICIAL = lib.Official(*trinity_core.pinned(*PATHS))
SETTINGS = dict(
  advantage=dict(fn='shifted', shift=-0.1),
  ratio='one',
  trust_region='none',
  aggregation='token_mean',
)
MUTANTS = {
  'sign': (advantage, 'exists) - shift) * exists', 'exists) + shift) * exists'),
}


def official(torch, read, data):
  return trinity_core.run(
    torch,
    read,
    data,
    PATHS,
    ('OPMDPolicyLossFn', dict(tau=0.0)),
    ('ASYMREGroupAdvantage', dict(baseline_shift=-0.1)),
  )


lib.main(__name__)

"""OPMD with the baseline of its paper, τ·log mean e^{R/τ}."""

from __future__ import annotations

from jaxrl_llm.objective import advantage
from tests.objective.official import lib, trinity_core

PATHS = (
  'trinity/algorithm/policy_loss_fn/opmd_policy_loss.py',
  'trinity/algorithm/advantage_fn/opmd_advantage.py',
)
OFFICIAL = lib.Official(*trinity_core.pinned(*PATHS))
SETTINGS = dict(
  advantage=dict(fn='log_mean_exp', temperature=1.0),
  ratio='one',
  trust_region='none',
  aggregation='token_mean',
)
MUTANTS = {
  'factor': (advantage, '/ (1 + temperature) * exists', '* exists'),
  'sum': (
    advantage,
    'jnp.maximum(_mean(jnp.exp(scaled - top), exists), 1e-37)',
    'jnp.maximum(2 * _mean(jnp.exp(scaled - top), exists), 1e-37)',
  ),
}


def official(torch, read, data):
  return trinity_core.run(
    torch,
    read,
    data,
    PATHS,
    ('OPMDPolicyLossFn', dict(tau=1.0)),
    ('OPMDGroupAdvantage', dict(opmd_baseline='logavgexp', tau=1.0)),
  )


lib.main(__name__)

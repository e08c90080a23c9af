"""TOPR as Trinity-RFT does it, with the ratio of tokens; rewards less 0.5, which its baseline may be."""

from __future__ import annotations

from jaxrl_llm.objective import trust_region
from tests.objective.official import lib, trinity_core

PATHS = ('trinity/algorithm/policy_loss_fn/topr_policy_loss.py',)
OFFICIAL = lib.Official(*trinity_core.pinned(*PATHS))
SETTINGS = dict(
  advantage=dict(fn='raw', baseline=0.5),
  ratio='direct',
  trust_region=dict(fn='taper', most=1.0),
  aggregation='token_mean',
)
MUTANTS = {
  'successes': (
    trust_region,
    'jnp.where(tokens.advantage_BxT > 0, 1.0,',
    'jnp.where(tokens.advantage_BxT < 0, 1.0,',
  ),
}


def official(torch, read, data):
  return trinity_core.run(
    torch, read, data, PATHS, ('TOPRPolicyLossFn', {}), lambda x: (x.reward - 0.5)[:, None] * x.mask
  )


lib.main(__name__)

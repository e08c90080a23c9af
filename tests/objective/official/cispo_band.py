"""CISPO as verl counts its bounds."""

from __future__ import annotations

from jaxrl_llm.objective import trust_region
from tests.objective.official import lib, verl_core

OFFICIAL = lib.Official(*verl_core.PINNED)
SETTINGS = dict(trust_region=dict(fn='cap_band', low=0.2, high=0.2), aggregation='token_mean')
MUTANTS = {
  'one side': (
    trust_region,
    'jnp.clip(exp(log_ratio_BxT), 1 - low, 1 + high)',
    'jnp.minimum(exp(log_ratio_BxT), 1 + high)',
  ),
}


def official(torch, read, data):
  return verl_core.policy(torch, read, data, 'cispo', 'grpo', 'token-mean')


lib.main(__name__)

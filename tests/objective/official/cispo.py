"""CISPO without a lower bound, by verl: low = 1."""

from __future__ import annotations

from jaxrl_llm.objective import trust_region
from tests.objective.official import lib, verl_core

OFFICIAL = lib.Official(*verl_core.PINNED)
SETTINGS = dict(trust_region=dict(fn='cap_above', high=4.0), aggregation='token_mean')
MUTANTS = {
  'absolute': (
    trust_region,
    'jnp.minimum(exp(log_ratio_BxT), 1 + high)',
    'jnp.minimum(exp(log_ratio_BxT), high)',
  ),
}


def official(torch, read, data):
  return verl_core.policy(
    torch, read, data, 'cispo', 'grpo', 'token-mean', clip_ratio_low=1.0, clip_ratio_high=4.0
  )


lib.main(__name__)

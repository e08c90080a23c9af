"""SAPO, by verl."""

from __future__ import annotations

from jaxrl_llm.objective import trust_region
from tests.objective.official import lib, verl_core

OFFICIAL = lib.Official(*verl_core.PINNED)
SETTINGS = dict(
  trust_region=dict(fn='sigmoid', temperature=1.0, temperature_negative=1.05),
  aggregation='sequence_mean',
)
MUTANTS = {
  'value for slope': (trust_region, '4 * gate * (1 - gate) * ratio', '4 / tau * gate'),
  'signs': (
    trust_region,
    'tau = jnp.where(advantage > 0, temperature,',
    'tau = jnp.where(advantage < 0, temperature,',
  ),
}


def official(torch, read, data):
  return verl_core.policy(
    torch, read, data, 'sapo', 'grpo', 'seq-mean-token-mean', tau_pos=1.0, tau_neg=1.05
  )


lib.main(__name__)

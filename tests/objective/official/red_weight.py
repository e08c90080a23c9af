"""RED-Weight: REINFORCE whose advantages are multiplied by their exponential, without clip and ratio."""

from __future__ import annotations

from jaxrl_llm.objective import advantage
from tests.objective.official import lib, trinity_core

PATHS = (
  'trinity/algorithm/policy_loss_fn/rec_policy_loss.py',
  'trinity/algorithm/advantage_fn/rec_advantage.py',
)
OFFICIAL = lib.Official(*trinity_core.pinned(*PATHS))
SETTINGS = dict(
  advantage=dict(fn='exp_weighted', temperature=1.0),
  ratio='one',
  trust_region='none',
  aggregation='token_mean',
)
MUTANTS = {
  'sign': (advantage, 'jnp.exp(centered / temperature)', 'jnp.exp(-centered / temperature)'),
  'weight alone': (advantage, 'return centered * jnp.exp(', 'return jnp.exp('),
}


def official(torch, read, data):
  how = dict(clip_mode='none', weight='advantage', temp=1.0)
  return trinity_core.run(
    torch, read, data, PATHS, ('RECPolicyLossFn', how), ('RECGroupedAdvantage', {})
  )


lib.main(__name__)

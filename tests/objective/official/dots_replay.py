"""DOTS with rollout replay: the ratio to the weights that sampled a token, clipped around that of the old policy."""

from __future__ import annotations

import collections

from jaxrl_llm.objective import advantage, importance_correction, trust_region
from tests.objective.official import lib, verl_core

FOLDER = 'rl_training/verl'
OFFICIAL = lib.Official(
  'ASTRAL-Group/data-efficient-llm-rl',
  '59df9187b7786c0058316f886b77c13c8608c533',
  (f'{FOLDER}/{verl_core.CORE}', f'{FOLDER}/{verl_core.FUNCTIONAL}'),
  'Apache-2.0',
)
SETTINGS = dict(
  importance_correction='token',
  trust_region=dict(fn='clip', low=0.2, high=0.2),
  aggregation='token_mean',
)
SEEDS = (0, 1)
MUTANTS = {
  'upside down': (
    importance_correction,
    'tokens.old_BxT - tokens.behavior_BxT',
    'tokens.behavior_BxT - tokens.old_BxT',
  ),
  'clipped around one': (
    importance_correction,
    'return exp(_log_rho(tokens)), jnp.ones_like(tokens.logp_BxT)',
    'return jnp.ones_like(tokens.logp_BxT), jnp.ones_like(tokens.logp_BxT)',
  ),
  'lower bound': (
    trust_region,
    'return clip_masks.clip(log_ratio_BxT, tokens.advantage_BxT, 1 - low, 1 + high)',
    'return clip_masks.clip(log_ratio_BxT, tokens.advantage_BxT, 1 - 2 * low, 1 + high)',
  ),
  'biased std': (
    advantage,
    'jnp.maximum(n_Px1 - 1, 1))\n  return centered',
    'jnp.maximum(n_Px1, 1))\n  return centered',
  ),
}


def official(torch, read, data):
  """`old_log_prob` of that code is of the policy that sampled; `temp_log_prob` is of the old policy."""
  x = lib.tensors(torch, data)
  means = lib.functions(read(f'{FOLDER}/{verl_core.FUNCTIONAL}'), ('masked_mean',), torch=torch)
  core = lib.functions(
    read(f'{FOLDER}/{verl_core.CORE}'),
    ('compute_policy_loss_temp', 'compute_grpo_outcome_advantage'),
    torch=torch,
    verl_F=means,
    defaultdict=collections.defaultdict,
  )
  a_BxT = core.compute_grpo_outcome_advantage(verl_core.at_the_end(x), x.mask, x.uid)[0]
  loss, *_ = core.compute_policy_loss_temp(x.behavior, x.logp, a_BxT, x.mask, 0.2, x.old)
  return lib.outputs(x, loss)


lib.main(__name__)

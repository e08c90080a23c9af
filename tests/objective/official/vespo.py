"""VESPO: the policy loss of its own repository."""

from __future__ import annotations

from jaxrl_llm.objective import trust_region
from tests.objective.official import lib, verl_core

OFFICIAL = lib.Official(
  'FloyedShen/VESPO',
  'aa1f3045c3462bba07518dc112693a8bb3183ed2',
  ('recipe/vespo/code/core_algos.py', verl_core.CORE, verl_core.FUNCTIONAL),
  'Apache-2.0',
)
SETTINGS = dict(
  ratio='product',
  trust_region=dict(fn='gamma', power=2.0, decay=3.0, power_negative=3.0, decay_negative=2.0),
  aggregation='token_mean',
)
MUTANTS = {
  'sides': (trust_region, 'up = tokens.advantage_BxT >= 0', 'up = tokens.advantage_BxT <= 0'),
  'not 1 at 1': (trust_region, 'jnp.exp(rate + k * log_w', 'jnp.exp(k * log_w'),
  'linear': (trust_region, 'rate * jnp.exp(log_w))', 'rate * log_w)'),
}


def official(torch, read, data):
  x = lib.tensors(torch, data)
  core = verl_core.core(torch, read, 'agg_loss', 'compute_grpo_outcome_advantage')
  code = lib.functions(
    read(OFFICIAL.paths[0]), ('compute_policy_loss_vespo',), torch=torch, agg_loss=core.agg_loss
  )
  config = verl_core.Numbers(policy_loss={})
  a = verl_core.grpo(core, x)
  loss, _ = code.compute_policy_loss_vespo(x.old, x.logp, a, x.mask, 'token-mean', config)
  return lib.outputs(x, loss)


lib.main(__name__)

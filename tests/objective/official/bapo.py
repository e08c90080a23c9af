"""BAPO: the policy loss of the recipe, with the recipe's numbers."""

from __future__ import annotations

from jaxrl_llm.objective import clip_masks, trust_region
from tests.objective.official import lib, verl_core

OFFICIAL = lib.Official(
  'WooooDyy/BAPO',
  '7287044444d5d578529ea464b45f090a36e8da3a',
  ('recipe/bapo/policy_loss.py', verl_core.CORE, verl_core.FUNCTIONAL),
  'none stated',
)
SETTINGS = dict(
  trust_region=dict(fn='balanced_clip', target=1.0, most=3.0), aggregation='token_mean'
)
SEEDS = (0, 2, 11, 27)  # bounds that end at the last, the first and two others of the search
MUTANTS = {
  'lower bound': (trust_region, '[0.8] * 17', '[0.7] * 17'),
  'largest upper bound': (trust_region, '1.2 + 0.05 * i', '1.2 + 0.1 * i'),
  'gains for losses': (trust_region, '>= target * (loss', '<= target * (loss'),
  'dual clip': (clip_masks, '(ratio > most)', '(ratio > 2 * most)'),
}


def official(torch, read, data):
  x = lib.tensors(torch, data)
  core = verl_core.core(torch, read, 'agg_loss', 'compute_grpo_outcome_advantage')
  names = ('_compute_effective_advantage', '_append_metric', 'compute_policy_loss_bapo')
  code = lib.functions(
    read(OFFICIAL.paths[0]), names, torch=torch, verl_F=core.verl_F, agg_loss=core.agg_loss
  )
  limits = verl_core.Numbers(
    ratio_lower_start=0.6, ratio_lower_max=0.8, ratio_lower_step=0.05, ratio_upper_start=1.2,
    ratio_upper_max=2.0, ratio_upper_step=0.05, adv_ratio_target=1.0, eps=1e-8,
  )  # fmt: skip
  config = verl_core.Numbers(policy_loss=limits, clip_ratio_c=3.0)
  loss, *_ = code.compute_policy_loss_bapo(
    x.old, x.logp, verl_core.grpo(core, x), x.mask, 'token-mean', config
  )
  return lib.outputs(x, loss, verl_core.without_epsilon(x, 'token-mean'))


lib.main(__name__)

"""RLEP: a later minibatch of a batch with replayed rows, whose old log-probs were scored before the first of them."""

from __future__ import annotations

import numpy as np

from jaxrl_llm import objective
from jaxrl_llm.objective import advantage, clip_masks, replayed_log_probs, trust_region
from tests.objective.official import lib, verl_core

OFFICIAL = lib.Official(
  'Kwai-Klear/RLEP',
  'c15e5b44056858b055d2066905f53a9b9baaa5a4',
  (verl_core.CORE, verl_core.FUNCTIONAL),
  'Apache-2.0',
)
SETTINGS = dict(
  trust_region=dict(fn='dual_clip', low=0.2, high=0.28, most=10.0), aggregation='token_mean'
)
SEEDS = (0, 1, 2)
MUTANTS = {
  'replayed rows as recorded': (
    replayed_log_probs,
    'jnp.where(replayed > 0, before_BxT',
    'jnp.where(replayed > 2, before_BxT',
  ),
  'another old policy': (
    replayed_log_probs,
    'jnp.where(replayed > 0, before_BxT',
    'jnp.where(replayed > -1, before_BxT + 0.1',
  ),
  'ratio of one': (
    replayed_log_probs,
    'rollout=batch.rollout._replace(logp_BxT=logp_BxT), replayed_B=None',
    'rollout=batch.rollout._replace(logp_BxT=logp_BxT)',
  ),
  'no dual clip': (clip_masks, '(ratio > most)', '(ratio > 1e9)'),
  'upper bound': (
    trust_region,
    'return clip_masks.clip(log_ratio_BxT, tokens.advantage_BxT, 1 - low, 1 + high)',
    'return clip_masks.clip(log_ratio_BxT, tokens.advantage_BxT, 1 - low, 1 + low)',
  ),
  'biased std': (
    advantage,
    'jnp.maximum(n_Px1 - 1, 1))\n  return centered',
    'jnp.maximum(n_Px1, 1))\n  return centered',
  ),
}


def draw(seed):
  """As everywhere, some rows replayed successes, and tokens of wrong answers grown more than tenfold likelier."""
  data = lib.draw(seed)
  data['replayed'] = np.zeros(lib.B)
  for row in (2 * lib.G - 1, 2 * lib.G, 4 * lib.G + 1):
    data['replayed'][row], data['correct'][row] = 1, 1
  data['reward'] = data['correct'].copy()
  data['old'][0, 3] = np.round(
    data['logp'][0, 3] - 0.215, 4
  )  # a ratio of 1.24, between the two bounds
  for place in ((1, 1), (9, 1), (10, 1)):
    data['length'][place[0]] = lib.T
    data['old'][place] = np.round(data['logp'][place] - 2.6, 4)
  return data


def official(torch, read, data):
  x = lib.tensors(torch, data)
  core = verl_core.core(
    torch, read, 'compute_policy_loss', 'agg_loss', 'compute_grpo_outcome_advantage'
  )
  loss, *_ = core.compute_policy_loss(
    x.old, x.logp, verl_core.grpo(core, x), x.mask, cliprange_low=0.2, cliprange_high=0.28, clip_ratio_c=10.0
  )  # fmt: skip
  return lib.outputs(x, loss, verl_core.without_epsilon(x, 'token-mean'))


def ours(data):
  """Nobody recorded log-probs of replayed rows: they are 0 until the update scores them."""
  method = objective.method(lib.settings(SETTINGS))
  batch = lib.batch(data, needs_old=False)
  recorded = np.where(data['replayed'][:, None] > 0, 0.0, batch.rollout.logp_BxT)
  batch = batch._replace(
    rollout=batch.rollout._replace(logp_BxT=recorded), replayed_B=data['replayed']
  )
  target = objective.targets(method, objective.fill_replayed_log_probs(batch, data['old']), lib.G)
  return dict(gradient=-np.asarray(objective.coefficients(method, target, data['logp'])[0]))


lib.main(__name__)

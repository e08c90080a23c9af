"""The optimal token baseline, by verl, with its clipped loss; without and with its treatment of the longest row."""

from __future__ import annotations

import numpy as np

from jaxrl_llm import objective
from jaxrl_llm.objective import advantage_modulation
from tests.objective.official import entropy_core, lib, verl_core

OFFICIAL = lib.Official(*verl_core.PINNED)
SETTINGS = dict(
  advantage='raw',
  advantage_modulation='token_baseline',
  trust_region=dict(fn='clip', low=0.2, high=0.2),
  aggregation='token_mean',
)
MUTANTS = {
  'energy of one token': (
    advantage_modulation,
    'jnp.cumsum(energy_BxT * mask_BxT, axis=1)',
    '(energy_BxT)',
  ),
  'probability once': (advantage_modulation, '1 - 2 * jnp.exp', '1 - 1 * jnp.exp'),
  'no squares': (advantage_modulation, '+ present(tokens.collision_BxT)', '+ 0'),
  'tail of every row': (
    advantage_modulation,
    'group_sum(mask_BxT, group_B) < 2',
    'group_sum(mask_BxT, group_B) < 3',
  ),
}


def draw(seed):
  """Draws with logits, where the policy is the one before the batch; graded rewards."""
  data, r = entropy_core.draw(seed), np.random.default_rng((seed, 5))
  data['reward'] = np.round(data['correct'] + 0.3 * r.random(lib.B), 4)
  p = np.exp(data['logits'])
  p /= p.sum(-1, keepdims=True)
  data['collision'] = (p**2).sum(-1)
  data['length'][4 * lib.G : 5 * lib.G] = [2, 6, 4, 3]
  return data


def official(torch, read, data):
  out = {}
  for name, cut in (('gradient', False), ('gradient_cut', True)):
    x = lib.tensors(torch, data)
    code = verl_core.core(
      torch, read, 'compute_optimal_token_baseline_advantage', 'compute_policy_loss', 'agg_loss'
    )
    a_BxT = code.compute_optimal_token_baseline_advantage(
      verl_core.at_the_end(x), x.mask, x.uid, x.logp.detach(), x.collision, handle_zero_tail=cut
    )[0]
    value = code.compute_policy_loss(
      x.old, x.logp, a_BxT, x.mask, cliprange=0.2, clip_ratio_c=1e9, loss_agg_mode='token-mean'
    )[0]
    out[name] = lib.outputs(x, value)['gradient']
  return out


def ours(data):
  out = {}
  for name, cut in (('gradient', False), ('gradient_cut', True)):
    how = dict(advantage_modulation=dict(fn='token_baseline', cut_tail=cut))
    method = objective.method(lib.settings(SETTINGS | how))
    target = objective.targets(method, lib.batch(data, needs_old=False), lib.G)
    c_BxT, _ = objective.coefficients(method, target, data['logp'], collision_BxT=data['collision'])
    out[name] = -np.asarray(c_BxT)
  return out


lib.main(__name__)

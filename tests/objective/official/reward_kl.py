"""KL penalties in the reward, by verl: GRPO on scores minus a multiple of k1; its other estimators, too."""

from __future__ import annotations

from jaxrl_llm.objective import policy_gradient, reward_kl
from tests.objective.official import lib, verl_core

OFFICIAL = lib.Official(*verl_core.PINNED_WITH_TRAINER)
SETTINGS = dict(
  reward_kl=dict(fn='k1', coef=0.3),
  trust_region=dict(fn='clip', low=0.2, high=0.2),
  aggregation='token_mean',
)
KINDS = dict(k1='kl', k2='mse', k3='low_var_kl', absolute='abs')  # ours → verl's
MUTANTS = {
  'sign': (policy_gradient, 'reward_PxG -= gather(pen', 'reward_PxG += gather(pen'),
  'the first token alone': (policy_gradient, 'penalty_BxT.sum(1))', 'penalty_BxT[:, 0])'),
  'k2 without the half': (reward_kl, '** 2 / 2', '** 2 / 1'),
  'k3 the other way': (reward_kl, '(exp(-d) + d - 1)', '(exp(d) - d - 1)'),
  'signed': (reward_kl, 'coef * jnp.abs(', 'coef * ('),
}


def official(torch, read, data):
  out = {}
  for ours_, kind in KINDS.items():
    x = lib.tensors(torch, data)
    code = verl_core.core(
      torch, read, 'compute_grpo_outcome_advantage', 'compute_policy_loss', 'agg_loss'
    )
    reward_BxT = verl_core.penalized(torch, read, x, kind, 0.3)
    a_BxT = code.compute_grpo_outcome_advantage(reward_BxT, x.mask, x.uid)[0]
    value = code.compute_policy_loss(
      x.old, x.logp, a_BxT, x.mask, cliprange=0.2, clip_ratio_c=1e9, loss_agg_mode='token-mean'
    )[0]
    out[ours_] = lib.outputs(x, value)['gradient']
  return out


def ours(data):
  return {
    kind: lib.gradient(SETTINGS | dict(reward_kl=dict(fn=kind, coef=0.3)), data)['gradient']
    for kind in KINDS
  }


lib.main(__name__)

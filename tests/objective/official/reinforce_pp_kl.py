"""REINFORCE++ itself, by verl: discounted returns of a reward with a KL penalty at every token, whitened."""

from __future__ import annotations

from jaxrl_llm.objective import credit_assignment, reward_kl
from tests.objective.official import lib, verl_core

OFFICIAL = lib.Official(*verl_core.PINNED_WITH_TRAINER)
SETTINGS = dict(
  advantage='raw',
  reward_kl=dict(fn='k1', coef=0.3),
  credit_assignment=dict(fn='return_whitened', discount=0.9),
  trust_region=dict(fn='clip', low=0.2, high=0.2),
  aggregation='token_mean',
)
MUTANTS = {
  'no penalty': (
    credit_assignment,
    'reward_BxT -= inputs.penalty_BxT\n  return_BxT',
    'pass\n  return_BxT',
  ),
  'the reward at every token': (
    credit_assignment,
    'mask_BxT * (ahead_BxT == 0)\n  if',
    'mask_BxT\n  if',
  ),
  'reference over policy': (
    reward_kl,
    'return coef * (old_BxT - reference_BxT)\n\n',
    'return coef * (reference_BxT - old_BxT)\n\n',
  ),
}


def official(torch, read, data):
  x = lib.tensors(torch, data)
  code = verl_core.core(
    torch, read, 'compute_reinforce_plus_plus_outcome_advantage', 'compute_policy_loss', 'agg_loss'
  )
  reward_BxT = verl_core.penalized(torch, read, x, 'kl', 0.3)
  a_BxT = code.compute_reinforce_plus_plus_outcome_advantage(
    reward_BxT, x.mask, config=verl_core.Numbers(gamma=0.9)
  )[0]
  value = code.compute_policy_loss(
    x.old, x.logp, a_BxT, x.mask, cliprange=0.2, clip_ratio_c=1e9, loss_agg_mode='token-mean'
  )[0]
  return lib.outputs(x, value)


lib.main(__name__)

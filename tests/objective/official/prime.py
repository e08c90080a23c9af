"""PRIME: token rewards and outcomes of its own repository, from a reward model's log-ratios to the clipped loss."""

from __future__ import annotations

import types

from jaxrl_llm.objective import credit_assignment
from tests.objective.official import lib, verl_core

CORE = 'training/' + verl_core.CORE
FUNCTIONAL = 'training/' + verl_core.FUNCTIONAL
REWARDS = 'training/verl/workers/actor/dp_prime.py'
OFFICIAL = lib.Official(
  'PRIME-RL/PRIME',
  '18ad596f08d487bb546d80d738d99ec697bd2e75',
  (CORE, FUNCTIONAL, REWARDS),
  'Apache-2.0',
)
SETTINGS = dict(
  advantage='leave_one_out',
  credit_assignment=dict(fn='process', process=1.0, outcome=1.0),
  auxiliary_model=dict(fn='outcome', learning_rate=1e-6, beta=0.05),
  trust_region=dict(fn='clip', low=0.2, high=0.2),
  aggregation='token_mean',
)
IDLE = (
  'auxiliary_model.learning_rate',
  'auxiliary_model.beta',
)  # of the reward model's own training
MUTANTS = {
  'what was': (
    credit_assignment,
    'row_sum(x_BxT, mask_BxT) - jnp.cumsum(x_BxT, axis=1) + x_BxT',
    'jnp.cumsum(x_BxT, axis=1)',
  ),
  'not bounded': (credit_assignment, 'jnp.abs(_ahead(q_BxT, mask_BxT)).max() + 1e-6', '1.0'),
  'biased': (credit_assignment, 'jnp.maximum(n_B - 1, 1)\n  step', 'jnp.maximum(n_B, 1)\n  step'),
}


def draw(seed):
  """Groups are whole or empty: the official code has a fixed number of answers to each prompt."""
  data = lib.draw(seed)
  data['length'][2] = 3
  data['length'][3 * lib.G : 4 * lib.G] = 0
  return data


def official(torch, read, data):
  x = lib.tensors(torch, data)
  means = lib.functions(read(FUNCTIONAL), verl_core.MEANS, torch=torch)
  names = ('compute_rloo_returns', 'compute_policy_loss')
  code = lib.functions(read(CORE), names, torch=torch, verl_F=means)
  reward = types.SimpleNamespace(prime_norm='batch_norm')
  space = dict(
    torch=types.SimpleNamespace(cumsum=torch.cumsum, cuda=_Idle(), distributed=_Idle()),
    self=types.SimpleNamespace(config=reward),
    token_level_scores=x.process * x.mask,
  )
  exec(lib.branch(read(REWARDS), "self.config.prime_norm == 'batch_norm'"), space)
  batch = dict(
    responses=torch.zeros_like(x.mask),
    prompts=torch.zeros(len(x.mask), 0),
    attention_mask=x.mask.long(),
    rm_scores=space['token_level_scores'],
    gt_scores=verl_core.at_the_end(x),
  )
  gammas = types.SimpleNamespace(reward_model_gamma=1.0, verifier_gamma=1.0)
  config = types.SimpleNamespace(algorithm=types.SimpleNamespace(adv_params=gammas))
  data = types.SimpleNamespace(batch=batch)
  a_BxT, _ = code.compute_rloo_returns(data, x.mask, lib.G, config)
  loss, *_ = code.compute_policy_loss(x.old, x.logp, a_BxT, x.mask, 0.2)
  return lib.outputs(x, loss)


class _Idle:
  """Has nothing to do."""

  def __getattr__(self, name):
    return lambda *_, **__: None


lib.main(__name__)

"""R3L: OPMD with amplified advantages of good rollouts, and the KL penalty of its algorithm type."""

from __future__ import annotations

import numpy as np

from jaxrl_llm.objective import advantage, kl
from tests.objective.official import lib, trinity_core

PINNED = ('shiweijiezero/R3L', 'd503f6c6b0725a4e8a39311e6f9b71de6bb2f64b')
POLICY = 'trinity/algorithm/policy_loss_fn/opmd_policy_loss.py'
ADVANTAGE = 'trinity/algorithm/advantage_fn/opmd_advantage.py'
KL = 'trinity/algorithm/kl_fn/kl_fn.py'
OFFICIAL = lib.Official(*PINNED, (POLICY, ADVANTAGE, KL, trinity_core.UTILS), 'Apache-2.0')
SETTINGS = dict(
  advantage=dict(fn='amplified', right=1.0, factor=3.0, temperature=1.0),
  ratio='one',
  trust_region='none',
  kl=dict(fn='k2', coef=0.001),
  aggregation='token_mean',
)
MUTANTS = {
  'above the limit alone': (advantage, 'reward_PxG >= right', 'reward_PxG > right'),
  'amplified below the mean': (advantage, 'jnp.where(off >= 0, factor', 'jnp.where(off < 0, factor'),
  'a lone row has its own mean': (advantage, 'keepdims=True) < 2', 'keepdims=True) < 1'),
  'no regularization': (advantage, '* exists / (1 + temperature)', '* exists'),
  'upside down': (kl, 'return coef * d, d**2 / 2', 'return -coef * d, d**2 / 2'),
}  # fmt: skip


def draw(seed):
  """As `lib.draw`, with graded rewards on both sides of the mean and from 1 up, and a group of a lone row."""
  data = lib.draw(seed)
  graded = np.round(np.random.default_rng((seed, 1)).uniform(0.1, 0.9, lib.B), 4)
  reward_B = np.where(data['correct'] > 0, 1.0, graded)
  reward_B[[8, 9, 10, 11]] = [0.2, 0.6, 0.5, 0.3]  # no row reaches 1
  reward_B[[4, 17]] = [1.25, 1.0]
  data['length'][13:16] = 0
  return data | dict(reward=reward_B)


def official(torch, read, data):
  x = lib.tensors(torch, data)
  names = ('masked_loss', 'masked_sum', 'masked_mean')
  utils = vars(lib.functions(read(trinity_core.UTILS), names, torch=torch))
  base = trinity_core.Base
  stand_ins = dict(torch=trinity_core.Wide(torch), PolicyLossFn=base, GroupAdvantage=base)
  kind, name = lib.functions, 'OPMDReweightAdvGroupAdvantage'
  estimator = getattr(kind(read(ADVANTAGE), (name,), **stand_ins), name)
  loss = kind(read(POLICY), ('OPMDPolicyLossFn',), **stand_ins, **utils).OPMDPolicyLossFn
  abstract = dict(ABC=object, abstractmethod=lambda method: method)
  penalty = kind(read(KL), ('KLFn', 'K2Fn'), **abstract, **utils).K2Fn
  a_BxT = trinity_core.advantages(torch, estimator(**estimator.default_args()), x)
  value, _ = loss(**loss.default_args())(logprob=x.logp, action_mask=x.mask, advantages=a_BxT)
  kl_loss, _ = penalty(**penalty.default_args()).calculate_kl_loss(x.logp, x.reference, x.mask)
  return lib.outputs(x, value + kl_loss, (x.mask.sum() + 1e-8) / x.mask.sum())


lib.main(__name__)

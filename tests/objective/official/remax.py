"""ReMax, by verl: the reward of the first row of each group is the baseline of the others."""

from __future__ import annotations

import numpy as np

from jaxrl_llm.objective import advantage, policy_gradient
from tests.objective.official import lib, verl_core

OFFICIAL = lib.Official(*verl_core.PINNED)
SETTINGS = dict(
  advantage='greedy_baseline', ratio='one', trust_region='none', aggregation='token_mean'
)
MUTANTS = {
  'learned baseline': (policy_gradient, '(jnp.arange(B) % rollouts > 0)', '(jnp.arange(B) >= 0)'),
  'the last row': (advantage, 'reward_PxG - reward_PxG[:, :1]', 'reward_PxG - reward_PxG[:, -1:]'),
}


def official(torch, read, data):
  x = lib.tensors(torch, data)
  names = ('compute_remax_outcome_advantage', 'compute_policy_loss_gpg', 'agg_loss')
  code = verl_core.core(torch, read, *names, ActorConfig=verl_core.Numbers)
  first = np.flatnonzero(x.exists) % lib.G == 0
  baseline = torch.tensor(data['reward'][:: lib.G][x.uid])
  mask = x.mask * torch.tensor(~first)[:, None]
  a_BxT = code.compute_remax_outcome_advantage(verl_core.at_the_end(x), baseline, mask)[0]
  how = verl_core.Numbers(global_batch_info={})
  value, _ = code.compute_policy_loss_gpg(x.old, x.logp, a_BxT, mask, 'token-mean', how)
  return lib.outputs(x, value)


lib.main(__name__)

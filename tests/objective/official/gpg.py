"""GPG, by verl: its advantage and its loss without a ratio."""

from __future__ import annotations

from jaxrl_llm.objective import advantage
from tests.objective.official import lib, verl_core

OFFICIAL = lib.Official(*verl_core.PINNED)
SETTINGS = dict(
  advantage=dict(fn='rescaled', scale=1.6),
  ratio='one',
  trust_region='none',
  aggregation='token_mean',
)
MUTANTS = {
  'empty rows count': (advantage, 'gain = exists.sum()', 'gain = exists.size'),
  'positive rewards alone': (advantage, '(exists * (reward_PxG != 0)).sum()', '(exists * (reward_PxG > 1)).sum()'),
}  # fmt: skip


def official(torch, read, data):
  x = lib.tensors(torch, data)
  names = ('compute_gpg_outcome_advantage', 'compute_policy_loss_gpg', 'agg_loss')
  code = verl_core.core(torch, read, *names, ActorConfig=verl_core.Numbers)
  a_BxT = code.compute_gpg_outcome_advantage(
    verl_core.at_the_end(x), x.mask, index=x.uid, f_norm=1.6
  )[0]
  how = verl_core.Numbers(global_batch_info={})
  value, _ = code.compute_policy_loss_gpg(x.old, x.logp, a_BxT, x.mask, 'token-mean', how)
  return lib.outputs(x, value)


lib.main(__name__)

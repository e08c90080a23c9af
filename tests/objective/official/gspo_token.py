"""GSPO-token, by verl: GSPO's loss in its form for tokens, with the advantages of REINFORCE++, which differ in a row."""

from __future__ import annotations

from jaxrl_llm.objective import ratio
from tests.objective.official import lib, verl_core

OFFICIAL = lib.Official(*verl_core.PINNED)
SETTINGS = dict(
  advantage='raw',
  credit_assignment=dict(fn='return_whitened', discount=0.7),
  ratio='sequence',
  trust_region=dict(fn='clip', low=0.12, high=0.08),
  aggregation='sequence_mean',
)
MUTANTS = {
  'ratio of tokens': (
    ratio,
    'return _spread(row_mean(token(tokens), tokens.mask_BxT), tokens)',
    'return token(tokens)',
  ),
}


def official(torch, read, data):
  x = lib.tensors(torch, data)
  names = ('compute_reinforce_plus_plus_outcome_advantage', 'compute_policy_loss_gspo', 'agg_loss')
  code = verl_core.core(torch, read, *names, ActorConfig=verl_core.Numbers)
  a_BxT = code.compute_reinforce_plus_plus_outcome_advantage(
    verl_core.at_the_end(x), x.mask, config=verl_core.Numbers(gamma=0.7)
  )[0]
  how = verl_core.Numbers(
    clip_ratio=0.2, clip_ratio_low=0.12, clip_ratio_high=0.08, global_batch_info={}
  )
  value, _ = code.compute_policy_loss_gspo(x.old, x.logp, a_BxT, x.mask, config=how)
  mode = 'seq-mean-token-mean'
  return lib.outputs(x, value, verl_core.without_epsilon(x, mode))


lib.main(__name__)

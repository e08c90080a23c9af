"""Dr.GRPO, by verl: rewards less the mean of the group, and a denominator of as many tokens as a row may have.

verl's denominator at this commit leaves out the number of rows, by which its gradient is divided here.
"""

from __future__ import annotations

from jaxrl_llm.objective import aggregation
from tests.objective.official import lib, verl_core

OFFICIAL = lib.Official(*verl_core.PINNED)
SETTINGS = dict(
  advantage='group_centered',
  trust_region=dict(fn='clip', low=0.2, high=0.2),
  aggregation='fixed',
)
MUTANTS = {
  'tokens of the row': (
    aggregation,
    'return mask_BxT / (max_tokens * _rows(mask_BxT))',
    'return mask_BxT / (mask_BxT.sum(1, keepdims=True) * _rows(mask_BxT) + 1e-30)',
  ),
}


def official(torch, read, data):
  x = lib.tensors(torch, data)
  code = verl_core.core(
    torch, read, 'compute_grpo_outcome_advantage', 'compute_policy_loss', 'agg_loss'
  )
  a_BxT = verl_core.grpo(code, x, norm_adv_by_std_in_grpo=False)
  value = code.compute_policy_loss(
    x.old, x.logp, a_BxT, x.mask, cliprange=0.2, clip_ratio_c=1e9,
    loss_agg_mode='seq-mean-token-sum-norm',
  )[0]  # fmt: skip
  return lib.outputs(x, value, 1 / len(x.uid))


lib.main(__name__)

"""Rejection of tokens and rows by k2 and k3, by verl: its masks on a clipped loss, whose denominator keeps all tokens."""

from __future__ import annotations

import math

from jaxrl_llm.objective import importance_correction
from tests.objective.official import lib, verl_core

CORRECTION = 'verl/trainer/ppo/rollout_corr_helper.py'
OFFICIAL = lib.Official(
  *verl_core.PINNED[:2], (verl_core.CORE, verl_core.FUNCTIONAL, CORRECTION), 'Apache-2.0'
)
SETTINGS = dict(
  importance_correction=dict(fn='sequence_divergence', estimator='k3', reduction='mean', most=0.02),
  trust_region=dict(fn='clip', low=0.2, high=0.2),
  aggregation='token_mean',
)
# verl's option → its bound
OPTIONS = {
  'token_k2': 0.02, 'token_k3': 0.02, 'seq_sum_k2': 0.06, 'seq_sum_k3': 0.06, 'seq_mean_k2': 0.02,
  'seq_mean_k3': 0.02, 'seq_max_k2': 0.03, 'seq_max_k3': 0.03,
}  # fmt: skip
MUTANTS = {
  'no half': (importance_correction, 'log_rho**2 / 2', 'log_rho**2'),
  'the other way': (importance_correction, 'exp(log_rho) - 1 - log_rho', 'exp(-log_rho) - 1 + log_rho'),
  'mean for the sum': (importance_correction, 'sum=row_sum(each', 'sum=row_mean(each'),
  'the first for the max': (importance_correction, '0.0).max(1, keepdims=True)', '0.0)[:, :1]'),
}  # fmt: skip


def official(torch, read, data):
  means = lib.functions(read(verl_core.FUNCTIONAL), verl_core.MEANS, torch=torch)
  code = lib.functions(
    read(CORRECTION), ('compute_rollout_rejection_mask', '_parse_rollout_rs_thresholds'), torch=torch, math=math,
    verl_F=means, SAFETY_BOUND=20.0, SUPPORTED_ROLLOUT_RS_OPTIONS=set(OPTIONS),
    TOKEN_LEVEL_ROLLOUT_RS_OPTIONS={'token_k2', 'token_k3'}, compute_rs_metrics=lambda **_: {},
  )  # fmt: skip
  out = {}
  for option, bound in OPTIONS.items():
    x = lib.tensors(torch, data)
    core = verl_core.core(torch, read, 'compute_grpo_outcome_advantage', 'compute_policy_loss', 'agg_loss')  # fmt: skip
    kept, _ = code.compute_rollout_rejection_mask(x.old - x.behavior, x.mask, option, bound)
    value = core.compute_policy_loss(
      x.old, x.logp, verl_core.grpo(core, x), kept, cliprange=0.2, clip_ratio_c=1e9,
      loss_agg_mode='token-mean',
    )[0]  # fmt: skip
    assert 0 < kept.sum() < x.mask.sum(), option
    out[option] = lib.outputs(x, value, kept.sum() / x.mask.sum())['gradient']
  return out


def ours(data):
  out = {}
  for option, bound in OPTIONS.items():
    level, *reduction, estimator = option.split('_')
    how = dict(fn='token_divergence', estimator=estimator, most=bound)
    if level == 'seq':
      how |= dict(fn='sequence_divergence', reduction=reduction[0])
    changed = SETTINGS | dict(importance_correction=how)
    out[option] = lib.gradient(changed, data)['gradient']
  return out


lib.main(__name__)

"""Clip-Cov, by verl: the mean of its gradient over all draws of the tokens that it drops.

A tenth of the tokens in place of 0.0002, which is one of these few, and a wide band. Every rotation of the candidates
is one draw in which each of them comes once to each place, so that their mean is that of all draws.
"""

from __future__ import annotations

import types

import numpy as np

from jaxrl_llm.objective import token_weighting
from tests.objective.official import lib, verl_core

OFFICIAL = lib.Official(*verl_core.PINNED)
SETTINGS = dict(
  token_weighting=dict(fn='covariance_clip', share=0.1, low=0.05, high=1.0),
  trust_region=dict(fn='clip', low=0.2, high=0.2),
  aggregation='token_mean',
)
MUTANTS = {
  'clipped tokens in the band': (token_weighting, '& ~present(tokens.clipped_BxT)', '& (tokens.mask_BxT > 0)'),
  'no upper end': (token_weighting, '& (covariance < high)', '& (covariance < 9 * high)'),
  'not whole': (token_weighting, 'jnp.floor(share * tokens.mask_BxT.sum() + 1e-4)', 'share * tokens.mask_BxT.sum()'),
  'kept': (token_weighting, '1 - jnp.minimum(dropped', 'jnp.minimum(dropped'),
}  # fmt: skip


class _Rotated:
  """torch, whose random permutation of n is the identity turned by `shift`; it notes n."""

  def __init__(self, torch, shift):
    self.torch, self.shift, self.count = torch, shift, 1

  def __getattr__(self, name):
    return getattr(self.torch, name)

  def randperm(self, n):
    self.count = n
    return (self.torch.arange(n) + self.shift) % n


def _turned(torch, read, data, shift):
  limits = verl_core.Numbers(clip_cov_ratio=0.1, clip_cov_lb=0.05, clip_cov_ub=1.0)
  turned = _Rotated(torch, shift)
  result = verl_core.policy(
    torch, read, data, 'clip_cov', 'grpo', 'token-mean', module=turned, policy_loss=limits
  )
  return types.SimpleNamespace(**result, count=turned.count)


def official(torch, read, data):
  count = _turned(torch, read, data, 0).count
  draws = [_turned(torch, read, data, shift) for shift in range(count)]
  mean = lambda name: np.mean([getattr(d, name) for d in draws], axis=0)  # noqa: E731
  return dict(loss=float(mean('loss')), gradient=mean('gradient'))


lib.main(__name__)

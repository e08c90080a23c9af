"""Pass@k Training: the advantages of its own code with a clipped loss, for k = 2 and k = 3."""

from __future__ import annotations

import numpy as np

from jaxrl_llm.objective import advantage
from tests.objective.official import lib

PATH = 'code/passk_adv.py'
OFFICIAL = lib.Official(
  'RUCAIBox/Passk_Training', 'c3ba575ecb31f47fd9f5c43b18c081d4a295f783', (PATH,), 'none stated'
)
SETTINGS = dict(
  advantage=dict(fn='pass_at_k', k=2),
  trust_region=dict(fn='clip', low=0.2, high=0.2),
  aggregation='token_mean',
)
SEEDS = (0, 1)
KS = (2, 3)
MUTANTS = {
  'no wrong row of its own': (advantage, 'n_Px1 - 1, k - 1)', 'n_Px1 - 1, k)'),
  'spread of the rate': (advantage, 'missed_Px1 * (1 - missed_Px1)', 'missed_Px1'),
  'with replacement': (
    advantage,
    'left_Pxk = jnp.maximum(count_Px1 - drawn_1xk, 0)',
    'left_Pxk = jnp.maximum(count_Px1 - 0 * drawn_1xk, 0)',
  ),
  'right and wrong swapped': (
    advantage,
    'jnp.where(good > 0, missed',
    'jnp.where(good < 1, missed',
  ),
}


def official(torch, read, data):
  text = read(PATH)
  # its import of scipy's binomial coefficient, for whole numbers
  from math import comb

  def binomial(n, k):
    return comb(int(n), int(k)) if n >= 0 else 0

  code = lib.functions(
    text, ('calc_adv', 'compute_advantage'), torch=torch, np=np, comb=binomial, print=lambda *_: None,
    defaultdict=__import__('collections').defaultdict,
  )  # fmt: skip
  out = {}
  for k in KS:
    x = lib.tensors(torch, data)
    last = x.mask.cumsum(1) == x.mask.sum(1, keepdim=True)
    a_BxT, _ = code.compute_advantage(x.reward[:, None] * last * x.mask, x.mask, x.uid, k)
    ratio = torch.exp(x.logp - x.old)
    losses = torch.maximum(-a_BxT * ratio, -a_BxT * ratio.clamp(0.8, 1.2))
    out[f'gradient_{k}'] = lib.outputs(x, (losses * x.mask).sum() / x.mask.sum())['gradient']
  return out


def ours(data):
  changed = lambda k: SETTINGS | dict(advantage=dict(fn='pass_at_k', k=k))  # noqa: E731
  return {f'gradient_{k}': lib.gradient(changed(k), data)['gradient'] for k in KS}


lib.main(__name__)

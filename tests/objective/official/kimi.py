"""Kimi k1.5's loss, by ROLL: a quadratic penalty of the step from the old policy."""

from __future__ import annotations

from jaxrl_llm.objective import kl
from tests.objective.official import lib, roll_core

OFFICIAL = roll_core.OFFICIAL
SETTINGS = dict(
  advantage='group_centered',
  ratio='one',
  trust_region='none',
  kl=dict(fn='quadratic', coef=0.3),
  aggregation='token_mean',
)
WITHOUT, draw = roll_core.WITHOUT, roll_core.draw
MUTANTS = {
  'sign': (kl, 'return -coef * moved, moved**2 / 2', 'return coef * moved, moved**2 / 2'),
  'to the reference': (
    kl,
    'moved = tokens.logp_BxT - tokens.old_BxT\n  return -coef * moved',
    'moved = tokens.logp_BxT\n  return -coef * moved',
  ),
}


def official(torch, read, data):
  x = lib.tensors(torch, data)
  a_BxT = roll_core.normalized(torch, read, x, norm_mean_type='group', norm_std_type=None)
  ratio = torch.exp(x.logp - x.old)
  loss_BxT = roll_core.loss(
    torch, read, '_compute_kimi15_loss', dict(kimi15_tau=0.3), ratio, x.logp, x.old, a_BxT
  )
  return lib.outputs(x, roll_core.token_mean(torch, read, x, loss_BxT))


lib.main(__name__)

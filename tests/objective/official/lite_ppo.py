"""LitePPO, by ROLL, its authors' own: the group's mean and the batch's standard deviation, PPO's clip."""

from __future__ import annotations

from jaxrl_llm.objective import advantage
from tests.objective.official import lib, roll_core

OFFICIAL = roll_core.OFFICIAL
SETTINGS = dict(
  advantage=dict(fn='batch_normalized', eps=1e-6),
  trust_region=dict(fn='clip', low=0.2, high=0.2),
  aggregation='token_mean',
)
WITHOUT, draw = roll_core.WITHOUT, roll_core.draw
MUTANTS = {
  'of centered rewards': (
    advantage,
    'off = (reward_PxG - (reward_PxG * exists).sum() / jnp.maximum(n, 1)) * exists\n  std',
    'off = group_centered(reward_PxG, length_PxG)\n  std',
  ),
  'biased': (
    advantage,
    'std = jnp.sqrt((off**2).sum() / jnp.maximum(n - 1, 1))',
    'std = jnp.sqrt((off**2).sum() / n)',
  ),
}


def official(torch, read, data):
  x = lib.tensors(torch, data)
  a_BxT = roll_core.normalized(torch, read, x, norm_mean_type='group', norm_std_type='batch')
  settings = dict(pg_clip=0.2, use_pg_clip_range=False, dual_clip_loss=False)
  counts = dict(final_response_mask=x.mask.sum())
  ratio = torch.exp(x.logp - x.old)
  loss_BxT = roll_core.loss(
    torch, read, '_compute_ppo_loss', settings, ratio, a_BxT, x.mask, counts, counts
  )
  return lib.outputs(x, roll_core.token_mean(torch, read, x, loss_BxT))


lib.main(__name__)

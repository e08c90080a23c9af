"""The best of a group against the second best, by verl, with its clipped loss, on graded rewards."""

from __future__ import annotations

import numpy as np

from jaxrl_llm.objective import advantage
from tests.objective.official import lib, verl_core

OFFICIAL = lib.Official(*verl_core.PINNED)
SETTINGS = dict(
  advantage='best_margin',
  trust_region=dict(fn='clip', low=0.2, high=0.2),
  aggregation='token_mean',
)
# No advantage is negative.
IDLE = ('trust_region.low',)
MUTANTS = {
  'over nothing': (advantage, 'best_Px1 - second_Px1, 0.0)', 'best_Px1 + 0 * second_Px1, 0.0)'),
  'to every row': (
    advantage,
    'jnp.where(known == best_Px1, margin_Px1, 0.0)',
    'jnp.where(known == known, margin_Px1, 0.0)',
  ),
}  # fmt: skip


def draw(seed):
  """As everywhere, with graded rewards but in one group of equal ones."""
  data, r = lib.draw(seed), np.random.default_rng((seed, 4))
  data['reward'] = np.round(data['correct'] + 0.3 * r.random(lib.B), 4)
  data['reward'][lib.G : 2 * lib.G] = 1
  return data


def official(torch, read, data):
  x = lib.tensors(torch, data)
  code = verl_core.core(
    torch, read, 'compute_grpo_passk_outcome_advantage', 'compute_policy_loss', 'agg_loss'
  )
  a_BxT = code.compute_grpo_passk_outcome_advantage(
    verl_core.at_the_end(x), x.mask, x.uid, config=verl_core.Numbers()
  )[0]
  value = code.compute_policy_loss(
    x.old, x.logp, a_BxT, x.mask, cliprange=0.2, clip_ratio_c=1e9, loss_agg_mode='token-mean'
  )[0]
  return lib.outputs(x, value)


lib.main(__name__)

"""RED-Drop: the mean of its gradient over all draws of the rows that it drops.

Every rotation of a group's rows below the mean is one draw. In groups of four rows at most one of them is kept, so
that the rotations are all draws; six turn two and three rows equally often. Rewards are graded, so that the mean of the
kept rows depends on the draw.
"""

from __future__ import annotations

import numpy as np

from jaxrl_llm.objective import advantage
from tests.objective.official import lib, trinity_core

PATHS = (
  'trinity/algorithm/policy_loss_fn/rec_policy_loss.py',
  'trinity/algorithm/advantage_fn/rec_advantage.py',
)
OFFICIAL = lib.Official(*trinity_core.pinned(*PATHS))
SETTINGS = dict(advantage='balanced', ratio='one', trust_region='none', aggregation='token_mean')
TURNS = 6
MUTANTS = {
  'all are kept': (advantage, 'jnp.minimum(count(bad), count(good))', 'count(bad)'),
  'one baseline': (advantage, 'share * (reward_PxG - mean_with_row)', 'share * (reward_PxG - mean)'),
  'kept for certain': (advantage, 'share = kept / jnp.maximum(count(bad), 1)', 'share = 1.0'),
  'mean of all rows': (
    advantage,
    'mean = (total(good) + kept * _mean(reward_PxG, bad)) / n',
    'mean = _mean(reward_PxG, exists)',
  ),
}  # fmt: skip


def draw(seed):
  """As everywhere, with graded rewards and a group of three wrong rows."""
  data = lib.draw(seed)
  data['reward'] += np.round(0.3 * np.random.default_rng(seed + 5).random(lib.B), 4)
  return data


class _Turned:
  """torch, whose random permutation of n is the identity turned by `shift`."""

  def __init__(self, torch, shift):
    self.torch, self.shift = torch, shift

  def __getattr__(self, name):
    return getattr(self.torch, name)

  def randperm(self, n):
    return (self.torch.arange(n) + self.shift) % n


def official(torch, read, data):
  runs = [
    trinity_core.run(
      _Turned(torch, shift),
      read,
      data,
      PATHS,
      ('RECPolicyLossFn', dict(clip_mode='none')),
      ('RECGroupedAdvantage', dict(drop='balance')),
    )
    for shift in range(TURNS)
  ]
  mean = lambda name: np.mean([run[name] for run in runs], axis=0)  # noqa: E731
  return dict(loss=float(mean('loss')), gradient=mean('gradient'))


lib.main(__name__)

"""SpeciaRL: its scores of groups of graded answers, some of which it could not read."""

from __future__ import annotations

import numpy as np

from jaxrl_llm.objective import reward_shaping
from tests.objective.official import lib

PATH = 'verl/ow_rf/reward_best_prediction_dedup.py'
OFFICIAL = lib.Official(
  's-angheben/SpeciaRL', 'b18e45bfe74ba1cc38b3d6cbeb728a3b2242810d', (PATH,), 'Apache-2.0'
)
SETTINGS = dict(reward_shaping=dict(fn='best_of_group', wrong=0.0))
# A verdict of the official verifier, with our grade of it; None: unreadable.
VERDICTS = {
  'wrong': 0.0, 'abstain': 0.25, 'generic': 0.5, 'less specific': 0.75, 'specific': 1.0, 'more specific': 1.0,
  None: -1.0,
}  # fmt: skip
P, G = 40, 4
WITHOUT = {'*': 'its inputs are grades'}
MUTANTS = {
  'wrong answers may be the best': (reward_shaping, '& (best_Px1 > wrong + tolerance)', ''),
  'unreadable counts as wrong': (
    reward_shaping,
    'jnp.where(unreadable_PxG, reward_PxG, jnp',
    'jnp.where(unreadable_PxG, 0.0, jnp',
  ),
  'right where above wrong': (reward_shaping, 'known_PxG >= best_Px1 - tolerance', 'known_PxG > wrong'),
}  # fmt: skip


def draw(seed):
  """Verdicts by number; the first group is all wrong, the second unreadable."""
  number = np.random.default_rng(seed).integers(0, len(VERDICTS), (P, G))
  number[0], number[1] = 0, len(VERDICTS) - 1
  return dict(verdict=number, reward=np.array([*VERDICTS.values()])[number])


def official(torch, read, data):
  names = ('group_by_hash_and_score', 'get_classification_rank')
  code = lib.functions(
    read(PATH), names, REWARD_MODE='all', List=list, Dict=dict, Any=object, Optional=object
  )
  items = []
  for group, row in enumerate(data['verdict']):
    for number in row:
      verdict = [*VERDICTS][number]
      status = 'PARSING_FAILED' if verdict is None else 'VERIFIED'
      items.append(dict(sample_hash=group, status=status, verifier_response=verdict or ''))
  code.group_by_hash_and_score(items)
  return dict(reward=np.array([item['score'] for item in items]).reshape(P, G))


def ours(data):
  length = np.ones((P, G))
  return dict(reward=reward_shaping.best_of_group(data['reward'], length, length, 1))


lib.main(__name__)

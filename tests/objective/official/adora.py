"""ADORA: advantages of its language-model trainer, which leave answers near the cap out of the mean wrong length."""

from __future__ import annotations

import numpy as np

from jaxrl_llm.objective import advantage
from tests.objective.official import lib, verl_core

CORE, FUNCTIONAL = f'ADORA/{verl_core.CORE}', f'ADORA/{verl_core.FUNCTIONAL}'
OFFICIAL = lib.Official(
  'ShadeCloak/ADORA', 'c518485324b136e0fea6a7f280c1d224f94d13d5', (CORE, FUNCTIONAL), 'Apache-2.0'
)
LONG = 5  # tokens: the official 4,054 for rows of 6
SETTINGS = dict(
  advantage=dict(fn='adora', weak=0.1, right=1.01, long_tokens=LONG), aggregation='token_mean'
)
SEEDS = (0, 1, 2, 3, 4)
WITHOUT = {'empty rows': 'the official batch has none'}
MUTANTS = {
  'weight': (advantage, 'longest > mean, 1.0, weak)', 'longest > mean, 1.0, weak / 2)'),
  'equal lengths': (advantage, 'longest > mean, 1.0', 'longest >= mean, 1.0'),
  'long answers count': (advantage, '& (length < long_tokens)', ''),
  'bound of long answers': (advantage, 'length < long_tokens', 'length <= long_tokens'),
  'no right answer': (
    advantage,
    'jnp.where(good, length, -jnp.inf)',
    'jnp.where(good, length, jnp.inf)',
  ),
  'no short wrong answer': (
    advantage,
    '_mean(length, bad.astype(reward_PxG.dtype)), -jnp.inf',
    '_mean(length, bad.astype(reward_PxG.dtype)), jnp.inf',
  ),
}


def draw(seed):
  """As everywhere without an empty row, with graded rewards that are right above 1.01.

  Group 0 has only long wrong answers; group 4 is right where its longest right answer is as long as the mean wrong one.
  """
  data, r = lib.draw(seed), np.random.default_rng((seed, 1))
  data['reward'] = np.round(1.5 * data['correct'] + 0.4 * r.random(lib.B), 4)
  data['length'][2] = 2
  data['length'][[1, 3]] = [5, 6]
  data['length'][16:20] = [4, 4, 4, 5] if seed % 2 else [2, 3, 2, 5]
  data['reward'][16:20] = [0.2, 1.6, 0.1, 0.3]
  return data


def official(torch, read, data):
  x = lib.tensors(torch, data)
  means = lib.functions(read(FUNCTIONAL), ('masked_mean',), torch=torch)
  names = ('compute_grpo_outcome_advantage_ADORA', 'compute_policy_loss')
  code = lib.functions(
    read(CORE), names, torch=torch, verl_F=means, defaultdict=verl_core.collections.defaultdict
  )
  a, _ = code.compute_grpo_outcome_advantage_ADORA(
    verl_core.at_the_end(x), x.mask, x.uid, max_length_threshold=LONG
  )
  return lib.outputs(x, code.compute_policy_loss(x.old, x.logp, a, x.mask, 0.2)[0])


lib.main(__name__)

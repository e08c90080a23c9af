"""GMPO: the branch of the training script in its own repository, which sees one answer at a time."""

from __future__ import annotations

import ast
import collections
import types

import numpy as np

from jaxrl_llm.objective import trust_region
from tests.objective.official import lib

OFFICIAL = lib.Official(
  'callsys/GMPO',
  '205b2bf412f150cf96c29b33273b81bcd1a9b20f',
  ('train_zero_math_gmpo.py',),
  'none stated',
)
SETTINGS = dict(
  advantage=dict(fn='group_normalized', eps=1e-8),
  trust_region=dict(fn='geometric', low=0.4, high=0.4),
  aggregation='sequence_mean',
)
MUTANTS = {
  'both sides': (
    trust_region,
    'clipped = jnp.where(keep, log_ratio_BxT, ',
    'clipped = jnp.where(keep * 0 > 0, 0, ',
  ),
  'clipped tokens move': (
    trust_region,
    'return jnp.where(keep, ratio, 0.0), ratio * advantage\n\n\n@needs',
    'return ratio, ratio * advantage\n\n\n@needs',
  ),
}


def estimator(torch, text):
  """The method `compute_monte_carlo_advantages` of the script's learner as a function (self, rewards, masks)."""
  name = 'compute_monte_carlo_advantages'
  found = [n for n in ast.walk(ast.parse(text)) if getattr(n, 'name', None) == name]
  return getattr(lib.functions(ast.unparse(found[0]), (name,), torch=torch), name)


def official(torch, read, data):
  text, x = read(OFFICIAL.paths[0]), lib.tensors(torch, data)
  code, advantages, losses = (
    lib.branch(text, "self.args.critic_type_modify == 'gmpo'"),
    estimator(torch, text),
    [],
  )
  args = types.SimpleNamespace(cliprange=0.4, critic_type='grpo')
  for group in np.unique(x.uid):
    rows = np.flatnonzero(x.uid == group)
    args.num_samples = len(rows)
    learner = types.SimpleNamespace(args=args)
    a = advantages(learner, x.reward[rows][:, None], None)
    for row, advantage in zip(rows, a, strict=True):
      space = dict(
        torch=torch,
        self=learner,
        new_logps=x.logp[row : row + 1],
        mb_logps=x.old[row : row + 1],
        mb_advantage=advantage[None],
        mb_response_masks=x.mask[row : row + 1] > 0,
        stats=collections.defaultdict(list),
        infos={},
      )
      exec(code, space)
      losses.append(space['loss'].sum())
  return lib.outputs(x, torch.stack(losses).mean())


lib.main(__name__)

"""SDPO for sampled tokens: which solution each row's teacher reads, and the gradient toward that teacher.

`reference` stands for the teacher's log-probs. Policies agree at the start of a batch, where the official code and the
project compute the same advantage: later the official one takes the present policy for log π, the project the old one.
"""

from __future__ import annotations

import collections
import types

import numpy as np

from jaxrl_llm import objective
from jaxrl_llm.objective import distillation, policy_gradient
from jaxrl_llm.runner import solutions
from jaxrl_llm.types import Solutions
from tests.objective.official import lib, verl_core

TRAINER = 'verl/trainer/ppo/ray_trainer.py'
OFFICIAL = lib.Official(
  'lasgroup/SDPO',
  '0e6d5106abe69f578c63bf38a9394e22905c8773',
  (verl_core.CORE, verl_core.FUNCTIONAL, TRAINER),
  'Apache-2.0',
)
SETTINGS = dict(
  advantage=dict(fn='raw', baseline=0.0),
  importance_correction=dict(fn='token_truncate', low=0.0, high=2.0),
  trust_region=dict(fn='cap', most=2.0),
  aggregation='token_mean',
  distillation=dict(fn='solved_by_group', prompt_tokens=8),
)
SEEDS = (0, 1)
WITHOUT = {
  'ratios far above and below 1 for both signs': 'the official advantage is of the present policy'
}
MUTANTS = {
  'sign': (
    distillation,
    'present(tokens.teacher_BxT) - tokens.old_BxT',
    'tokens.old_BxT - present(tokens.teacher_BxT)',
  ),
  'rows without a teacher count': (
    policy_gradient,
    '(batch.solutions.length_B > 0)[:, None]',
    '(batch.solutions.length_B >= 0)[:, None]',
  ),
  'its own solution': (solutions, 'right = right[right != b]', 'right = right[:]'),
  'the last one': (solutions, 'chosen_B[b] = right[0]', 'chosen_B[b] = right[-1]'),
}


def draw(seed):
  """As everywhere, on policy; the sampler differs so much that some weights are capped."""
  data = lib.draw(seed)
  data['old'] = data['logp'].copy()
  gap = np.random.default_rng(seed + 3).normal(size=data['logp'].shape)
  data['behavior'] = np.round(data['logp'] + 0.6 * gap, 4)
  return data


def official(torch, read, data):
  x = lib.tensors(torch, data)
  own = types.SimpleNamespace()
  text, space = read(TRAINER), dict(torch=torch, np=np, defaultdict=collections.defaultdict)
  collect = lib.method(text, 'RayPPOTrainer', '_collect_solutions_by_uid', **space)
  solution = lib.method(text, 'RayPPOTrainer', '_get_solution', **space)
  rows = types.SimpleNamespace(non_tensor_batch=dict(uid=x.uid))
  right = collect(own, rows, verl_core.at_the_end(x), 1.0)
  numbers = [str(b) for b in np.flatnonzero(x.exists)]
  found = [solution(own, b, right, x.uid, numbers, True) for b in range(len(numbers))]
  has = torch.tensor([float(text is not None) for text in found])
  settings = verl_core.Numbers(full_logit_distillation=False, alpha=1.0, is_clip=2.0)
  code = verl_core.core(torch, read, 'compute_self_distillation_loss', 'agg_loss')
  value = code.compute_self_distillation_loss(
    x.logp,
    x.reference,
    x.mask,
    settings,
    old_log_probs=x.old,
    self_distillation_mask=has,
    loss_agg_mode='token-mean',
    rollout_is_weights=torch.exp(x.old - x.behavior).clamp(max=2.0),
  )[0]
  chosen_B = np.full(len(x.exists), -1)
  chosen_B[x.exists] = [-1 if text is None else int(text) for text in found]
  return lib.outputs(x, value) | dict(solution=chosen_B)


def ours(data):
  exists_B = data['length'] > 0
  group_B = np.arange(lib.B) // lib.G
  chosen_B = solutions.first_right(data['correct'] * exists_B, group_B)
  chosen_B = np.where(exists_B, chosen_B, -1)
  method = objective.method(lib.settings(SETTINGS))
  known = Solutions(np.zeros((lib.B, 8), np.int32), (chosen_B >= 0) * 8)
  rows = lib.batch(data, method.needs_old)._replace(solutions=known)
  target = objective.targets(method, rows, lib.G).with_arrays(
    old_BxT=data['old'], teacher_BxT=data['reference']
  )
  target = objective.distill(method, target)
  c_BxT, _ = objective.coefficients(method, target, data['logp'], data['entropy'])
  return dict(gradient=-np.asarray(c_BxT), solution=chosen_B)


lib.main(__name__)

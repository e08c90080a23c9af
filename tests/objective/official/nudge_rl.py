"""NudgeRL: advantages within and between strategies, and its clipped loss, over rows and over tokens.

The official std is biased (n), ours unbiased (n − 1): groups have 8 rollouts, the official gradient is multiplied by
√(7/8), and our eps is the official one times √(8/7). The official script averages over rows (`grpo`); the mean over
tokens (`bnpo`) is another choice of the same function.
Not covered: the term on the plain prompt (`distill_coeff` is 0 here), the official correction for the mismatch of its
sampler, and who gets a strategy: the official code leaves it out of single rollouts, ours of whole slots.
"""

from __future__ import annotations

import collections
import types

import numpy as np

from jaxrl_llm import objective
from jaxrl_llm.objective import advantage, aggregation, trust_region
from jaxrl_llm.types import Prompts
from tests.objective.official import lib, trinity_core

TRAINER = 'src/train/NudgeRLTrainer.py'
OFFICIAL = lib.Official(
  'tally0818/NudgeRL', 'cf247f7121299a30e6a1381125dd6eaf884bee51', (TRAINER,), 'none stated'
)
PROMPTS, PARTS, N = 5, 3, 8  # slots of lib.G rows; 4 of the 12 rows of a prompt are empty
SLOTS = PROMPTS * PARTS
BETWEEN, EPS = 1.1, 1e-5  # of configs/train_config.yaml
SETTINGS = dict(
  advantage=dict(fn='nudged', between=BETWEEN, eps=EPS * (N / (N - 1)) ** 0.5),
  trust_region=dict(fn='clip', low=0.2, high=0.2),
)
LOSSES = dict(sequence_mean='grpo', token_mean='bnpo')  # aggregation → official loss_type
# Strategies of the slots of each prompt, −1 without one
CONTEXTS = ((0, 1, -1), (0, 0, 1), (-1, 1, 0), (0, 1, 2), (-1, -1, 1))
SEEDS = (0, 1)
MUTANTS = {
  'as within': (advantage, 'between * (own - mean)', '(own - mean)'),
  'the whole reward within': (advantage, '(reward - own) + between', '(reward - mean) + between'),
  'without a strategy is one': (advantage, 'context_PxG >= 0, apart', 'context_PxG >= -1, apart'),
  'empty rows of a strategy': (
    advantage,
    '(context_PxG[:, :, None] == context_PxG[:, None]) * exists[:, None]',
    '(context_PxG[:, :, None] == context_PxG[:, None]) * jnp.ones_like(exists)[:, None]',
  ),
  'empty rows of a group': (
    advantage,
    'mean = _mean(reward_PxG, exists)\n  apart',
    'mean = reward.mean(1, keepdims=True)\n  apart',
  ),
  'std': (advantage, 'jnp.maximum(n_Px1 - 1, 1))\n  return c', 'jnp.maximum(n_Px1, 1))\n  return c'),
  'eps': (advantage, 'group_normalized(centered, length_PxG, eps=eps)', 'group_normalized(centered, length_PxG)'),
  'lower bound': (
    trust_region,
    'return clip_masks.clip(log_ratio_BxT, tokens.advantage_BxT, 1 - low, 1 + high)',
    'return clip_masks.clip(log_ratio_BxT, tokens.advantage_BxT, 1 - 2 * low, 1 + high)',
  ),
  'long rollouts count more': (aggregation, '/ jnp.maximum(length_Bx1, 1) / _rows', '/ _rows'),
  'an empty token': (aggregation, 'mask_BxT.sum()', '(mask_BxT.sum() + 1)'),
}  # fmt: skip


def draw(seed: int) -> dict[str, np.ndarray]:
  """Five prompts with three slots of four rows in any order, eight rollouts each; the second prompt is all right.

  Seed 0 has rewards of 0 and 1, seed 1 graded ones.
  """
  r = np.random.default_rng((seed, 1))
  parts = [lib.draw(3 * seed + k) for k in range(3)]
  names = ('logp', 'old', 'length', 'age', 'correct')
  data = {name: np.concatenate([part[name] for part in parts]) for name in names}
  order_P = r.permutation(SLOTS)
  index_P, part_P = order_P // PARTS, order_P % PARTS
  index_B = np.repeat(index_P, lib.G)
  data['correct'][index_B == 1] = 1
  reward_B = data['correct'].copy()
  if seed:
    graded_B = reward_B + np.round(r.uniform(0, 0.5, len(reward_B)), 4)
    reward_B = np.where(index_B == 1, 1.0, graded_B)
  data['length'] = np.maximum(data['length'], 1)
  for p in range(PROMPTS):
    data['length'][r.choice(np.flatnonzero(index_B == p), lib.G, replace=False)] = 0
  context_P = np.array(CONTEXTS)[index_P, part_P]
  return data | dict(reward=reward_B, index=index_P, part=part_P, context=context_P)


def rows_of(data: dict, name: str) -> np.ndarray:
  """A value of slots for each row that is not empty."""
  return np.repeat(data[name], lib.G)[data['length'] > 0]


def advantages(torch, text: str, x, data: dict):
  """Prompt by prompt, [rows]; its completions are numbers of rows."""
  index_B, context_B = rows_of(data, 'index'), rows_of(data, 'context')
  code = lib.functions(
    text, ('compute_advantage_with_groups',), torch=trinity_core.Wide(torch), Any=None
  )
  found = torch.zeros_like(x.reward)
  for p in range(PROMPTS):
    row_N = np.flatnonzero(index_B == p)
    assert len(row_N) == N
    found[row_N], *_ = code.compute_advantage_with_groups(
      answer=None,
      ys=row_N,
      cids=['dropout' if c < 0 else f'hint{c + 1}' for c in context_B[row_N]],
      lbd=BETWEEN,
      epsilon=EPS,
      reward_fn=lambda row, answer: x.reward[row],
      device=x.reward.device,
    )
  return found


def trainer(torch, x, loss_type: str):
  """In place of the trainer, with the settings of its script."""
  return types.SimpleNamespace(
    args=types.SimpleNamespace(delta=None),
    accelerator=types.SimpleNamespace(gather=lambda tensor: tensor),
    model=types.SimpleNamespace(training=True),
    _metrics=dict(train=collections.defaultdict(list)),
    _get_per_token_logps_and_entropies=lambda *_, **__: (x.logp, torch.zeros_like(x.logp)),
    **dict(loss_type=loss_type, importance_sampling_level='token', use_vllm=False),
    **dict(epsilon_low=0.2, epsilon_high=0.2, beta=0.0, top_entropy_quantile=1.0),
    current_gradient_accumulation_steps=1,
    distill_coeff=0.0,
  )


def official(torch, read, data):
  text, found = read(TRAINER), {}
  extremes = dict(nanmin=torch.min, nanmax=torch.max)  # of metrics
  loss = lib.method(text, 'NudgeRLTrainer', '_compute_loss', torch=torch, **extremes)
  for name, loss_type in LOSSES.items():
    x = lib.tensors(torch, {k: v for k, v in data.items() if len(v) == len(data['length'])})
    prompt_Bx1 = torch.zeros((len(x.reward), 1))
    inputs = dict(
      **dict(prompt_ids=prompt_Bx1, prompt_mask=prompt_Bx1 + 1, completion_ids=x.mask),
      **dict(completion_mask=x.mask, old_per_token_logps=x.old),
      advantages=advantages(torch, text, x, data),
    )
    value = loss(trainer(torch, x, loss_type), None, inputs)
    found[name] = lib.outputs(x, value, ((N - 1) / N) ** 0.5)['gradient']
  return found


def ours(data):
  prompts = Prompts(
    np.zeros((SLOTS, 2), np.int32),
    np.full(SLOTS, 2, np.int32),
    data['index'],
    np.arange(SLOTS),
    np.zeros(SLOTS),
    part_P=data['part'],
    context_P=data['context'],
  )
  found = {}
  for name in LOSSES:
    method = objective.method(lib.settings(SETTINGS | dict(aggregation=name)))
    rows = lib.batch(data, method.needs_old)._replace(prompts=prompts)
    policies = objective.OtherPolicies(data['old'] if method.needs_old else None)
    target = objective.targets(method, rows, lib.G, parts=PARTS, policies=policies)
    found[name] = -np.asarray(objective.coefficients(method, target, data['logp'])[0])
  return found


lib.main(__name__)

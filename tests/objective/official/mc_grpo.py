"""MC-GRPO: the median as baseline, the median deviation, and the rescaled loss without the median rollout.

Both official trainers leave one rollout at the median out of the mean over rows, which are 8 of 9. That for GSM8K also
multiplies A by n / #{A ≠ 0}, as here: its loss is ours · 9/8 for all rewards, and the golden has it times 8/9. That for
MATH does not: its loss is ours where no second rollout is at the median, or all are, and other groups are not compared.
Not covered: even groups, where the official median is the lower of two and ours is their mean; the KL term, which
leaves the median rollout out as well; the official correction for the mismatch of its sampler.
"""

from __future__ import annotations

import ast
import collections
import types
from typing import Any

import numpy as np

from jaxrl_llm import objective
from jaxrl_llm.objective import advantage, aggregation, trust_region
from jaxrl_llm.types import Prompts
from tests.objective.official import lib

TRAINERS = dict(
  gsm='src/open_r1/grpo_trainer_gsm.py',
  math='src/open_r1/grpo_trainer_math.py',
)
OFFICIAL = lib.Official(
  'lotusroot-kim/MC-GRPO',
  'da077455d4cb53c715e194c5334abc63d2fd41f2',
  tuple(TRAINERS.values()),
  'Apache-2.0',
)
GROUPS, SLOTS, N = 4, 10, 9  # a slot of each group is empty
SETTINGS = dict(
  advantage=dict(fn='median_centered', eps=1e-3),
  trust_region=dict(fn='clip', low=0.2, high=0.2),
  aggregation='sequence_mean',
)
SEEDS = (0, 1)
MUTANTS = {
  'mean': (advantage, 'reward_PxG - _median(reward_PxG, exists)', 'reward_PxG - _mean(reward_PxG, exists)'),
  'mean deviation': (advantage, '_median(jnp.abs(off), exists)', '_mean(jnp.abs(off), exists)'),
  'eps': (advantage, '(_median(jnp.abs(off), exists) + eps)', '(_median(jnp.abs(off), exists) + 2 * eps)'),
  'not rescaled': (advantage, 'advantage * exists.sum(1, keepdims=True) / jnp.maximum(moved, 1)', 'advantage'),
  'all but one move': (
    advantage,
    'moved = ((advantage != 0) * exists).sum(1, keepdims=True)',
    'moved = exists.sum(1, keepdims=True) - 1',
  ),
  'empty slots count': (advantage, 'jnp.where(exists_PxG > 0, x_PxG, jnp.inf), axis=1)', 'x_PxG, axis=1)'),
  'lower bound': (
    trust_region,
    'return clip_masks.clip(log_ratio_BxT, tokens.advantage_BxT, 1 - low, 1 + high)',
    'return clip_masks.clip(log_ratio_BxT, tokens.advantage_BxT, 1 - 2 * low, 1 + high)',
  ),
  'long rollouts count more': (aggregation, '/ jnp.maximum(length_Bx1, 1) / _rows', '/ _rows'),
}  # fmt: skip


def draw(seed: int) -> dict[str, np.ndarray]:
  """Groups of 9 rollouts in 10 slots; group 1 is all right.

  Seed 0: all rewards of the other groups differ. Seed 1: rewards of 0 and 1, five levels with three rollouts at the
  median, and a group whose median deviation is 0.
  """
  r = np.random.default_rng((seed, 1))
  parts = [lib.draw(2 * seed + k) for k in range(2)]
  names = ('logp', 'old', 'length', 'age')
  data = {name: np.concatenate([part[name] for part in parts]) for name in names}
  reward_PxN = np.round(
    r.permuted(np.tile(np.linspace(0.02, 0.98, N), (GROUPS, 1)), axis=1) ** 2, 4
  )
  if seed:
    reward_PxN[0] = [0, 0, 1, 0, 1, 0, 0, 1, 0]
    reward_PxN[2] = r.permutation([0, 0.25, 0.25, 0.5, 0.5, 0.5, 0.75, 1, 1])
    reward_PxN[3] = r.permutation([0.1, 0.1, 0.1, 0.1, 0.1, 0.9, 0.5, 0, 0.3])
  reward_PxN[1] = 1
  data['length'] = np.maximum(data['length'], 1)
  reward_PxG = np.zeros((GROUPS, SLOTS))
  for p, empty in enumerate((4, 9, 5, 2)):
    reward_PxG[p] = np.insert(reward_PxN[p], empty, 7.0)  # of an empty slot: no part of the group
    data['length'][p * SLOTS + empty] = 0
  reward_B = reward_PxG.reshape(-1)
  return data | dict(reward=reward_B, correct=(reward_B > 0.5).astype(float))


def distinct(data: dict) -> bool:
  """Whether all groups have one rollout at the median, or all."""
  reward_PxN = data['reward'][data['length'] > 0].reshape(GROUPS, N)
  at_P = (reward_PxN == np.median(reward_PxN, axis=1, keepdims=True)).sum(1)
  return bool(np.isin(at_P, (1, N)).all())


def trainer(torch, x):
  """In place of `self` of both trainers; a row's number stands for its prompt and its tokens."""
  same = lambda tensor: tensor  # noqa: E731
  return types.SimpleNamespace(
    args=types.SimpleNamespace(mc=True, allocation=False, delta=None),
    accelerator=types.SimpleNamespace(is_main_process=False, process_index=0, gather=same),
    model=types.SimpleNamespace(training=True),
    _metrics=dict(train=collections.defaultdict(list)),
    _get_per_token_logps_and_entropies=lambda model, input_ids, *_, **__: (
      x.logp[input_ids[:, 0]],
      torch.zeros_like(x.logp[input_ids[:, 0]]),
    ),
    num_generations=N - 1,
    **dict(scale_rewards='group', loss_type='grpo', importance_sampling_level='token', tools=None),
    **dict(epsilon_low=0.2, epsilon_high=0.2, beta=0.0, top_entropy_quantile=1.0, use_vllm=False),
    current_gradient_accumulation_steps=1,
  )


def statements(text: str, first: str, last: str):
  """Code of the trainer's statements from rewards to the rows without the median rollouts."""
  (body,) = (
    n.body
    for n in ast.walk(ast.parse(text))
    if isinstance(n, ast.FunctionDef) and n.name == '_generate_and_score_completions'
  )
  lines = [ast.unparse(n).split('\n')[0] for n in body]
  part = body[lines.index(first) : lines.index(last) + 1]
  return compile(ast.Module(part, []), '<official>', 'exec')


def gradient(torch, text: str, data: dict, scale: float):
  """Of the trainer's loss of the rows that its statements leave."""
  x = lib.tensors(torch, data)
  self, row_Bx1 = trainer(torch, x), torch.arange(len(x.reward))[:, None]
  names: dict[str, Any] = dict(
    **dict(torch=torch, self=self, mode='train', use_extra_rollout=True, device=x.logp.device),
    **dict(rewards=x.reward, prompts=row_Bx1, prompt_ids=row_Bx1, prompt_mask=row_Bx1),
    **dict(completion_ids=row_Bx1.expand(x.mask.shape), completion_mask=x.mask),
    **dict(old_per_token_logps=x.old, ref_per_token_logps=None, tool_mask=None, forward_kwargs={}),
  )
  code = statements(
    text,
    "num_generations = self.num_generations if mode == 'train' else self.num_generations_eval",
    "if self.args.mc and mode == 'train' and (median_mask is not None):",
  )
  exec(code, names)
  extremes = dict(nanmin=torch.min, nanmax=torch.max)  # of metrics
  loss = lib.method(text, 'GRPOTrainer', '_compute_loss', torch=torch, **extremes)
  kept = ('prompt_ids', 'prompt_mask', 'completion_ids', 'completion_mask', 'advantages')
  inputs = {name: names[name] for name in (*kept, 'old_per_token_logps')}
  assert len(inputs['advantages']) == GROUPS * (N - 1)
  return lib.outputs(x, loss(self, None, inputs), scale)['gradient']


def official(torch, read, data):
  found = dict(gsm=gradient(torch, read(TRAINERS['gsm']), data, (N - 1) / N))
  if distinct(data):
    found['math'] = gradient(torch, read(TRAINERS['math']), data, 1.0)
  return found


def ours(data):
  method = objective.method(lib.settings(SETTINGS))
  prompts = Prompts(
    np.zeros((GROUPS, 2), np.int32),
    np.full(GROUPS, 2, np.int32),
    np.arange(GROUPS),
    np.arange(GROUPS),
    np.zeros(GROUPS),
  )
  rows = lib.batch(data, method.needs_old)._replace(prompts=prompts)
  policies = objective.OtherPolicies(data['old'] if method.needs_old else None)
  target = objective.targets(method, rows, SLOTS, policies=policies)
  c_BxT = -np.asarray(objective.coefficients(method, target, data['logp'])[0])
  return dict(gsm=c_BxT) | (dict(math=c_BxT) if distinct(data) else {})


lib.main(__name__)

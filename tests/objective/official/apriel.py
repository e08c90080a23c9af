"""Apriel-Reasoner: rewards after the penalty near the cap, softer for right answers to hard prompts.

Advantages of these rewards are compared, too, by the official defaults: leave-one-out, not divided by the standard
deviation; the config apriel.py keeps GRPO's. Rows of the cap's length have no end here: the official code does not
scale the penalty of such a row by 1 if it ends with its last token. The loss and the sampling of domains are not
covered.
"""

from __future__ import annotations

import ast
import types
from typing import Any

import numpy as np

from jaxrl_llm import objective
from jaxrl_llm.objective import reward_shaping
from tests.objective.official import clpo_core, lib, verl_core

ACTOR, MATH = 'pipelinerl/actor.py', 'pipelinerl/domains/math/rollouts.py'
LEARNER = 'pipelinerl/finetune/rl/__init__.py'
OFFICIAL = lib.Official(
  'ServiceNow/PipelineRL',
  '58d393458625ad63ed539f2dcd072c85700c557f',
  (ACTOR, MATH, LEARNER),
  'Apache-2.0',
)
BUFFER = 4  # tokens, of rows of 6
# (power, failure): those of the config, of the code's branches, others
SCALES = ((1.0, 1.0), (0.5, 0.5), (2.0, 0.3))
SEEDS = (0, 1)
MUTANTS = {
  'no success rate': (reward_shaping, 'solved_Px1**power', '1.0'),
  'softer for easy prompts': (reward_shaping, 'solved_Px1**power', '(1 - solved_Px1) ** power'),
  'power': (reward_shaping, 'solved_Px1**power', 'solved_Px1'),
  'wrong rows as right ones': (
    reward_shaping,
    'jnp.where(correct_PxG > 0.5, solved_Px1**power, failure)',
    'solved_Px1**power + 0 * correct_PxG',
  ),
  'truncated rows as others': (reward_shaping, 'length_PxG >= max_tokens, 1.0', 'False, 1.0'),
  'empty rows count': (
    reward_shaping,
    'jnp.maximum(exists_PxG.sum(1, keepdims=True), 1)',
    'exists_PxG.shape[1]',
  ),
  'a bonus for short rows': (
    reward_shaping,
    'weight_PxG * jnp.clip(over_PxG, 0.0, None)',
    'weight_PxG * over_PxG',
  ),
}


def draw(seed: int) -> dict[str, np.ndarray]:
  """As everywhere, with graded rewards, which do not say what is right.

  Mixed groups have right rows in the buffer, one of them an empty row; truncated rows are right or wrong.
  """
  data, r = lib.draw(seed), np.random.default_rng((seed, 1))
  data['length'][[0, 1, 3]] = [5, 4, 5]
  data['length'][[8, 9, 13, 17]] = [4, 5, lib.T, lib.T]
  data['reward'] = np.round(data['correct'] + 0.4 * r.normal(size=lib.B), 4)
  return data


def rollout(data: dict, b: int) -> types.SimpleNamespace:
  """A row as the official actor has it."""
  text = types.SimpleNamespace(
    reward=float(data['reward'][b]),
    output_tokens=int(data['length'][b]),
    finished=bool(data['length'][b] < lib.T),
  )
  success = bool(data['correct'][b] > 0.5)
  metrics = types.SimpleNamespace(success=success, reward=text.reward)
  return types.SimpleNamespace(training_texts=[text], metrics=metrics)


def shaped(read: Any, rows: list[types.SimpleNamespace], power: float, failure: float) -> None:
  """Changes the rewards of a group: the penalty of every rollout, then the actor's adjustment."""
  penalty = lib.functions(read(MATH), ('length_penalty',)).length_penalty
  parameters = dict(max_tokens=lib.T)
  table = types.SimpleNamespace(buffer_tokens=BUFFER)
  given = clpo_core.statement(read(MATH), ast.If, 'overlong_penalty = length_penalty(')
  for row in rows:
    (text,) = row.training_texts
    names = clpo_core.run(
      given,
      rewards=table,
      length_penalty=penalty,
      llm=types.SimpleNamespace(parameters=parameters),
      llm_call=types.SimpleNamespace(output_length_tokens=text.output_tokens),
      overlong_penalty=0,
    )
    text.reward += names['overlong_penalty']
  clpo_core.run(
    clpo_core.statement(read(ACTOR), ast.If, 'group_solve_rate = '),
    self=types.SimpleNamespace(is_training=True, cfg=types.SimpleNamespace(rewards=table)),
    dap_cfg=types.SimpleNamespace(enabled=True, gamma=power, failure_scale=failure),
    max_tokens=lib.T,
    rollout_results=rows,
    length_penalty=penalty,
  )


def advantages(read: Any, reward_B: np.ndarray, length_B: np.ndarray) -> np.ndarray:
  """Of the official learner, [B]; 0 for empty rows."""
  import pandas as pd

  populate = lib.functions(read(LEARNER), ('populate_rl_data',), pd=pd, np=np).populate_rl_data
  kept = np.flatnonzero(length_B)
  rows = [
    dict(
      group_id=int(b) // lib.G,
      rollout_index=int(b) % lib.G,
      step_index=0,
      input_ids=[1] * int(length_B[b]),
      labels=[1] * int(length_B[b]),
      rewards=[float(reward_B[b])] * int(length_B[b]),
      finished=True,
      **dict(overflow=[0], advantages=[0.0], group_tokens=[0]),
    )
    for b in kept
  ]
  done = populate(rows, 0, verl_core.Numbers(divide_advantage_by_std=False))
  out = np.zeros(len(length_B))
  out[kept] = [row['advantages'][0] for row in done]
  return out


def official(torch, read, data):
  reward, advantage = [], []
  for power, failure in SCALES:
    own = np.zeros(lib.B)
    for start in range(0, lib.B, lib.G):
      kept = [b for b in range(start, start + lib.G) if data['length'][b]]
      rows = [rollout(data, b) for b in kept]
      shaped(read, rows, power, failure)
      own[kept] = [row.training_texts[0].reward for row in rows]
    reward.append(own)
    advantage.append(advantages(read, own, data['length']))
  return dict(reward=reward, advantage=advantage)


def ours(data):
  found = {}
  for name, estimator in dict(reward='raw', advantage='leave_one_out').items():
    found[name] = []
    for power, failure in SCALES:
      shaping = dict(fn='overlong_where_solved', buffer_tokens=BUFFER, power=power, failure=failure)
      method = objective.method(lib.settings(dict(advantage=estimator, reward_shaping=shaping)))
      target = objective.targets(method, lib.batch(data, method.needs_old), lib.G)
      found[name].append(target.advantage_BxT[:, 0])
  return found


lib.main(__name__)

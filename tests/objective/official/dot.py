"""DOT's truncation: which rows of all-right groups are cut, where, and their rewards after grading again.

Not covered: the KL-Cov loss, its mean over rows, predictive sampling, the filter of zero-variance groups, margins
given as a share.
"""

from __future__ import annotations

import statistics
import sys
import types
from collections import defaultdict
from typing import Any
from unittest import mock

import numpy as np

from jaxrl_llm import rewards
from jaxrl_llm.rewards import length_truncation
from jaxrl_llm.runner import grading
from jaxrl_llm.types import STOPPED, TRUNCATED, Rollout, Row
from tests.objective.official import lib

TRUNCATION = 'projects/dot/length_truncation.py'
OFFICIAL = lib.Official(
  'U-rara/DOT', '9e6574bd652322a0cc80ced727a01f8840af09ef', (TRUNCATION,), 'Apache-2.0'
)
P, G, T, PROMPT = 24, 16, 400, 3
ANSWER = 7  # the token that makes a row right
# (deviations, tokens): the official ones, those of dot.py, others
SETTINGS_OF = ((3.0, 32), (2.0, 2), (1.0, 1))
WITHOUT = {'*': 'its inputs are lengths and places of answers'}
SEEDS = (0, 1, 2)
MUTANTS = {
  'groups with a wrong row': (
    length_truncation,
    '(correct_PxG.astype(bool) | ~exists_PxG).all(1)',
    '(correct_PxG.astype(bool) | ~exists_PxG).any(1)',
  ),
  'rounded up': (length_truncation, 'np.floor(', 'np.ceil('),
  'the least is not enough': (
    length_truncation,
    '>= max(self.least_tokens, 1)',
    '> max(self.least_tokens, 1)',
  ),
  'any excess': (length_truncation, 'max(self.least_tokens, 1)', '1'),
  'one deviation': (length_truncation, 'self.deviations * std_P', 'std_P'),
  'another divisor': (
    length_truncation,
    'std_P = np.sqrt((off_PxG**2).sum(1) / np.maximum(n_P - 1, 1))',
    'std_P = np.sqrt((off_PxG**2).sum(1) / np.maximum(n_P, 1))',
  ),
  'median': (
    length_truncation,
    'mean_P = length_PxG.sum(1) / np.maximum(n_P, 1)',
    'mean_P = np.median(length_PxG, axis=1)',
  ),
  'not graded again': (
    grading,
    'scores.grade(rollout, shortened, [rows[b] for b in shortened])',
    'rollout',
  ),
  'the whole text graded again': (
    grading,
    'rollout.tokens_BxT[b, : length_B[b]]',
    'rollout.tokens_BxT[b]',
  ),
}


def draw(seed: int) -> dict[str, np.ndarray]:
  """Groups of rows of about 30 tokens with none to three long ones; the answer is anywhere before the end, or nowhere.

  Group 0 has equal lengths. A third of the groups has a wrong row, one is all wrong.
  """
  r = np.random.default_rng(seed)
  length = r.integers(10, 50, (P, G))
  length[::2] = r.integers(25, 36, (P // 2, G))
  for group in range(1, P):
    least, rows = (5, r.integers(0, 4)) if group % 2 else (80, 1)
    length[group, :rows] += r.integers(least, T - 50)
  length[0] = 40
  place = length - 1 - r.integers(0, 200, (P, G)) % length
  place[::3] = np.where(r.random((P // 3 + (P % 3 > 0), G)) < 0.1, T, place[::3])
  place[3] = T
  deviations, least = SETTINGS_OF[seed]
  return dict(length=length, place=place, deviations=np.array(deviations), least=np.array(least))


def right(place: np.ndarray, length: np.ndarray) -> np.ndarray:
  """1 where the answer is among the tokens that a row keeps."""
  return (place < length).astype(float)


def truncated(read, compute_reward, batch, **settings):
  """`apply_length_truncation`, which imports `compute_reward`."""
  names = dict(np=np, statistics=statistics, defaultdict=defaultdict)
  apply = lib.functions(read(TRUNCATION), ('apply_length_truncation',), **names)
  stand_in: Any = types.ModuleType('verl.trainer.ppo.reward')
  stand_in.compute_reward = compute_reward
  packages = {name: types.ModuleType(name) for name in ('verl', 'verl.trainer', 'verl.trainer.ppo')}
  with mock.patch.dict(sys.modules, packages | {stand_in.__name__: stand_in}):
    return apply.apply_length_truncation(batch, None, **settings)


def official(torch, read, data):
  """The function with a reward of the tokens that its masks keep."""
  length, place = data['length'].ravel(), data['place'].ravel()

  def graded(batch, _=None):
    kept = batch.batch['response_mask'].sum(1).numpy()
    score = torch.zeros((P * G, T))
    score[:, -1] = torch.tensor(right(place, kept))
    return score, {}

  mask = (torch.arange(T)[None] < torch.tensor(length)[:, None]).long()
  batch = types.SimpleNamespace(
    batch=dict(
      response_mask=mask,
      attention_mask=torch.cat([torch.ones((P * G, PROMPT), dtype=torch.long), mask], dim=1),
      responses=torch.zeros((P * G, T)),
    ),
    non_tensor_batch=dict(uid=np.arange(P * G) // G),
  )
  batch.batch['token_level_rewards'] = graded(batch)[0]
  cut, metrics = truncated(
    read,
    graded,
    batch,
    std_multiplier=float(data['deviations']),
    min_truncation_margin=int(data['least']),
  )
  seen = cut.batch['attention_mask'][:, PROMPT:].sum(1)
  assert (seen == cut.batch['response_mask'].sum(1)).all()
  return dict(
    length=cut.batch['response_mask'].sum(1),
    reward=cut.batch['token_level_rewards'].sum(1),
    count=[metrics['truncation/actually_truncated']],
  )


class Pool:
  """Grades texts of token numbers: right with the answer in them."""

  def score(self, rows, completions):
    del rows
    part_Bx1 = np.array([[str(ANSWER) in text.split()] for text in completions], np.float32)
    outcome_B = np.full(len(completions), rewards.OK, np.int8)
    return rewards.Scores(part_Bx1.reshape(-1, 1), outcome_B, {'grade/errors': 0}, '')


def ours(data):
  """Grading, truncation and grading again, as in a step of the project."""
  length_B, B = data['length'].ravel(), P * G
  tokens_BxT = np.zeros((B, T), np.int32)
  at = data['place'].ravel()
  tokens_BxT[np.flatnonzero(at < T), at[at < T]] = ANSWER
  truncate = length_truncation.outliers(
    deviations=float(data['deviations']), least_tokens=int(data['least'])
  )
  tokenizer = types.SimpleNamespace(decode=lambda ids: ' '.join(map(str, ids)))
  context: Any = types.SimpleNamespace(
    config=types.SimpleNamespace(rollouts=G, rewards=types.SimpleNamespace(right=1.0)),
    grading=types.SimpleNamespace(truncate=truncate, vote=None, rewards=[None]),
    models=types.SimpleNamespace(policy=types.SimpleNamespace(tokenizer=tokenizer)),
    episodes=None,
  )
  reason_B = np.full(B, STOPPED, np.int8)
  rollout = Rollout(tokens_BxT, None, length_B, reason_B, None, np.ones(B), None)
  texts = [tokenizer.decode(ids[:n]) for ids, n in zip(tokens_BxT, length_B, strict=True)]
  scores = grading.ScoreTable(context, Pool(), (texts, texts), rollout)
  rows = [Row('', '', (), '', '', {})] * B
  rollout = scores.grade(rollout, np.arange(B), rows)
  cut, metrics = grading._truncate(context, scores, rows, rollout)
  assert ((cut.reason_B == TRUNCATED) == (cut.length_B < length_B)).all()
  return dict(length=cut.length_B, reward=scores.part_BxK[:, 0], count=[metrics['grade/truncated']])


lib.main(__name__)

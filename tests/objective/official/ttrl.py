"""TTRL: votes of a group, rewards by agreement with the majority, the rollouts that are learned from, and the loss.

Its extraction and comparison of answers run on texts whose answer is one number, with stand-ins for its parsers of
LaTeX and of number words. Not covered: its KL to the first policy (coefficient 0.001) and its dual clip (at ratio 3),
which the config leaves out. Two rules differ, and the draws avoid both. A text without an answer votes for the empty
answer there, which can win, and has no vote here. Numbers of equal value in unequal notation, such as 1,000 and 1000
in boxes or 0.5 and 0.50, are counted apart there, though graded as equal, and together here.
"""

from __future__ import annotations

import ast
import collections
import functools
import re
import types
from typing import Any

import numpy as np

from jaxrl_llm import objective, rewards
from jaxrl_llm.config import loading as configs
from jaxrl_llm.objective import advantage, trust_region
from jaxrl_llm.rewards import majority_vote, verifiers
from jaxrl_llm.runner import grading
from jaxrl_llm.types import Row
from tests.objective.official import lib, verl_core

CORE, FUNCTIONAL = 'verl/' + verl_core.CORE, 'verl/' + verl_core.FUNCTIONAL
TRAINER = 'verl/verl/trainer/ppo/ray_trainer.py'
MANAGER = 'verl/verl/workers/reward_manager/ttrl.py'
SCORE = 'verl/verl/utils/reward_score/ttrl/'
METRICS, EXTRACT, VERIFY = (
  SCORE + f'{name}.py' for name in ('ttt_metrics', 'auto_extract', 'auto_verify')
)
EVAL, PARSER, GRADE, NORMALIZE = (
  SCORE + f'qwen/{name}.py'
  for name in ('qwen_eval', 'qwen_math_parser', 'math_grade', 'math_normalize')
)
OFFICIAL = lib.Official(
  'PRIME-RL/TTRL',
  '3e2cc9376dc7486256f6021b37c4353d0e1abe2b',
  (CORE, FUNCTIONAL, TRAINER, MANAGER, METRICS, EXTRACT, VERIFY, EVAL, PARSER, GRADE, NORMALIZE),
  'Apache-2.0',
)
P, VOTES, LEARNED = 5, 8, 4
B, T = P * VOTES, lib.T
FORMS = (
  '{}',
  'It is {}.',
  'The answer is {}.',
  'First 99, then \\boxed{{{}}}.',
  '5 more make {}.0',
  'So {:,}',
)
NOTHING = -1000  # for an answer: the text gives none
SEEDS = (0, 1, 2)
WITHOUT = {'empty rows': 'the official batch has none'}
MUTANTS = {
  'the last of equals': (
    majority_vote,
    'max(votes, key=votes.get)',
    'max(reversed(votes), key=votes.get)',
  ),
  'the rarest answer': (majority_vote, 'max(votes, key=votes.get)', 'min(votes, key=votes.get)'),
  'a vote of those learned from': (
    majority_vote,
    'for answer in group if answer is not None',
    'for answer in group[:4] if answer is not None',
  ),
  'the others are learned from': (grading, '% G < vote.learn_from', '% G >= vote.learn_from'),
  'all are learned from': (grading, 'if vote.learn_from:', 'if False:'),
  'rewards by labels': (grading, 'return rollout, agree_B.astype(np.float32)', 'return rollout, reward_B'),
  'accuracy of the first row': (grading, 'correct_B[winner_P]', 'correct_B[::G]'),
  'biased std': (
    advantage,
    'jnp.maximum(n_Px1 - 1, 1))\n  return centered',
    'jnp.maximum(n_Px1, 1))\n  return centered',
  ),
  'lower bound': (
    trust_region,
    'return clip_masks.clip(log_ratio_BxT, tokens.advantage_BxT, 1 - low, 1 + high)',
    'return clip_masks.clip(log_ratio_BxT, tokens.advantage_BxT, 1 - 2 * low, 1 + high)',
  ),
}  # fmt: skip


def draw(seed: int) -> dict[str, np.ndarray]:
  """Groups of eight answers from two to five values: one all right, one of a tie, one wrong by majority, some random.

  At most one row of a group gives no answer, and never first. Ratios go far beyond the bounds of the clip.
  """
  r = np.random.default_rng(seed)
  label = r.integers(1000, 3000, P)
  answer = label[:, None] + r.integers(-2, 3, (P, VOTES)) * r.integers(1, 9, (P, 1))
  answer[1] = label[1]
  answer[2] = label[2] + np.array([1, 0, 0, 1, 2, 2, 3, 3])
  answer[3] = label[3] + np.array([7, 7, 0, 4, 4, 4, 4, 0])
  answer[4, 5] = answer[0, 3] = NOTHING
  length = r.integers(1, T + 1, B)
  length[::7] = T
  age = np.arange(B) % 5
  logp = np.log(r.uniform(0.03, 0.9, (B, T)))
  drift = 0.25 * age[:, None] * r.normal(size=(B, T))
  drift[:, 0] += r.choice([-2.0, -0.7, 0, 0.7, 2.0], B)
  old = logp - drift
  arrays = dict(logp=logp, old=old, entropy=r.uniform(0, 2, (B, T)))
  return dict(
    {name: np.round(x, 4) for name, x in arrays.items()},
    **dict(length=length, age=age, label=label, answer=answer, form=r.integers(0, len(FORMS), B)),
    correct=(answer == label[:, None]).ravel().astype(float),
  )


def texts_of(data: dict) -> list[str]:
  answers = data['answer'].ravel()
  return [
    'Who could say?' if answer == NOTHING else FORMS[form].format(int(answer))
    for form, answer in zip(data['form'], answers, strict=True)
  ]


def module(text: str, **namespace) -> types.SimpleNamespace:
  """All of a module but its imports, which `namespace` replaces."""
  tree = ast.parse(text)
  tree.body = [n for n in tree.body if not isinstance(n, ast.Import | ast.ImportFrom)]
  namespace |= dict(re=re, Counter=collections.Counter, List=list, Optional=dict, Union=dict)
  exec(compile(tree, '<official>', 'exec'), namespace)
  return types.SimpleNamespace(**namespace)


def votes_of(read):
  """Its `test_time_train_metrics`: extraction, vote and comparison."""
  import sympy
  from sympy.parsing import sympy_parser

  parser = module(read(PARSER), lru_cache=functools.lru_cache)
  normalize = module(read(NORMALIZE)).normalize_answer
  grade = module(read(GRADE), sympy=sympy, sympy_parser=sympy_parser, normalize_answer=normalize)
  names = ('qwen_reward_fn', 'qwen_reward_fn_gpqa')
  parts = dict(extract_answer=parser.extract_answer, grade_answer=grade.grade_answer)
  score = vars(lib.functions(read(EVAL), names, **parts))
  extract = module(read(EXTRACT), partial=functools.partial, **parts).auto_extract
  verify = lib.functions(
    read(VERIFY),
    ('auto_verify',),
    auto_extract=extract,
    simplerl_reward_fn=None,
    defaultdict=collections.defaultdict,
    **score,
  ).auto_verify
  return module(read(METRICS), auto_extract=extract, auto_verify=verify).test_time_train_metrics


class Batch(list):
  """In place of verl's DataProto: rows, and the columns of all."""

  def __init__(self, rows, batch):
    super().__init__(rows)
    self.batch = batch


def batch_of(torch, data: dict) -> Batch:
  """One prompt token, and responses whose tokens are the number of their row."""
  mask = torch.cat([torch.ones((B, 1)), torch.tensor(lib.mask(data))], dim=1).long()
  responses = torch.arange(B)[:, None].expand(B, T)
  columns = dict(prompts=torch.zeros((B, 1)).long(), responses=responses, attention_mask=mask)
  rows = []
  for b in range(B):
    truth = dict(ground_truth=str(data['label'][b // VOTES]))
    other = dict(reward_model=truth, data_source='MATH-TTT', extra_info=None)
    row = {name: x[b] for name, x in columns.items()}
    rows.append(types.SimpleNamespace(batch=row, non_tensor_batch=other))
  return Batch(rows, columns)


def official(torch, read, data):
  """Rewards of its manager for the rollouts that its trainer selects, its GRPO advantages and its clipped loss."""
  texts, quiet = texts_of(data), lambda *_: None
  names = dict(torch=torch, np=np, defaultdict=collections.defaultdict, print=quiet)
  owner, method = 'TTRLRewardManager', functools.partial(lib.method, read(MANAGER))
  self = types.SimpleNamespace(
    n_votes_per_prompt=VOTES,
    n_samples_per_prompt=LEARNED,
    num_examine=0,
    reward_fn_key='data_source',
    tokenizer=types.SimpleNamespace(decode=lambda ids, **_: texts[int(ids[0])]),
  )
  self._data_source_to_task = functools.partial(method(owner, '_data_source_to_task'), self)
  compute = method(owner, '_compute_ttrl_reward', test_time_train_metrics=votes_of(read), **names)
  reward, _, info = compute(self, batch_of(torch, data))
  select = lib.method(read(TRAINER), 'RayPPOTrainer', '_select_top_k_per_prompt')
  rows = select(None, np.arange(B), VOTES, LEARNED)

  x = lib.tensors(torch, {name: data[name] for name in ('logp', 'old', 'length')})
  means = lib.functions(read(FUNCTIONAL), ('masked_mean',), torch=torch)
  core = ('compute_grpo_outcome_advantage', 'compute_policy_loss', 'agg_loss')
  core = lib.functions(read(CORE), core, verl_F=means, **names)
  mask, uid = x.mask[rows], rows // VOTES
  a, _ = core.compute_grpo_outcome_advantage(reward.double(), mask, uid)
  loss, *_ = core.compute_policy_loss(x.old[rows], x.logp[rows], a, mask, 0.2, clip_ratio_c=1e9)
  exact = (mask.sum() + 1e-8) / mask.sum()
  shares = ('label_accuracy', 'majority_voting_reward', 'ground_truth_ratio')
  gradient = lib.outputs(x, loss, exact)['gradient']
  return dict(gradient=gradient, shares=[info[name] for name in shares])


def ours(data):
  """The vote of a graded step with the config's grader and objective, and the gradient of what it returns."""
  config: Any = configs.load('ttrl')
  vote: Any = dict(config.rewards.vote) | dict(learn_from=LEARNED)
  context: Any = types.SimpleNamespace(
    config=types.SimpleNamespace(rollouts=VOTES),
    grading=types.SimpleNamespace(vote=rewards.resolve_vote(vote, config.rewards, VOTES)),
  )
  texts, labels = texts_of(data), np.repeat(data['label'], VOTES)
  scores: Any = types.SimpleNamespace(texts=texts)
  rows = [Row('', '', (), str(label), '', {}) for label in labels]
  grade = getattr(verifiers, config.rewards.fn)
  label_B = np.array([grade(text, row) for text, row in zip(texts, rows, strict=True)])
  method = objective.method(config.objective)
  zeros = dict(reward=np.zeros(B), behavior=data['old'])
  batch = lib.batch(data | zeros, method.needs_old)
  rollout, reward_B, correct_B, metrics = grading._vote(
    context, scores, batch.rollout, label_B, label_B > 0
  )
  batch = batch._replace(
    rollout=rollout, reward_B=reward_B.astype(float), correct_B=correct_B.astype(float)
  )
  policies = objective.OtherPolicies(data['old'] if method.needs_old else None, None)
  target = objective.targets(method, batch, VOTES, None, policies=policies)
  c_BxT, _ = objective.coefficients(method, target, data['logp'], data['entropy'])
  names = ('vote_accuracy', 'vote_share', 'label_score/mean')
  return dict(gradient=-np.asarray(c_BxT), shares=[metrics[f'critic/{name}'] for name in names])


lib.main(__name__)

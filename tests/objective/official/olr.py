"""OLR: the label of each visit, the share of its majority and the slope, by the trainer's method for inactive noise.

In the official code a tie is one more answer, which no rollout gives, and it may become the label. Ours then keeps the
label; no draw has this case.

The official code counts epochs from 0 and replaces labels in those above `start_select_epoch`, which is START here:
`after` is START + 1 visits. Equality of answers is Math-Verify's there and that of strings here; the texts have whole
numbers. The learner is not covered.
"""

from __future__ import annotations

import collections
import functools
import types
from typing import Any

import numpy as np

from jaxrl_llm.curriculum import answer_consensus, labels
from tests.objective.official import lib

TRAINER, SCORE = 'verl/trainer/ppo/ray_trainer.py', 'verl/utils/reward_score/math_verify.py'
OFFICIAL = lib.Official(
  'ShenzhiYang2000/OLR',
  'da052ed8807691f6559c1e3ac9f5b4e1244680b1',
  (TRAINER, SCORE),
  'Apache-2.0',
)
START, SLOPE = 4, 0.05  # of exp_script/run_qwen3-4B-base_noise_label_weak_use_olr.sh
EPOCHS, P, G = 10, 24, 8
SEEDS = (8, 11, 13)
WITHOUT = {'*': 'its inputs are answers over visits'}
MUTANTS = {
  'a visit earlier': (answer_consensus, 'len(answer_V) <= after', 'len(answer_V) < after'),
  'a visit later': (answer_consensus, 'len(answer_V) <= after', 'len(answer_V) <= after + 1'),
  'any slope': (answer_consensus, 'or slope(share_V) < min_slope', ''),
  'the slope of two visits': (
    answer_consensus,
    'or slope(share_V) < min_slope',
    'or slope(share_V[-2:]) < min_slope',
  ),
  'any history': (answer_consensus, 'unique and most == answer_V[-1]', 'True'),
  'a tied history': (answer_consensus, 'not others or others[0][1] < count', 'True'),
  'ties are no majority': (
    answer_consensus,
    'Counter(answer_V)',
    'Counter(x for x in answer_V if x is not None)',
  ),
  'the first of a tie': (
    answer_consensus,
    'if not counts or counts[0][1] == second:',
    'if not counts:',
  ),
  'no answer is none': (answer_consensus, 'else int(None in answers)', 'else 0'),
  'share of answers': (
    answer_consensus,
    '/ len(answers)',
    '/ sum(x is not None for x in answers)',
  ),
  'slope': (answer_consensus, '/ (t_V @ t_V)', '/ len(t_V)'),
  'no replacement': (labels, 'return label if answer is None else answer', 'return label'),
}


def draw(seed: int) -> dict[str, np.ndarray]:
  """Answers −1 (none) to 4; most prompts agree more and more on one, every second one on another later.

  Every fourth one returns to its first answer, after as many visits with another. Some have a visit with one answer.
  None of these seeds has a slope of just SLOPE where it decides.
  """
  r = np.random.default_rng(seed)
  answer = np.zeros((EPOCHS, P, G), int)
  label, liked = r.integers(0, 5, P), r.integers(0, 5, P)
  start_P, rise_P = r.uniform(0.1, 0.6, P), r.uniform(-0.01, 0.1, P)
  for epoch in range(EPOCHS):
    for p in range(P):
      later = p % 2 == 1 and epoch >= 3 + p % 4
      rate = 0.95 if later else start_P[p] + rise_P[p] * epoch
      if p % 4 == 2:
        later, rate = 1 <= epoch <= 3, 0.95 if epoch > 3 else 0.5
      mine = r.random(G) < rate
      answer[epoch, p] = np.where(mine, (liked[p] + later) % 5, r.integers(-1, 5, G))
  answer[1, :4] = -1
  answer[1, :4, 0] = liked[:4]
  return dict(answer=answer, label=label)


class Rows(list):
  """In place of verl's DataProto: a list of rows."""

  def select_idxs(self, places: list[int]) -> Rows:
    return Rows(self[i] for i in places)


def text(answer: int) -> str:
  return 'I cannot say.' if answer < 0 else f'It is \\boxed{{{answer}}}.'


def rows(torch: Any, data: dict, epoch: int) -> Rows:
  """A batch of all prompts; the only response token is an answer + 1."""
  out = Rows()
  for p in range(P):
    for g in range(G):
      tokens = torch.tensor([data['answer'][epoch, p, g] + 1])
      label = str(data['label'][p])
      out.append(
        types.SimpleNamespace(
          batch=dict(
            prompts=torch.tensor([0]), responses=tokens, attention_mask=torch.ones(2).long()
          ),
          non_tensor_batch=dict(
            uid=p,
            extra_info=dict(index=p, original_ground_truth=label),
            reward_model=dict(ground_truth=label),
          ),
        )
      )
  return out


def grader(torch: Any, read: Any) -> Any:
  """`compute_reward` with the official score of a text and a label."""
  from math_verify import errors, metric, parser

  compute_score = lib.functions(
    read(SCORE),
    ('compute_score',),
    TimeoutException=errors.TimeoutException,
    math_metric=metric.math_metric,
    ExprExtractionConfig=parser.ExprExtractionConfig,
    LatexExtractionConfig=parser.LatexExtractionConfig,
  ).compute_score
  score: Any = functools.lru_cache(compute_score)

  def compute_reward(batch, _):
    scores = [
      score(
        text(int(row.batch['responses']) - 1), row.non_tensor_batch['reward_model']['ground_truth']
      )
      for row in batch
    ]
    return torch.tensor(scores, dtype=torch.float64)[:, None], {}

  return compute_reward


def trainer(torch: Any, read: Any) -> tuple[Any, Any]:
  """A trainer with the official methods, and the one that chooses labels."""
  import math_verify
  from scipy import stats

  space = dict(
    **dict(defaultdict=collections.defaultdict, Counter=collections.Counter, torch=torch, np=np),
    **dict(parse=functools.lru_cache(math_verify.parse), verify=math_verify.verify),
    **dict(linregress=stats.linregress, compute_reward=grader(torch, read)),
  )
  own = types.SimpleNamespace(
    config=types.SimpleNamespace(
      trainer=types.SimpleNamespace(start_select_epoch=START, slope_tres=SLOPE, use_olr=True)
    ),
    tokenizer=types.SimpleNamespace(decode=lambda ids, **_: text(int(ids[0]) - 1)),
    reward_fn=None,
    majority_answer_list=collections.defaultdict(list),
    **{name: {} for name in ('real_gt', 'majority_answer', 'sample_is_right')},
    **dict(unlabel_passrate_list={}, real_unlabel_passrate_list={}),
  )
  find = functools.partial(lib.method, read(TRAINER), 'RayPPOTrainer', **space)
  for name in ('_get_freq_list_count_freq', '_get_slope'):
    setattr(own, name, functools.partial(find(name), own))
  return own, find('_generate_pseudo_labels_and_update_passrate_weak_noise_label')


def official(torch, read, data):
  own, choose = trainer(torch, read)
  label, share, slope = [], [], []
  for epoch in range(EPOCHS):
    batch, _ = choose(own, rows(torch, data, epoch), epoch, {})
    chosen = [row.non_tensor_batch['reward_model']['ground_truth'] for row in batch[::G]]
    label.append([int(x) for x in chosen])  # a ValueError for a tie as label
    rates = [own.unlabel_passrate_list[p] for p in range(P)]
    share.append([float(x[-1]) for x in rates])
    slope.append([float(own._get_slope(x)) for x in rates])
  return dict(label=label, share=share, slope=slope)


def ours(data):
  refiner = labels.majority_refined(min_slope=SLOPE, after=START + 1)
  label, share, slope = [], [], []
  for answer_PxG in data['answer']:
    texts = [[None if x < 0 else str(x) for x in answer_G] for answer_G in answer_PxG.tolist()]
    refiner.observe(range(P), texts)
    chosen = [refiner.label(p, str(x)) for p, x in enumerate(data['label'].tolist())]
    label.append([int(str(x)) for x in chosen])
    shares = [visits for _, _, visits in refiner.state_dict()['visits']]
    share.append([x[-1] for x in shares])
    slope.append([answer_consensus.slope(x) for x in shares])
  return dict(label=label, share=share, slope=slope)


lib.main(__name__)

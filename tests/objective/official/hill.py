"""HiLL's hints: what a reply may hold, the rewards of hints, and whose group is learned."""

from __future__ import annotations

import ast
import collections
import math
import re
import types
from typing import Any

import numpy as np

from jaxrl_llm import data as rows_of_data
from jaxrl_llm.config.schema import DataConfig
from jaxrl_llm.curriculum import hint_rules, hint_writing
from jaxrl_llm.learner import hint_reliance
from jaxrl_llm.runner import written_hints
from jaxrl_llm.types import Row
from tests.objective.official import clpo_core, lib

TRAINER, UTILS = 'verl/trainer/ppo/hill_ray_trainer.py', 'verl/trainer/ppo/hinter_utils.py'
OFFICIAL = lib.Official(
  'Andree-9/HiLL', '857078e4907c22d24a6f51438e85823f714ee93c', (TRAINER, UTILS), 'Apache-2.0'
)
Q, M, N, T = 12, 4, 8, 5  # questions, hints, rollouts of each, tokens
TEMPERATURE = 0.3  # of scripts/run_hill.sh
QUESTION, LONGEST = 'How many are two and three?', 80  # characters of a question with its hint
# (reply, answer)
REPLIES = (
  ('<analysis>\nNo.\n</analysis>\n\n<hint>\nCount the fingers.\n</hint>\n', '5'),
  ('<HINT> Count. </Hint> and <hint>never this</hint>', '5'),
  ('<hint>Count the fingers.', '5'),
  ('Count the fingers.', '5'),
  ('<hint> \n </hint>', '5'),
  ('</hint><hint>Inside</hint>', '5'),
  ('<hint>one <hint>two</hint>', '5'),
  ('<hint>There are 5 fingers.</hint>', '5'),
  ('<hint>Their sum = 5.</hint>', '5'),
  ('<hint>It EQUALS 5</hint>', '5'),
  ('<hint>It is equal to 5</hint>', '5'),
  ('<hint>This is 5</hint>', ' 5 '),
  ('<hint>The answer: 5</hint>', '5'),
  ('<hint>Simply \\boxed{5}</hint>', '5'),
  ('<hint>Simply \\boxed{AB}</hint>', 'ab'),
  ('<hint>It is 57</hint>', '5'),
  ('<hint>Note 123 there</hint>', '123'),
  ('<hint>Note 12 there</hint>', '12'),
  ('<hint>note the FIVE fingers</hint>', 'Five'),
  ('<hint>note the fingers</hint>', 'Five'),
  ('<hint>note the fingers</hint>', ''),
  ('<hint>it is </hint>', ' '),
  (f'<hint>{"x" * (LONGEST - len(QUESTION) - 2)}</hint>', '5'),
  (f'<hint>{"x" * (LONGEST - len(QUESTION) - 1)}</hint>', '5'),
  ('', '5'),
)
WITHOUT = {'*': 'its inputs are groups with hints, and texts'}
SEEDS = (0, 1)
MUTANTS = {
  'no bound on reliance': (hint_writing, 'min(reliance, 0.0)', 'reliance'),
  'variance': (hint_writing, '(1 - rate**n - (1 - rate) ** n)', 'rate * (1 - rate)'),
  'no weight': (hint_writing, '* weight', '* 1'),
  'another temperature': (hint_rules, 'temperature: float = 0.3', 'temperature: float = 0.4'),
  'another penalty': (hint_rules, 'penalty: float = -0.2', 'penalty: float = -0.1'),
  'all wrong is as bad as no hint': (hint_writing, 'return 0.0', 'return self.penalty'),
  'the last of equal hints': (hint_writing, '-number))', 'number))'),
  'groups that are not mixed': (hint_writing, 'first if mixed_M[first] else None', 'first'),
  'case of tags': (hint_writing, 're.IGNORECASE | re.DOTALL', 're.DOTALL'),
  'one line': (hint_writing, 're.IGNORECASE | re.DOTALL', 're.IGNORECASE'),
  'the last tag': (hint_writing, '>(.*?)</', '>(.*)</'),
  'short answers of three': (hint_writing, '_SHORT_CHARS = 2', '_SHORT_CHARS = 3'),
  'short answers of one': (hint_writing, '_SHORT_CHARS = 2', '_SHORT_CHARS = 1'),
  'equals': (hint_writing, "'equals ', ", ''),
  'equal to': (hint_writing, "'equal to ', ", ''),
  'is': (hint_writing, "'is ', ", ''),
  'answer': (hint_writing, ", 'answer: ')", ')'),
  'sign': (hint_writing, "('= ', ", '('),
  'boxed': (hint_writing, "if f'\\\\boxed{{{answer}}}' in hint:", 'if False:'),
  'case of answers': (hint_writing, 'return answer.lower() in hint.lower()', 'return answer in hint'),
  'a character too few': (written_hints, 'text=text)) > self', 'text=text)) >= self'),
  'reliance upside down': (hint_reliance, 'plain_BxT - hinted_BxT', 'hinted_BxT - plain_BxT'),
  'sum of tokens': (hint_reliance, 'jnp.maximum(length_B, 1)', '1'),
  'padding': (hint_reliance, '< length_B[:, None]', '>= 0'),
}  # fmt: skip


def draw(seed: int) -> dict[str, np.ndarray]:
  """Groups of N rollouts with each hint: rates from 0 to 1, hints that failed a check, and equal hints of a question."""
  r = np.random.default_rng(seed)
  rate_QxM = r.choice([0.0, 0.1, 0.4, 0.7, 1.0], (Q, M))
  rate_QxM[0] = 0  # no hint helps
  rate_QxM[1] = [0, 0, 1, 0]
  right = r.random((Q, M, N)) < rate_QxM[..., None]
  right[2] = right[2, :1]
  right[2, :, :2] = [True, False]
  passed = r.random((Q, M)) < 0.8
  passed[2:4] = True
  passed[4] = [False, False, True, False]
  passed[5] = False
  length = r.integers(1, T + 1, (Q, M, N))
  hinted = np.log(r.uniform(0.1, 0.9, (Q, M, N, T)))
  plain = hinted + 0.4 * r.normal(size=hinted.shape) - 0.1
  length[2], hinted[2], plain[2] = length[2, :1], hinted[2, :1], plain[2, :1]
  logs = dict(plain=np.round(plain, 4), hinted=np.round(hinted, 4))
  return dict(right=right, passed=passed, length=length, **logs)


class Rows:
  """In place of verl's DataProto: rows of tensors."""

  def __init__(self, batch: dict[str, Any]):
    self.batch = batch

  def __len__(self) -> int:
    return len(next(iter(self.batch.values())))

  def __getitem__(self, rows: slice) -> Rows:
    return Rows({name: x[rows] for name, x in self.batch.items()})


def encoded(texts):
  """Length and a weighted sum of the character codes of each text."""
  return [(len(text), sum((i + 1) * ord(c) for i, c in enumerate(text))) for text in texts]


def reliance(torch, trainer: str, data: dict):
  """The trainer's statements between two passes and the map of reliance, [Q, M, N]."""
  length = torch.tensor(data['length'].reshape(-1))
  names = dict(
    resp_masks=(torch.arange(T)[None] < length[:, None]).float().to(torch.float64),
    qh_log_probs=torch.tensor(data['hinted'].reshape(-1, T)),
    q_log_probs=torch.tensor(data['plain'].reshape(-1, T)),
  )
  starts = (
    *('token_counts = ', 'qh_mean_logprob = ', 'q_mean_logprob = '),
    'all_hint_reliance = q_mean_logprob',
  )
  for start in starts:
    names = clpo_core.run(clpo_core.statement(trainer, ast.Assign, start), **names)
  return names['all_hint_reliance'].reshape(Q, M, N)


def chosen_hints(torch, read, data: dict, helpers) -> dict:
  """Rewards of all hints, and 1 + the hint whose group replaces the original one, 0 where none does."""
  trainer = read(TRAINER)
  by_hint = reliance(torch, trainer, data)
  batches = []
  for hint in range(M):
    right = torch.tensor(data['right'][:, hint].reshape(-1, 1).astype(float))
    batches.append(Rows(dict(token_level_rewards=right, response_mask=torch.ones_like(right))))
  pairs = [(hint, question) for hint in range(M) for question in range(Q)]
  passed = {(hint, question): bool(data['passed'][question, hint]) for hint, question in pairs}
  originals = {question * N: 0.0 for question in range(Q)}
  best, rewards, _ = helpers.select_best_hint(
    hinted_prompts_batches=batches,
    num_repeat=N,
    hard_prompt_indices=list(originals),
    original_prob_terms=originals,
    success_map=passed,
    timeout_map={},
    semantic_passed_map={},
    reward_type='transfer_weighted_non_deg',
    hint_reliance_map={(h, q): by_hint[q, h] for h, q in pairs if passed[h, q]},
    transfer_temperature=TEMPERATURE,
  )
  loop = clpo_core.statement(trainer, ast.For, 'filtered_best_hints[group_base] = hint_info')
  kept = clpo_core.run(
    loop, best_hints=best, original_prob_terms=originals, filtered_best_hints={}
  )['filtered_best_hints']
  chosen = [kept[start]['hint_id'] + 1 if start in kept else 0 for start in originals]
  return dict(rewards=[rewards[start] for start in originals], chosen=chosen)


def checked_replies(read, helpers) -> dict:
  """The hints that the trainer's loop over replies passes, '' for others, and how many failed which check."""
  texts = [reply for reply, _ in REPLIES]
  count = len(texts)
  tokenizer = types.SimpleNamespace(
    decode=lambda number, **_: texts[number], encode=lambda text, **_: text
  )

  def length_of(original_question, hint_text, **_):
    return len(helpers._append_hint_to_original_question(original_question, hint_text))

  loop = clpo_core.statement(read(TRAINER), ast.For, 'match = re.search(')
  names = clpo_core.run(
    loop,
    re=re,
    self=types.SimpleNamespace(
      hinter_tokenizer=tokenizer, tokenizer=tokenizer, config=types.SimpleNamespace(data=None)
    ),
    hint_batch_iter=Rows(dict(responses=range(count))),
    original_questions=[QUESTION] * count,
    gold_answers=[answer for _, answer in REPLIES],
    check_answer_leaking_string_match=helpers.check_answer_leaking_string_match,
    check_hinted_prompt_length=length_of,
    max_prompt_length=LONGEST,
    **{name: [] for name in ('hint_texts', 'success_flags', 'hinter_raw_outputs')},
    **dict(hint_token_lengths=[], num_parsing_errors=0, num_overlong=0, num_answer_leaking=0),
  )
  flags = names['success_flags']
  hints = [text if flag else '' for text, flag in zip(names['hint_texts'], flags, strict=True)]
  counts = [names[f'num_{name}'] for name in ('parsing_errors', 'answer_leaking', 'overlong')]
  questions = [
    helpers._append_hint_to_original_question(QUESTION, hint) if hint else '' for hint in hints
  ]
  return dict(hints=encoded(hints), counts=counts, questions=encoded(questions))


def official(torch, read, data):
  penalty = clpo_core.statement(read(UTILS), ast.Assign, 'GATE_FAILURE_PENALTY = ')
  names = (
    *('compute_hint_reward', 'select_best_hint', 'check_answer_leaking_string_match'),
    '_append_hint_to_original_question',
  )
  helpers = lib.functions(
    read(UTILS), names, math=math, torch=torch, **_constants(clpo_core.run(penalty))
  )
  return chosen_hints(torch, read, data, helpers) | checked_replies(read, helpers)


def _constants(names: dict[str, Any]) -> dict[str, Any]:
  return {name: value for name, value in names.items() if name.isupper()}


class Letters:
  """A token is a character."""

  end_ids = frozenset({0})

  def encode(self, text):
    return [ord(c) for c in text]

  def decode(self, ids):
    return ''.join(map(chr, ids))


def own_replies() -> dict:
  """The same by `WrittenHints`."""
  settings = DataConfig(source='made', template='{question}', chat=False)
  rows = [Row(str(i), QUESTION, (), answer, 'made', {}) for i, (_, answer) in enumerate(REPLIES)]
  table = rows_of_data.make_table(rows, settings, LONGEST, Letters())
  provider = written_hints.WrittenHints(hint_rules.written(), table, Letters(), settings, seed=0)
  counts: collections.Counter = collections.Counter(unread=0, leaks=0, too_long=0)
  hints = [provider._checked(i, reply, counts) for i, (reply, _) in enumerate(REPLIES)]
  questions = [
    Letters().decode(provider._encode(i, written_hints._HINTED, text=hint).tolist()) if hint else ''
    for i, hint in enumerate(hints)
  ]
  counts_N = [counts[name] for name in ('unread', 'leaks', 'too_long')]
  return dict(hints=encoded(hints), counts=counts_N, questions=encoded(questions))


def ours(data):
  writing = hint_rules.written().writing
  assert writing is not None
  logs = (data[name].reshape(-1, T) for name in ('plain', 'hinted'))
  ratio = hint_reliance.mean_log_ratio(*logs, data['length'].reshape(-1))
  ratio = np.asarray(ratio).reshape(Q, M, N)
  rewards, chosen = [], []
  for right_MxN, passed_M, ratio_MxN in zip(data['right'], data['passed'], ratio, strict=True):
    mean = written_hints._mean_reliance(ratio_MxN, right_MxN)
    sums = [int(x.sum()) for x in right_MxN]
    rewards.append(
      [
        writing.reward(k, N, own) if passed else writing.penalty
        for k, own, passed in zip(sums, mean, passed_M, strict=True)
      ]
    )
    mixed = [bool(passed) and 0 < k < N for k, passed in zip(sums, passed_M, strict=True)]
    best = hint_writing.best(rewards[-1], mixed)
    chosen.append(0 if best is None else best + 1)
  return dict(rewards=rewards, chosen=chosen) | own_replies()


lib.main(__name__)

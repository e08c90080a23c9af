"""CLPO's choice of prompts to rewrite, and the question that it reads in a reply."""

from __future__ import annotations

import ast
import types

import numpy as np

from jaxrl_llm.curriculum import hint_rules, rewriting
from jaxrl_llm.types import FROM_HARD, FROM_MEDIUM
from tests.objective.official import clpo_core, lib

OFFICIAL = lib.Official(*clpo_core.PINNED, (clpo_core.TRAINER,), 'Apache-2.0')
REPLIES = (
  'How many is two and three?',
  '```text\nHow many is two and three?\n```',
  'Here it is:\n```text How many is two and three? ``` Good luck! ```text No, this one: 1 + 1```',
  '```\nHow many is two and three?\n```\nand\n```text\nWhat is three plus two?\n```',
  '```\nHow many is two and three?\n``` done',
  '```python\nHow many is two and three?',
  '```text\n5\n```',
  ' ten chars ',
  ' 10 charsss\n',
  'eleven char',
  'x' * 1999,
  'x' * 2000,
  '',
  '``````',
)
WITHOUT = {'*': 'its inputs are rates and texts'}
MUTANTS = {
  'hard below the limit': (rewriting, 'if rate <= self.hard:', 'if rate < self.hard:'),
  'medium below the limit': (rewriting, 'if rate <= self.medium', 'if rate < self.medium'),
  'all others are medium': (rewriting, 'if rate <= self.medium else PLAIN', 'if rate <= 1 else PLAIN'),
  'any fence first': (rewriting, "_FENCES = ('```text', '```')", "_FENCES = ('```', '```text')"),
  'the last fence': (rewriting, 'reply.split(fence)[1]', 'reply.split(fence)[-1]'),
  'unstripped': (rewriting, 'question = reply.strip()', 'question = reply'),
  'ten characters': (hint_rules, 'least_chars: int = 11', 'least_chars: int = 10'),
  'two thousand characters': (hint_rules, 'most_chars: int = 1999', 'most_chars: int = 2000'),
}  # fmt: skip


def draw(seed):
  """All rates of groups of up to 10 rollouts; the replies are above."""
  del seed
  return dict(pairs=np.array([(k, n) for n in range(1, 11) for k in range(n + 1)]))


def encoded(questions):
  """Length and a weighted sum of the character codes of each text."""
  return [(len(text), sum((i + 1) * ord(c) for i, c in enumerate(text))) for text in questions]


def official(torch, read, data):
  """The statements of its trainer that choose prompts, and its loop over replies."""
  trainer = read(clpo_core.TRAINER)
  rates = {
    number: float(np.mean([1.0] * k + [0.0] * (n - k)))
    for number, (k, n) in enumerate(data['pairs'])
  }
  limits = dict(clpo_hard_acc_upper=clpo_core.HARD, clpo_med_acc_lower=clpo_core.HARD)
  self = types.SimpleNamespace(clpo_med_acc_upper=clpo_core.MEDIUM, **limits)
  kinds = np.zeros(len(rates))
  for name, kind in (('hard_uids', FROM_HARD), ('med_uids', FROM_MEDIUM)):
    start = f'{name} = [u for u, a in uid2acc.items() if '
    limit = 'a <= self' if kind == FROM_HARD else 'self'
    node = clpo_core.statement(trainer, ast.Assign, start + limit)
    kinds[clpo_core.run(node, uid2acc=rates, self=self)[name]] = kind
  loop = clpo_core.statement(trainer, ast.For, 'enumerate(raw_rewritten_responses)')
  found = dict(rewritten_questions=[], valid_indices=[])
  clpo_core.run(loop, raw_rewritten_responses=REPLIES, **found)
  questions = [''] * len(REPLIES)
  for number, text in zip(found['valid_indices'], found['rewritten_questions'], strict=True):
    questions[number] = text
  return dict(kinds=kinds, questions=encoded(questions))


def ours(data):
  rule = hint_rules.rewritten(hard=clpo_core.HARD, medium=clpo_core.MEDIUM).rewriting
  assert rule is not None
  kinds = np.array([rule.kind(int(k), int(n)) for k, n in data['pairs']])
  kinds = np.where(np.isin(kinds, (FROM_HARD, FROM_MEDIUM)), kinds, 0)
  return dict(kinds=kinds, questions=encoded([rule.question_in(text) for text in REPLIES]))


lib.main(__name__)

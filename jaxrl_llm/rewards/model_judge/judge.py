"""A language model as judge: another part of the registry of `config.rewards`."""

from __future__ import annotations

import functools
import math
import re
import types
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.rewards.model_judge import client, http, verdict
from jaxrl_llm.types import Row, UserError

_ASKED = 'Question:\n{question}\n\nReference answer:\n{answer}\n\nReply to be judged:\n{reply}\n\n'
_TEMPLATE = _ASKED + (
  'How good is the reply, from {worst} (worst) to {best} (best)? Answer with a short reason, and end with JSON: '
  '{"score": number}.'
)
_RUBRIC = _ASKED + (
  'Criteria:\n{criteria}\n\nHow well does the reply fulfil each criterion, from {worst} (not at all) to {best} '
  '(wholly)? Answer with a short reason for each, and end with JSON: {"scores": [a number for each, in '
  'their order]}.'
)
_NOTHING: Mapping[str, float] = types.MappingProxyType({})


@client.with_server
def judge(
  text: str,
  row: Row,
  *,
  server: http.Endpoint,
  template: str = '',
  criteria: Mapping[str, float] = _NOTHING,
  row_criteria: bool = False,
  regex: str = '',
  field: str = 'score',
  worst: float = 0.0,
  best: float = 10.0,
) -> float:
  """(x − worst) / (best − worst) in [0, 1], x the score that a model gives; with criteria Σ wᵢ·scoreᵢ / Σ wᵢ.

  Asked is POST base_url/chat/completions, as OpenAI's. template has {question}, {answer}, {reply}, which are put in
  between marks that their authors cannot guess, as data; '' is our own. The score is `field` of the last JSON object
  in the judge's answer, or the first group of the last match of `regex`. criteria: text → weight, judged in one call,
  as a list `scores`; row_criteria: the row's `rubric`, a list of {criterion, weight}, instead. An answer without
  a readable score, or beyond worst and best, is an error of the item; so is what is asked beyond the budget.

  The settings of the server are those of endpoint.Endpoint. cache: a file on a local disk, with the answers by (model,
  messages). All workers share it, and their rate limit and budget are kept in it: they hold for all runs on this
  machine that name it. config.rewards.workers ask at once, each one thing at a time; an item has give_up_s, less than
  config.rewards.deadline_s. key_env names the environment variable with the key; no config or file has it. right = 1.0
  takes only the best score for right: see config.rewards.right.

  The weighted sum is the explicit one of arXiv:2507.17746 (Rubrics as Rewards), there over criteria that are met or
  not; prompts are our own, reconstructed from what such papers tell. Source: none.
  """
  known = _criteria(row) if row_criteria else dict(criteria)
  lines = (f'{n}. {told}' for n, told in enumerate(known, 1))
  places = dict(criteria='\n'.join(lines), worst=f'{worst:g}', best=f'{best:g}')
  data = dict(question=client.question_of(row), answer=row.answer or '(none)', reply=text)
  asked = client.messages(template or (_RUBRIC if known else _TEMPLATE), data, places)
  read = functools.partial(_read, known=known, regex=regex, field=field, worst=worst, best=best)
  return client.answered(server, asked, read, server.until())


def _read(
  reply: str, *, known: dict[str, float], regex: str, field: str, worst: float, best: float
) -> float:
  if not known:
    value = verdict.by_regex(reply, regex) if regex else verdict.by_field(reply, field)
    return verdict.score(value, worst, best)
  values = verdict.by_field(reply, 'scores')
  if not isinstance(values, list) or len(values) != len(known):
    raise ValueError(f'the judge gives no {len(known)} scores, one a criterion: {str(values)[:60]}')
  scores = [verdict.score(value, worst, best) for value in values]
  weights = known.values()
  return sum(w * s for w, s in zip(weights, scores, strict=True)) / sum(weights)


def _criteria(row: Row) -> dict[str, float]:
  try:
    found = {str(one['criterion']): float(one.get('weight', 1.0)) for one in row.extra['rubric']}
  except (KeyError, TypeError, AttributeError, ValueError):
    found = {}
  if not found or not all(0 < weight < math.inf for weight in found.values()):
    raise ValueError(f"row {row.id} holds no 'rubric', a list of {{criterion, weight above 0}}")
  return found


def _check(told: dict[str, Any], where: str) -> None:
  """Settings out of range; `told` has config.rewards.deadline_s and workers, too."""
  client.check(told, where)
  _check_reading(told, where)


def _check_reading(told: dict[str, Any], where: str) -> None:
  template, rubric = told['template'], bool(told['criteria']) or told['row_criteria']
  if template and not ('{reply}' in template and ('{criteria}' in template) == rubric):
    needs = (
      '{reply} and {criteria}' if rubric else '{reply}, and {criteria} only where there are some'
    )
    raise UserError(f'{where}.template={template[:80]!r} must hold {needs}.')
  if told['criteria'] and told['row_criteria']:
    raise UserError(f"{where}.row_criteria=True takes the rows' own; leave {where}.criteria empty.")
  if not all(0 < weight < math.inf for weight in told['criteria'].values()):
    raise UserError(
      f'{where}.criteria={dict(told["criteria"])!r} must be texts with weights above 0.'
    )
  if not -math.inf < told['worst'] < told['best'] < math.inf:
    raise UserError(f'{where}.worst={told["worst"]!r} must be below {where}.best={told["best"]!r}.')
  if told['regex'] and rubric:
    raise UserError(
      f'{where}.regex={told["regex"]!r} reads one score; leave it empty with criteria.'
    )
  try:
    groups = re.compile(told['regex']).groups if told['regex'] else 1
  except (re.error, OverflowError, RecursionError):
    groups = 0
  if not groups:
    raise UserError(
      f'{where}.regex={told["regex"]!r} must be a regular expression with a group, the score.'
    )


CHECKS = {judge: _check}
ROWS = {judge: lambda row, told: _criteria(row) if told['row_criteria'] else None}

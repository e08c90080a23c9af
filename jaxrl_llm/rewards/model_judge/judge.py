"""A language model that scores completions, for `config.rewards`."""

from __future__ import annotations

import functools
import math
import re
import types
from collections.abc import Mapping

from jaxrl_llm.rewards.model_judge import client, http, verdict
from jaxrl_llm.rewards.outcomes import Settings
from jaxrl_llm.types import Row, UserError

_QUESTION = (
  'Question:\n{question}\n\nReference answer:\n{answer}\n\nReply to be judged:\n{reply}\n\n'
)
_TEMPLATE = _QUESTION + (
  'How good is the reply, from {worst} (worst) to {best} (best)? Answer with a short reason, and end with JSON: '
  '{"score": number}.'
)
_RUBRIC = _QUESTION + (
  'Criteria:\n{criteria}\n\nHow well does the reply fulfil each criterion, from {worst} (not at all) to {best} '
  '(wholly)? Answer with a short reason for each, and end with JSON: {"scores": [a number for each, in '
  'their order]}.'
)
_NO_CRITERIA: Mapping[str, float] = types.MappingProxyType({})


@client.with_server
def judge(
  text: str,
  row: Row,
  *,
  server: http.Endpoint,
  template: str = '',
  criteria: Mapping[str, float] = _NO_CRITERIA,
  row_criteria: bool = False,
  regex: str = '',
  field: str = 'score',
  worst: float = 0.0,
  best: float = 10.0,
) -> float:
  """Returns (x − worst) / (best − worst) in [0, 1] for the score x of a model; with criteria Σ wᵢ·scoreᵢ / Σ wᵢ.

  Requests are POST base_url/chat/completions, as for OpenAI. template has {question}, {answer} and {reply}, which are
  inserted as data between unpredictable marks; '' = the built-in one. The score is `field` of the last JSON object of
  the answer, or the first group of the last match of `regex`. criteria: text → weight, scored in one request as a list
  `scores`; row_criteria: the row's `rubric` instead, a list of {criterion, weight}. A missing score, a score out of
  range and a spent budget are errors of the item.

  The settings of the server are those of http.Endpoint. cache: a file on a local disk with the answers by (model,
  messages). It also holds rate limit and budget, which apply to all runs on this machine with the same file. Each of
  config.rewards.workers sends one request at a time; an item has give_up_s, less than config.rewards.deadline_s.
  key_env
  names the environment variable with the key, which is never stored. With config.rewards.right=1.0 only the best score
  counts as right.

  The weighted sum is the explicit aggregation of arXiv:2507.17746 (Rubrics as Rewards), there over criteria that are
  met or not; the prompts are reconstructed from such papers.
  """
  weights = _criteria(row) if row_criteria else dict(criteria)
  lines = (f'{n}. {criterion}' for n, criterion in enumerate(weights, 1))
  places = dict(criteria='\n'.join(lines), worst=f'{worst:g}', best=f'{best:g}')
  data = dict(question=client.question_of(row), answer=row.answer or '(none)', reply=text)
  request = client.messages(template or (_RUBRIC if weights else _TEMPLATE), data, places)
  parse = functools.partial(
    _parse, criteria=weights, regex=regex, field=field, worst=worst, best=best
  )
  return client.answered(server, request, parse, server.until())


def _parse(
  reply: str, *, criteria: dict[str, float], regex: str, field: str, worst: float, best: float
) -> float:
  if not criteria:
    value = verdict.by_regex(reply, regex) if regex else verdict.by_field(reply, field)
    return verdict.score(value, worst, best)
  values = verdict.by_field(reply, 'scores')
  if not isinstance(values, list) or len(values) != len(criteria):
    raise ValueError(
      f'the judge gives no {len(criteria)} scores, one per criterion: {str(values)[:60]}'
    )
  scores = [verdict.score(value, worst, best) for value in values]
  weights = criteria.values()
  return sum(w * s for w, s in zip(weights, scores, strict=True)) / sum(weights)


def _criteria(row: Row) -> dict[str, float]:
  try:
    criteria = {
      str(entry['criterion']): float(entry.get('weight', 1.0)) for entry in row.extra['rubric']
    }
  except (KeyError, TypeError, AttributeError, ValueError):
    criteria = {}
  if not criteria or not all(0 < weight < math.inf for weight in criteria.values()):
    raise ValueError(f"row {row.id} holds no 'rubric', a list of {{criterion, weight above 0}}")
  return criteria


def _check(settings: Settings, where: str) -> None:
  """Raises UserError for settings out of range; they include config.rewards.deadline_s and workers."""
  client.check(settings, where)
  _check_reading(settings, where)


def _check_reading(settings: Settings, where: str) -> None:
  template, rubric = settings['template'], bool(settings['criteria']) or settings['row_criteria']
  if template and not ('{reply}' in template and ('{criteria}' in template) == rubric):
    needs = (
      '{reply} and {criteria}' if rubric else '{reply}, and {criteria} only where there are some'
    )
    raise UserError(f'{where}.template={template[:80]!r} must hold {needs}.')
  if settings['criteria'] and settings['row_criteria']:
    raise UserError(
      f'{where}.row_criteria=True uses those of the rows; leave {where}.criteria empty.'
    )
  if not all(0 < weight < math.inf for weight in settings['criteria'].values()):
    raise UserError(
      f'{where}.criteria={dict(settings["criteria"])!r} must be texts with weights above 0.'
    )
  if not -math.inf < settings['worst'] < settings['best'] < math.inf:
    raise UserError(
      f'{where}.worst={settings["worst"]!r} must be below {where}.best={settings["best"]!r}.'
    )
  if settings['regex'] and rubric:
    raise UserError(
      f'{where}.regex={settings["regex"]!r} reads one score; leave it empty with criteria.'
    )
  try:
    groups = re.compile(settings['regex']).groups if settings['regex'] else 1
  except (re.error, OverflowError, RecursionError):
    groups = 0
  if not groups:
    raise UserError(
      f'{where}.regex={settings["regex"]!r} must be a regular expression with a group, the score.'
    )


CHECKS = {judge: _check}
ROWS = {judge: lambda row, settings: _criteria(row) if settings['row_criteria'] else None}

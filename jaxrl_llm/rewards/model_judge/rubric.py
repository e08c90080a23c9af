"""A judge with a separate verdict on each criterion or each step, for `config.rewards`."""

from __future__ import annotations

import math
import re
import types
from collections.abc import Mapping

from jaxrl_llm.rewards.model_judge import aggregate, client, http, verdict
from jaxrl_llm.rewards.outcomes import Settings
from jaxrl_llm.types import JsonObject, Row, UserError

_CRITERION = (
  'Question:\n{question}\n\nReference answer:\n{answer}\n\nReply to be judged:\n{reply}\n\nCriterion:\n{criterion}\n\n'
  'Is the criterion met by the reply? It may describe a fault, and then is met by a reply that has it. Where the '
  'criterion names several things, all of them must hold, unless it says otherwise. Think it over in a few sentences, '
  'then end with JSON: {"met": true} or {"met": false}.'
)
_STEP = (
  'Problem:\n{question}\n\nThe solution so far:\n{before}\n\nIts next step:\n{step}\n\n'
  'Is this step sound: right in what it says and computes, and leading on to a solution? Judge this step alone, not '
  'what was before. Work it through first, then end with JSON: {"sound": true} or {"sound": false}.'
)
_NO_CRITERIA: Mapping[str, float] = types.MappingProxyType({})


@client.with_server
def rubric(
  text: str,
  row: Row,
  *,
  server: http.Endpoint,
  criteria: Mapping[str, float] = _NO_CRITERIA,
  row_criteria: bool = False,
  only: str = '',
  template: str = '',
) -> float:
  """Returns Σ points of met criteria / Σ points above 0, clipped to [0, 1], arXiv:2507.17746 (explicit aggregation).

  Each criterion is a request. criteria: text → points, negative for faults; row_criteria: the row's `rubric` or
  `rubrics` instead, a list of {criterion, points} or {description, weight}, also inside reward_model or extra_info.
  only: returns the degree to which this one of `criteria` is met; with weight=0.0 and a name, a part of
  config.rewards.parts logs it from cached answers. template has {question}, {answer}, {reply} as data, and {criterion};
  the answer ends with JSON whose `met` is true, false or a number from 0 to 1. Server, cache, budget and failures are
  those of `judge`; give_up_s is the limit for all criteria, and a missing verdict is an error of the item. The prompts
  are not those of the paper.
  """
  points_of_criteria = _criteria(row) if row_criteria else list(criteria.items())
  data = dict(question=client.question_of(row), answer=row.answer or '(none)', reply=text)
  requests = [
    client.messages(template or _CRITERION, data, dict(criterion=text))
    for text, _ in points_of_criteria
    if only in ('', text)
  ]
  met_C = client.each_answered(server, requests, lambda answer: _share(answer, 'met'))
  points_C = [points for _, points in points_of_criteria]
  return met_C[0] if only else aggregate.points(points_C, met_C)


@client.with_server
def steps(
  text: str,
  row: Row,
  *,
  server: http.Endpoint,
  cut: str = r'\n\s*\n',
  most_steps: int = 16,
  combine: str = 'mean',
  template: str = '',
) -> float:
  """Returns the mean, min, product or last of a judge's verdicts on the steps, each in [0, 1], arXiv:2508.19229.

  combine=before_error returns the share of the text before the first step with a verdict below ½, and 1 without one.

  Steps are the parts between matches of the regular expression `cut` (empty lines; r'</?chunk>' for a policy that marks
  its steps); if there are more than most_steps, neighbors are joined. Each step is a request with the problem, the
  earlier steps and this one. template has {question}, {answer}, {before}, {step} as data; the answer gives reasons and
  ends with JSON whose `sound` is true, false or a number from 0 to 1. Server, cache, budget and failures are those of
  `judge`; give_up_s is the limit for all steps.

  The judge of the paper (StepWiser) is trained by RL on relative outcomes of rollouts, with a policy that learns to cut
  its steps; here any served model judges, and cuts are by rule. Reconstructed from the abstract and third-party notes;
  the prompts are not those of the paper.
  """
  parts, before_N = _steps(text, cut, most_steps)
  data = dict(question=client.question_of(row), answer=row.answer or '(none)')
  requests = [
    client.messages(
      template or _STEP, data | dict(before='\n\n'.join(parts[:n]) or '(nothing)', step=part), {}
    )
    for n, part in enumerate(parts)
  ]
  sound_N = client.each_answered(server, requests, lambda answer: _share(answer, 'sound'))
  return aggregate.OF_STEPS[combine](sound_N, before_N)


def _share(answer: str, field: str) -> float:
  return verdict.share(verdict.by_field(answer, field))


def _steps(text: str, cut: str, most: int) -> tuple[list[str], list[float]]:
  """The parts between the cuts, joined to at most `most` steps, and the share of the text before each.

  An empty completion is one empty step.
  """
  edges = [0, *(edge for match in re.finditer(cut, text) for edge in match.span()), len(text)]
  spans = [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if text[a:b].strip()]
  spans = spans or [(0, 0)]
  count = min(most, len(spans))
  bounds = [i * len(spans) // count for i in range(count + 1)]
  steps = [
    '\n\n'.join(text[a:b].strip() for a, b in spans[start:end])
    for start, end in zip(bounds, bounds[1:], strict=False)
  ]
  # White space before the completion belongs to its first step.
  starts = [0, *(spans[start][0] for start in bounds[1:-1])]
  return steps, [start / max(len(text), 1) for start in starts]


def _criteria(row: Row) -> list[tuple[str, float]]:
  places = [row.extra, row.extra.get('reward_model'), row.extra.get('extra_info')]
  rubrics = [place[n] for place in places if isinstance(place, dict) for n in _NAMES if n in place]
  try:
    criteria = [_criterion(entry) for entry in rubrics[0]]
  except (IndexError, KeyError, TypeError, AttributeError, ValueError):
    criteria = []
  if not _has_positive([points for _, points in criteria]) or not all(text for text, _ in criteria):
    raise ValueError(
      f"row {row.id} holds no 'rubric', a list of {{criterion, points}} with some points above 0"
    )
  return criteria


_NAMES = ('rubric', 'rubrics')


def _criterion(entry: JsonObject) -> tuple[str, float]:
  text = entry['criterion'] if 'criterion' in entry else entry['description']
  points = entry['points'] if 'points' in entry else entry.get('weight', 1.0)
  return str(text).strip(), float(points)


def _has_positive(points: list[float]) -> bool:
  return all(map(math.isfinite, points)) and any(p > 0 for p in points)


def _check_rubric(settings: Settings, where: str) -> None:
  """Raises UserError for settings out of range; they include config.rewards.deadline_s and workers."""
  criteria, only = dict(settings['criteria']), settings['only']
  if bool(criteria) == settings['row_criteria']:
    raise UserError(
      f'{where}.criteria={criteria!r} must hold some, or be empty where row_criteria=True uses those of the rows.'
    )
  if criteria and not _has_positive(list(criteria.values())):
    raise UserError(
      f'{where}.criteria={criteria!r} must be texts with points, some of them above 0.'
    )
  if only and only not in criteria:
    raise UserError(
      f'{where}.only={only!r} must be one of {where}.criteria: {", ".join(criteria)}.'
    )
  client.check_places(settings['template'], where, 'reply', 'criterion')
  client.check(settings, where, questions=len(criteria) or 1)


def _check_steps(settings: Settings, where: str) -> None:
  try:
    groups = re.compile(settings['cut']).groups if settings['cut'] else 1
  except (re.error, OverflowError, RecursionError):
    groups = 1
  if groups:
    raise UserError(
      f'{where}.cut={settings["cut"]!r} must be a regular expression without groups; use (?:…).'
    )
  if settings['most_steps'] < 1:
    raise UserError(
      f'{where}.most_steps={settings["most_steps"]!r} must be a whole number from 1 up.'
    )
  if settings['combine'] not in aggregate.OF_STEPS:
    raise UserError(
      f'{where}.combine={settings["combine"]!r} is unknown; choose one of: {", ".join(aggregate.OF_STEPS)}.'
    )
  client.check_places(settings['template'], where, 'step')
  client.check(settings, where)


CHECKS = {rubric: _check_rubric, steps: _check_steps}
ROWS = {rubric: lambda row, settings: _criteria(row) if settings['row_criteria'] else None}

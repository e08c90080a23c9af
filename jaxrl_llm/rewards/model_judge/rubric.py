"""A judge's verdicts one by one, of criteria or of steps: another part of the registry of `config.rewards`."""

from __future__ import annotations

import math
import re
import types
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.rewards.model_judge import aggregate, client, http, verdict
from jaxrl_llm.types import Row, UserError

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
_NOTHING: Mapping[str, float] = types.MappingProxyType({})


@client.with_server
def rubric(
  text: str,
  row: Row,
  *,
  server: http.Endpoint,
  criteria: Mapping[str, float] = _NOTHING,
  row_criteria: bool = False,
  only: str = '',
  template: str = '',
) -> float:
  """Σ points of the criteria that are met / Σ points above 0, clipped to [0, 1]; each criterion is a question.

  criteria: text → points, below 0 for faults; row_criteria: the row's `rubric` or `rubrics`, a list of {criterion,
  points} or {description, weight}, also inside reward_model or extra_info, instead. only: how far this one of
  `criteria` is met: with weight=0.0 and a name, a part of config.rewards.parts that logs it, from answers that are kept
  already. template has {question}, {answer}, {reply} as data, and {criterion}; its answer ends with JSON whose `met` is
  true, false or a number from 0 to 1. Server, cache, budget and failures are as of `judge`; give_up_s is for all
  criteria together, and one verdict that cannot be had fails the item.

  Source: arXiv:2507.17746 (Rubrics as Rewards, the explicit sum); prompts are our own.
  """
  known = _criteria(row) if row_criteria else list(criteria.items())
  data = dict(question=client.question_of(row), answer=row.answer or '(none)', reply=text)
  asked = [
    client.messages(template or _CRITERION, data, dict(criterion=told))
    for told, _ in known
    if only in ('', told)
  ]
  met_C = client.each_answered(server, asked, lambda said: _share(said, 'met'))
  return met_C[0] if only else aggregate.points([points for _, points in known], met_C)


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
  """Mean, min, product or last of a judge's verdicts on a reply's steps, each in [0, 1], reasoned before it is given.

  Steps stand between matches of the regular expression `cut` (empty lines; r'</?chunk>' for a policy that marks its
  own); more than most_steps are joined with their neighbors. Each is a question of its own: the problem, the steps
  before and this one. template has {question}, {answer}, {before}, {step} as data; its answer ends with JSON whose
  `sound` is true, false or a number from 0 to 1. Server, cache, budget and failures are as of `judge`; give_up_s is for
  all steps together.

  Source: arXiv:2508.19229 (StepWiser), whose judge is itself trained by RL on relative outcomes of rollouts, with a
  policy taught to cut its steps: here any served model judges, and cuts are by rule. Reconstructed from the abstract
  and third-party notes; prompts are our own.
  """
  parts = _steps(text, cut, most_steps)
  data = dict(question=client.question_of(row), answer=row.answer or '(none)')
  asked = [
    client.messages(
      template or _STEP, data | dict(before='\n\n'.join(parts[:n]) or '(nothing)', step=part), {}
    )
    for n, part in enumerate(parts)
  ]
  sound_N = client.each_answered(server, asked, lambda said: _share(said, 'sound'))
  return aggregate.OF_STEPS[combine](sound_N)


def _share(said: str, field: str) -> float:
  return verdict.share(verdict.by_field(said, field))


def _steps(text: str, cut: str, most: int) -> list[str]:
  """What stands between the cuts, as at most so many steps of about as many parts; an empty reply is one empty step."""
  parts = [part.strip() for part in re.split(cut, text) if part and part.strip()] or ['']
  count = min(most, len(parts))
  bounds = [i * len(parts) // count for i in range(count + 1)]
  return ['\n\n'.join(parts[at:end]) for at, end in zip(bounds, bounds[1:], strict=False)]


def _criteria(row: Row) -> list[tuple[str, float]]:
  places = [row.extra, row.extra.get('reward_model'), row.extra.get('extra_info')]
  held = [place[n] for place in places if isinstance(place, dict) for n in _NAMES if n in place]
  try:
    found = [_criterion(one) for one in held[0]]
  except (IndexError, KeyError, TypeError, AttributeError, ValueError):
    found = []
  if not _earnable([points for _, points in found]) or not all(told for told, _ in found):
    raise ValueError(
      f"row {row.id} holds no 'rubric', a list of {{criterion, points}} with some points above 0"
    )
  return found


_NAMES = ('rubric', 'rubrics')


def _criterion(one: dict[str, Any]) -> tuple[str, float]:
  told = one['criterion'] if 'criterion' in one else one['description']
  return str(told).strip(), float(one['points'] if 'points' in one else one.get('weight', 1.0))


def _earnable(points: list[float]) -> bool:
  return all(map(math.isfinite, points)) and any(p > 0 for p in points)


def _check_rubric(told: dict[str, Any], where: str) -> None:
  """Settings out of range; `told` has config.rewards.deadline_s and workers, too."""
  criteria, only = dict(told['criteria']), told['only']
  if bool(criteria) == told['row_criteria']:
    raise UserError(
      f"{where}.criteria={criteria!r} must hold some, or be empty where row_criteria=True takes the rows' own."
    )
  if criteria and not _earnable(list(criteria.values())):
    raise UserError(
      f'{where}.criteria={criteria!r} must be texts with points, some of them above 0.'
    )
  if only and only not in criteria:
    raise UserError(
      f'{where}.only={only!r} must be one of {where}.criteria: {", ".join(criteria)}.'
    )
  client.check_places(told['template'], where, 'reply', 'criterion')
  client.check(told, where, questions=len(criteria) or 1)


def _check_steps(told: dict[str, Any], where: str) -> None:
  try:
    groups = re.compile(told['cut']).groups if told['cut'] else 1
  except (re.error, OverflowError, RecursionError):
    groups = 1
  if groups:
    raise UserError(
      f'{where}.cut={told["cut"]!r} must be a regular expression without groups; (?:…) only holds together.'
    )
  if told['most_steps'] < 1:
    raise UserError(f'{where}.most_steps={told["most_steps"]!r} must be a whole number from 1 up.')
  if told['combine'] not in aggregate.OF_STEPS:
    raise UserError(
      f'{where}.combine={told["combine"]!r} is unknown; choose one of: {", ".join(aggregate.OF_STEPS)}.'
    )
  client.check_places(told['template'], where, 'step')
  client.check(told, where)


CHECKS = {rubric: _check_rubric, steps: _check_steps}
ROWS = {rubric: lambda row, told: _criteria(row) if told['row_criteria'] else None}

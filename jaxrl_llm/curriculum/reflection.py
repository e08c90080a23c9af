"""Reflections on failed attempts: the request for one, the report in its reply, and the tokens before its pivot."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import NamedTuple

REQUEST = (
  'An attempt at the question below failed. Its steps are numbered from 0. Find the step at which it went wrong, and '
  'the reason. Write one JSON object alone, with "trajectory_summary", "root_cause_analysis", "trajectory_outcome", '
  'which is "failure", "improvement_suggestion", which is advice for another attempt, and "retry_from_step", the '
  'number of the first step to write anew.\n\nQuestion: {question}\n\n{attempt}'
)
GUIDANCE = '{question}\n\nA reflection on an attempt that failed:\n{report}\nFollow its advice without mentioning it.'
_FIELDS = ('trajectory_summary', 'root_cause_analysis')
_FLAWED = ('success_but_inefficient', 'failure')


class Report(NamedTuple):
  """A valid report on an attempt."""

  text: str  # JSON
  pivot: int  # steps of the attempt that are kept


class Reflection(NamedTuple):
  """The templates of requests and of prompts with guidance."""

  request: str  # with {question} and {attempt}
  guidance: str  # with {question} and {report}

  def report_in(self, reply: str, steps: int) -> Report | None:
    """The report on an attempt of so many steps, from the first brace of a reply to its last one.

    None where it is no JSON or incomplete, where its pivot is no step of the attempt, and where it finds no flaw.
    """
    first, last = reply.find('{'), reply.rfind('}')
    try:
      report = json.loads(reply[first : last + 1] if 0 <= first < last else reply)
    except (ValueError, RecursionError):
      return None
    pivot = _pivot(report)
    if pivot is None or not 0 <= pivot < steps:
      return None
    text = json.dumps(report, indent=2, ensure_ascii=False)
    # Tokenizers refuse lone surrogates, which JSON may escape.
    return Report(text.encode(errors='replace').decode(), pivot)


def _pivot(report: object) -> int | None:
  """The step to begin again from; None in a report that is incomplete or finds no flaw."""
  if not isinstance(report, dict) or not all(field in report for field in _FIELDS):
    return None
  step = report.get('retry_from_step')
  if (
    report.get('trajectory_outcome') not in _FLAWED or report.get('improvement_suggestion') is None
  ):
    return None
  try:
    return int(step)
  except (ValueError, TypeError, OverflowError):
    return None


def steps_of(text: str) -> list[str]:
  """The steps of an attempt: its lines with more than blanks."""
  return [line for line in text.split('\n') if line.strip()]


def numbered(text: str) -> str:
  """The steps of an attempt with their numbers, from 0 up."""
  return '\n'.join(f'Step {number}: {line}' for number, line in enumerate(steps_of(text)))


def tokens_before(
  token_ids: Sequence[int], decode: Callable[[Sequence[int]], str], pivot: int
) -> int:
  """The least number of first tokens whose text has `pivot` whole steps, each with its line end."""
  low, high = 0, len(token_ids)
  while low < high:
    middle = (low + high) // 2
    whole, _, _ = decode(token_ids[:middle]).rpartition('\n')
    low, high = (low, middle) if len(steps_of(whole)) >= pivot else (middle + 1, high)
  return low

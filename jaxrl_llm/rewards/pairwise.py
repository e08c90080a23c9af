"""Reward functions that compare the completions of a prompt, for `config.rewards`: f(texts, rows, …) → rewards.

A group is graded in one call, as by a user's function with config.rewards.batched='group': an error concerns the whole
group.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from jaxrl_llm.rewards.model_judge import aggregate, client, http, verdict
from jaxrl_llm.rewards.outcomes import Settings
from jaxrl_llm.types import Row, UserError

_PRINCIPLES = (
  'What counts, in this order: nothing false or harmful; what was asked for is done, all of it and nothing else; '
  'reasons can be checked; the reply is clear and no longer than it needs to be. A criterion is about one thing, can '
  'be decided by reading, and is about the question, not about the wording of a reply. What matters more to who asked '
  'has more weight.'
)
_BOTH = 'Question:\n{question}\n\nReply A:\n{first}\n\nReply B:\n{second}\n\n'
_DRAFT = _BOTH + (
  'Principles:\n{principles}\n\nDo not say which reply is better. Say in what the two differ that matters by these '
  'principles, and write criteria, at most {most}, that decide between them. End with JSON: {"criteria": '
  '[{"criterion": text, "weight": a number above 0}]}.'
)
_COMPARE = _BOTH + (
  'Criteria:\n{criteria}\n\nWhich reply is better by each criterion, looked at by itself? Give a short reason for '
  'each, and end with JSON: {"better": ["A", "B" or "tie" for each, in their order]}.'
)
_SIDES = dict(a=1, b=-1, tie=0)


@client.with_server
def pairwise(
  texts: Sequence[str],
  rows: Sequence[Row],
  *,
  server: http.Endpoint,
  principles: str = '',
  most_criteria: int = 6,
  opponents: int = 1,
  reference: bool = False,
) -> list[float]:
  """Mean over the comparisons of a completion of (1 + Σ wᵢ·sᵢ / Σ wᵢ) / 2, arXiv:2602.14069 (OpenRS).

  sᵢ in {−1, 0, 1} is the preference by criterion i. A comparison takes two requests: criteria with weights for these
  two completions under `principles` (the meta-rubric; '' = the built-in ones), then the preference by each criterion.
  Completion i is compared with the next `opponents` ones of the group in a ring, so that each is first as often as
  second; 0 = with all others. reference: with the row's answer instead, in both orders. Equal texts are a tie without
  a request. Server, cache, budget and failures are those of `judge`; give_up_s is the limit of the whole group, with
  completions × opponents × 2 consecutive requests. Rewards are around 0.5, for which config.rewards.right must be
  set. A single completion, as in greedy evaluation, gets 0.5, unless there is a `reference`.

  The method is reconstructed from the abstract; the ring, the prompts, and one answer with all verdicts of a comparison
  are additions. The paper's pointwise verifiable rubrics are other parts of config.rewards.parts; its refinement of
  principles is left out.
  """
  compare = functools.partial(
    _preference, server, server.until(), principles or _PRINCIPLES, most_criteria
  )
  shares: list[list[float]] = [[] for _ in texts]
  if reference:
    for i, (text, row) in enumerate(zip(texts, rows, strict=True)):
      if not row.answer:
        raise ValueError(f'row {row.id} has no answer that a completion could be compared with')
      shares[i] = [compare(row, text, row.answer), 1 - compare(row, row.answer, text)]
  else:
    for i, j in aggregate.opponents(len(texts), opponents):
      share = compare(rows[i], texts[i], texts[j])
      shares[i].append(share)
      shares[j].append(1 - share)
  return [sum(each) / len(each) if each else 0.5 for each in shares]


def _preference(
  server: http.Endpoint,
  end: float,
  principles: str,
  most: int,
  row: Row,
  first: str,
  second: str,
) -> float:
  """The preference for the first text, in [0, 1]."""
  if first.strip() == second.strip():
    return 0.5
  data = dict(question=client.question_of(row), first=first, second=second)
  request = client.messages(_DRAFT, data, dict(principles=principles, most=str(most)))
  criteria = client.answered(server, request, lambda answer: _criteria(answer, most), end)
  lines = '\n'.join(f'{n}. {text}' for n, (text, _) in enumerate(criteria, 1))
  # The criteria were written from the completions and may quote them, so they are passed as data, too.
  request = client.messages(_COMPARE, data | dict(criteria=lines), {})
  sides = client.answered(server, request, lambda answer: _sides(answer, len(criteria)), end)
  return aggregate.preference([weight for _, weight in criteria], sides)


def _criteria(answer: str, most: int) -> list[tuple[str, float]]:
  """(text, weight) of each criterion in the judge's answer."""
  entries = verdict.by_field(answer, 'criteria')
  try:
    criteria = [
      (' '.join(str(entry['criterion']).split()), float(entry['weight'])) for entry in entries
    ]
  except (KeyError, TypeError, ValueError):
    criteria = []
  valid = all(text and 0 < weight < math.inf for text, weight in criteria)
  if not valid or not 1 <= len(criteria) <= most:
    raise ValueError(
      f'the judge gives no criteria, 1 to {most} with weights above 0: {str(entries)[:60]}'
    )
  return criteria


def _sides(answer: str, count: int) -> list[int]:
  """The preference by each criterion: 1 for A, −1 for B, 0 for a tie."""
  names = verdict.by_field(answer, 'better')
  is_list = isinstance(names, list)
  sides = [_SIDES.get(str(name).strip().lower()) for name in names] if is_list else []
  if len(sides) != count or None in sides:
    raise ValueError(
      f'the judge does not answer A, B or tie for each of {count} criteria: {str(names)[:60]}'
    )
  return sides


def _check(settings: Settings, where: str) -> None:
  for name, minimum in (('most_criteria', 1), ('opponents', 0)):
    if settings[name] < minimum:
      raise UserError(
        f'{where}.{name}={settings[name]!r} must be a whole number from {minimum} up.'
      )
  client.check(settings, where, questions=4)  # for the two completions that a group has at least


def _check_rows(row: Row, settings: Settings) -> None:
  if settings['reference'] and not row.answer:
    raise ValueError(f'row {row.id} has no answer to compare with')


CHECKS = {pairwise: _check}
ROWS = {pairwise: _check_rows}

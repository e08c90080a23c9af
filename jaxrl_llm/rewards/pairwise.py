"""Graders that compare the replies to a prompt: of the registry of `config.rewards`, f(texts, rows, …) → a reward each.

All replies to a prompt are graded in one call, as those of a user's function with config.rewards.batched='group': what
fails, fails for all of them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

from jaxrl_llm.rewards.model_judge import aggregate, client, http, verdict
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
  """Mean over a reply's comparisons of (1 + Σ wᵢ·sᵢ / Σ wᵢ) / 2, sᵢ in {−1, 0, 1} which of two criterion i prefers.

  A comparison is two questions: criteria with weights for these two replies, under `principles` (the meta-rubric; '':
  our own), then which reply each of them prefers; they are added up here and not by the judge. Reply i of the group is
  compared with the `opponents` behind it, in a ring, so that each stands first as often as second; 0: with all others.
  reference: instead with the row's answer, in both orders. Equal texts are a tie and not asked about. Server, cache,
  budget and failures are as of `judge`; give_up_s is for the whole group, whose replies × opponents × 2 questions are
  asked one after the other. Rewards are around 0.5, which config.rewards.right must know. A reply alone, as in
  greedy evaluation, has nobody to be compared with: 0.5, unless there is a `reference`.

  Source: arXiv:2602.14069 (OpenRS: pairwise adaptive meta-rubrics), reconstructed from the abstract; the ring, the
  prompts and that verdicts of one comparison come in one answer are ours. Its pointwise verifiable rubrics are other
  parts of config.rewards.parts; its refinement of principles is not here.
  """
  compare = functools.partial(
    _preference, server, server.until(), principles or _PRINCIPLES, most_criteria
  )
  shares: list[list[float]] = [[] for _ in texts]
  if reference:
    for i, (text, row) in enumerate(zip(texts, rows, strict=True)):
      if not row.answer:
        raise ValueError(f'row {row.id} has no answer that a reply could be compared with')
      shares[i] = [compare(row, text, row.answer), 1 - compare(row, row.answer, text)]
  else:
    for i, j in aggregate.opponents(len(texts), opponents):
      found = compare(rows[i], texts[i], texts[j])
      shares[i].append(found)
      shares[j].append(1 - found)
  return [sum(of) / len(of) if of else 0.5 for of in shares]


def _preference(
  server: http.Endpoint,
  end: float,
  principles: str,
  most: int,
  row: Row,
  first: str,
  second: str,
) -> float:
  """How far the first is preferred, in [0, 1]."""
  if first.strip() == second.strip():
    return 0.5
  data = dict(question=client.question_of(row), first=first, second=second)
  drafted = client.messages(_DRAFT, data, dict(principles=principles, most=str(most)))
  criteria = client.answered(server, drafted, lambda said: _criteria(said, most), end)
  lines = '\n'.join(f'{n}. {told}' for n, (told, _) in enumerate(criteria, 1))
  # Drafted with the replies in sight: data, as these are.
  asked = client.messages(_COMPARE, data | dict(criteria=lines), {})
  sides = client.answered(server, asked, lambda said: _sides(said, len(criteria)), end)
  return aggregate.preference([weight for _, weight in criteria], sides)


def _criteria(said: str, most: int) -> list[tuple[str, float]]:
  told = verdict.by_field(said, 'criteria')
  try:
    found = [(' '.join(str(one['criterion']).split()), float(one['weight'])) for one in told]
  except (KeyError, TypeError, ValueError):
    found = []
  if not 1 <= len(found) <= most or not all(told and 0 < w < math.inf for told, w in found):
    raise ValueError(
      f'the judge gives no criteria, 1 to {most} with weights above 0: {str(told)[:60]}'
    )
  return found


def _sides(said: str, count: int) -> list[int]:
  told = verdict.by_field(said, 'better')
  found = [_SIDES.get(str(one).strip().lower()) for one in told] if isinstance(told, list) else []
  if len(found) != count or None in found:
    raise ValueError(
      f'the judge does not say A, B or tie for each of {count} criteria: {str(told)[:60]}'
    )
  return found


def _check(told: dict[str, Any], where: str) -> None:
  for name, least in (('most_criteria', 1), ('opponents', 0)):
    if told[name] < least:
      raise UserError(f'{where}.{name}={told[name]!r} must be a whole number from {least} up.')
  client.check(told, where, questions=4)  # of two replies, which a group has at least


def _check_rows(row: Row, told: dict[str, Any]) -> None:
  if told['reference'] and not row.answer:
    raise ValueError(f'row {row.id} has no answer to compare with')


CHECKS = {pairwise: _check}
ROWS = {pairwise: _check_rows}

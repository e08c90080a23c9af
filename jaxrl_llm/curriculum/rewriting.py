"""Rewritten questions: which prompts the policy writes anew, what it is told, and the question in its reply."""

from __future__ import annotations

import string
from typing import NamedTuple

from jaxrl_llm.types import FROM_HARD, FROM_MEDIUM, PLAIN, UserError

SIMPLIFY = (
  'Rewrite the question below so that it is simpler and clearer. Do not solve it. It must keep the answer {answer}, '
  'which must not be in it. Write the new question alone, after ```text and before ```.\n\n{question}'
)
VARY = (
  'Rewrite the question below in other words. Do not solve it. It must keep its meaning and the answer {answer}, '
  'which must not be in it. Write the new question alone, after ```text and before ```.\n\n{question}'
)
_FENCES = ('```text', '```')  # before a question, the first that is found


class Rewriting(NamedTuple):
  """Limits of success rates, the policy's instructions, and the length of a question that counts."""

  hard: float  # prompts up to this rate are simplified
  medium: float  # prompts above `hard` up to this rate are varied
  simplify: str  # with {question}, and {answer} where the instruction names it
  vary: str
  least_chars: int
  most_chars: int

  def kind(self, right: int, n: int) -> int:
    """What a rewritten question is made from: FROM_HARD or FROM_MEDIUM; PLAIN: the prompt stays as it is."""
    rate = right / n
    if rate <= self.hard:
      return FROM_HARD
    return FROM_MEDIUM if rate <= self.medium else PLAIN

  def instruction(self, kind: int) -> str:
    """The template of the request for a question of this kind."""
    return self.simplify if kind == FROM_HARD else self.vary

  def question_in(self, reply: str) -> str:
    """The text between the first fences of a reply, or the whole reply; '' where it is too short or too long."""
    for fence in _FENCES:
      if fence in reply:
        reply = reply.split(fence)[1].split('```')[0]
        break
    question = reply.strip()
    return question if self.least_chars <= len(question) <= self.most_chars else ''


def check_instruction(name: str, text: str, others: tuple[str, ...] = ('answer',)) -> None:
  """Raises UserError unless the text is a template with {question}, and with no other fields than `others`."""
  where = f'config.curriculum.hint.{name}={text!r}'
  try:
    fields = {field for _, field, *_ in string.Formatter().parse(text) if field is not None}
    text.format(question='', **dict.fromkeys(others, ''))
  except (ValueError, LookupError, TypeError, AttributeError):  # also where it is no text
    fields = set()
  if 'question' not in fields:
    besides = ' and '.join(f'{{{field}}}' for field in others)
    raise UserError(
      f'{where} must be an instruction with {{question}}, and besides with {besides} alone.'
    )

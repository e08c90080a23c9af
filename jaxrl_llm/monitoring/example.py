"""A completion as one line of the console."""

from __future__ import annotations

from typing import NamedTuple


class Example(NamedTuple):
  """A completion of a held-out prompt."""

  question: str
  completion: str
  score: float

  def line(self, width: int) -> str:
    """One line of at most `width` characters; the end of the question and the start of the completion stay."""
    question, completion = (' '.join(x.split()) for x in (self.question, self.completion))
    score = f'  (score {self.score:g})'
    room = max(width - len(score) - len('for example: "" -> ""'), 20)
    question = _shortened(question, max(room // 2, room - len(completion)), keep_end=True)
    completion = _shortened(completion, room - len(question))
    return f'for example: "{question}" -> "{completion}"{score}'


def _shortened(text: str, width: int, keep_end: bool = False) -> str:
  if len(text) <= width:
    return text
  return f'...{text[len(text) - width + 3 :]}' if keep_end else f'{text[: width - 3]}...'

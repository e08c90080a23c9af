"""A question that one policy discusses with itself: a solution, its evaluation, and a score of both."""

from __future__ import annotations

from jaxrl_llm.environments.protocol import Result
from jaxrl_llm.types import Row, UserError

_EVALUATE = (
  'Evaluate this solution: name every mistake in it and say why it is one. Be brief, and do not '
  'solve the problem again.'
)
_SCORE = (
  'Score the solution in the light of its evaluation. 3: it is right, and no mistake that was named is one. 2: small '
  'mistakes were found, and the result is right nevertheless. 1: a mistake that was found makes the result wrong. Give '
  'a short reason, then the score, such as <score>2</score>.'
)
_SCORES = ('1', '2', '3')


class Discussion:
  """Turns of a solver, an evaluator and a scorer, all of them the policy. The last turn decides the rewards of all."""

  graded_turn = 0  # the solution

  def __init__(self, evaluate: str, score: str):
    self.shown = evaluate, score

  def reset(self, row: Row, seed: int) -> None:
    del row, seed  # the question is the prompt, and later turns of the row see it
    self.turns = 0

  def step(self, text: str) -> Result:
    self.turns += 1
    if self.turns <= len(self.shown):
      return Result(self.shown[self.turns - 1])
    return Result(None, _rewards(_read_score(text)), True)


def discussion(*, evaluate: str = _EVALUATE, score: str = _SCORE) -> Discussion:
  """A turn solves the question, the next one evaluates the solution, the third scores both as 1, 2 or 3.

  r(solution) = (score − 1)/2, r(evaluation) = 1 − r(solution), r(score) = 0; without a score in <score>…</score> they
  are 0, 0 and −1. No verifier takes part: `config.rewards` grades the solution for the logs and held-out accuracy, and
  the credit `turn_reward_whitened` does not read it. `evaluate` and `score` are shown before the second and third turn.
  Unlike the official code, roles share a row, so that the scorer sees the evaluator's instruction, too; there is one
  evaluation of a solution, and one round. A discussion that does not reach its score pays nothing. arXiv:2510.08529
  (CoMAS). Raises UserError for an empty text.
  """
  for name, text in (('evaluate', evaluate), ('score', score)):
    if not text.strip():
      raise UserError(f'config.environment.{name}={text!r} must be a text; it asks for that turn.')
  return Discussion(evaluate, score)


def _read_score(text: str) -> int | None:
  """The number in the first <score>…</score>; None where it is not 1, 2 or 3, or there is none."""
  inside, closed, _ = text.partition('<score>')[2].partition('</score>')
  return int(inside) if closed and inside.strip() in _SCORES else None


def _rewards(score: int | None) -> tuple[float, float, float]:
  """Rewards of the solution, the evaluation and the score."""
  if score is None:
    return 0.0, 0.0, -1.0
  share = (score - 1) / 2
  return share, 1 - share, 0.0

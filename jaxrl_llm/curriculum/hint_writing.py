"""Hints that the policy writes: what it is told, the hint in its reply, and the reward of a hint. arXiv:2604.00698."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

INSTRUCTION = (
  'A student failed the question below. Write a hint of at most three sentences with the idea that is missing. The '
  'student must still work out the answer: state neither the answer nor any number on the way to it. Write the hint '
  'alone, after <hint> and before </hint>.\n\nQuestion: {question}\n\nFailed attempt: {attempt}\n\nSolution, which the '
  'student does not see: {solution}'
)
FIELDS = ('question', 'attempt', 'solution')  # of an instruction
# Phrases before an answer so short that a hint may contain it by chance.
_PHRASES = ('= ', 'equals ', 'equal to ', 'is ', 'answer: ')
_SHORT_CHARS = 2


class Writing(NamedTuple):
  """How many hints a request asks for, in which words, and what they earn."""

  hints: int  # M, the first replies to a request
  instruction: str  # with {question}, {attempt} and {solution}
  tag: str  # of the hint in a reply: <tag>…</tag>; '' = the whole reply
  temperature: float  # T
  penalty: float  # reward of a hint that is not sampled with

  def hint_in(self, reply: str) -> str:
    """The text in the first pair of tags of a reply, in any case of letters; '' without one."""
    if not self.tag:
      return reply.strip()
    found = re.search(f'<{self.tag}>(.*?)</{self.tag}>', reply, re.IGNORECASE | re.DOTALL)
    return found[1].strip() if found else ''

  def reward(self, right: int, n: int, reliance: float | None) -> float:
    """(1 − p̂ⁿ − (1 − p̂)ⁿ)·exp(min(Δ, 0) / T), p̂ = right / n: of a hint with which n completions were sampled.

    Δ (`reliance`) is the mean of log π(y | x) − log π(y | x, hint) over the tokens of a completion, then over the right
    completions; None leaves out its factor. The first factor is the probability of a mixed group.
    """
    if not 0 < right < n:
      return 0.0
    rate = right / n
    weight = 1.0 if reliance is None else math.exp(min(reliance, 0.0) / self.temperature)
    return (1 - rate**n - (1 - rate) ** n) * weight


def leaks(hint: str, answer: str) -> bool:
  """Whether a hint contains the answer; one of at most two characters, behind a phrase that announces it."""
  answer, hint = answer.strip(), hint.strip()
  if not answer:
    return False
  if f'\\boxed{{{answer}}}' in hint:
    return True
  if len(answer) <= _SHORT_CHARS:
    return any(f'{phrase}{answer}'.lower() in hint.lower() for phrase in _PHRASES)
  return answer.lower() in hint.lower()


def best(reward_M: Sequence[float], mixed_M: Sequence[bool]) -> int | None:
  """The first hint of the largest reward; None where its group is not mixed, and teaches as little as the plain one."""
  first = max(range(len(reward_M)), key=lambda number: (reward_M[number], -number))
  return first if mixed_M[first] else None

"""The arithmetic expression at the end of a completion: its exact value and its whole numbers."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

from jaxrl_llm.rewards.parsing import answer_span, arithmetic, numeral


class Expression(NamedTuple):
  """An expression of whole numbers, + - * / and brackets."""

  value: Fraction
  numbers: tuple[int, ...]  # each as often as it is written


_SIGNS = str.maketrans({'×': '*', '÷': '/', '·': '*', '−': '-', '[': '(', ']': ')'})
_WORDS = ((r'\times', '*'), (r'\cdot', '*'), (r'\div', '/'), (r'\left', ''), (r'\right', ''))
_EDGES = ' \t$`*.'
_PLAIN = re.compile(r'[0-9+\-*/() ]+')
# Refused: ** and // are other operations, and a sign makes another number of the one behind it.
_OTHER = re.compile(r'\*\s*\*|/\s*/|(?:^|[(+\-*/])\s*[-+]')


def read(text: str) -> Expression | None:
  """The expression in the last \\boxed{…}, else on the last line, behind its last colon; None without one.

  Of 3 * 7 + 25 = 46 it is the part in front of the =; None where 46 is not its value.
  """
  lines = [line for line in text.splitlines() if line.strip(_EDGES)]
  if '\\boxed' in text:
    source = answer_span.boxed(text) or ''
  else:
    source = lines[-1].rpartition(':')[2] if lines else ''
  for word, sign in _WORDS:
    source = source.replace(word, sign)
  left, equals, right = source.translate(_SIGNS).strip(_EDGES).rpartition('=')
  formula, claimed = (left.strip(_EDGES), numeral.read(right)) if equals else (right, None)
  if not _PLAIN.fullmatch(formula) or _OTHER.search(formula):
    return None
  try:
    value = arithmetic.value(formula)
  except ValueError:
    return None
  if equals and (claimed is None or claimed.value != value):
    return None
  return Expression(value, tuple(map(int, re.findall('[0-9]+', formula))))

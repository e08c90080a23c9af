"""An expression that a reply ends with: its exact value, and the whole numbers it is made of."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

from jaxrl_llm.rewards.parsing import answer_span, arithmetic, numeral


class Expression(NamedTuple):
  """Of whole numbers, + - * / and brackets."""

  value: Fraction
  numbers: tuple[int, ...]  # as often as they are written


_SIGNS = str.maketrans({'×': '*', '÷': '/', '·': '*', '−': '-', '[': '(', ']': ')'})
_WORDS = ((r'\times', '*'), (r'\cdot', '*'), (r'\div', '/'), (r'\left', ''), (r'\right', ''))
_EDGES = ' \t$`*.'
_PLAIN = re.compile(r'[0-9+\-*/() ]+')
# ** and // are other operations; a sign in front of a number makes another number of it.
_OTHER = re.compile(r'\*\s*\*|/\s*/|(?:^|[(+\-*/])\s*[-+]')


def read(text: str) -> Expression | None:
  """The expression in the last \\boxed{…}, else on the last line, behind its last colon; None where there is none.

  Of 3 * 7 + 25 = 46 it is what stands in front of the =, and None where 46 is not its value. Source: none.
  """
  lines = [line for line in text.splitlines() if line.strip(_EDGES)]
  found = (
    answer_span.boxed(text)
    if '\\boxed' in text
    else lines[-1].rpartition(':')[2]
    if lines
    else None
  )
  for word, sign in _WORDS if found else ():
    found = found.replace(word, sign)
  told, equals, right = (found or '').translate(_SIGNS).strip(_EDGES).rpartition('=')
  told, claimed = (told.strip(_EDGES), numeral.read(right)) if equals else (right, None)
  if not _PLAIN.fullmatch(told) or _OTHER.search(told):
    return None
  try:
    value = arithmetic.value(told)
  except ValueError:
    return None
  if equals and (claimed is None or claimed.value != value):
    return None
  return Expression(value, tuple(map(int, re.findall('[0-9]+', told))))

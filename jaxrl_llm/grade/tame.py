"""What reasoning-gym's scorers may be given to read: nine of them evaluate an answer as Python.

Five hand it to sympy's parse_expr, in which every builtin can be called, and four to eval. An answer that is not of
the plain kind which the task asks for becomes one that nothing can read, and gets what the scorer gives for that.
"""

from __future__ import annotations

import ast
import re

EXPRESSIONS = frozenset(
  {
    'countdown',
    'intermediate_integration',
    'polynomial_multiplication',
    'puzzle24',
    'simple_integration',
  }
)
LITERALS = frozenset({'binary_matrix', 'n_queens', 'spiral_matrix', 'string_insertion'})
UNREADABLE = '('
_PLAIN = re.compile(r'[0-9A-Za-z+\-*/^().,\s]*')
_ATTRIBUTE = re.compile(r'[.]\s*[A-Za-z]')
_NAME = re.compile(r'[A-Za-z]+[0-9A-Za-z]*')
# Beside symbols of one letter.
_FUNCTIONS = frozenset(
  'sin cos tan sec csc cot asin acos atan sinh cosh tanh exp log ln sqrt pi Abs erf Si Ci Ei'.split()
)


def readable(task: str, text: str) -> str:
  """`text`, where the scorer of `task` can read it and run nothing; else what none can read. Source: none."""
  if task in EXPRESSIONS and not _expression(text):
    return UNREADABLE
  # Without a parenthesis eval calls nothing, and the right answers of these tasks have none.
  if task in LITERALS and '(' in text and not _literal(text):
    return UNREADABLE
  return text


def _expression(text: str) -> bool:
  names = _NAME.findall(text)
  known = all(len(name) == 1 or name in _FUNCTIONS for name in names)
  return bool(_PLAIN.fullmatch(text)) and not _ATTRIBUTE.search(text) and known


def _literal(text: str) -> bool:
  try:
    ast.literal_eval(text)
  except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
    return False
  return True

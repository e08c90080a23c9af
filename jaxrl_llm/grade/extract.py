"""What a grader compares with the answer: text → a value that equals another of the same meaning, None for none.

A function here has the name of the grader in graders.py that compares by it.
"""

from __future__ import annotations

import re
from decimal import Decimal

# A sign counts only where it cannot be a minus between two terms. Commas count only between groups
# of three.
NUMBER = re.compile(
  r'(?:(?<![\w)\].])[-+])?'
  r'(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+)'
)


def exact(text: str) -> str | None:
  """The text without surrounding space; None where nothing is left. Source: none."""
  return text.strip() or None


def number(text: str) -> Decimal | None:
  """The last number of the text: 1,000 = 1000.0 and -0 = 0. Source: none."""
  found = _numbers(text)
  return found[-1] if found else None


def first_number(text: str) -> Decimal | None:
  """The first number of the text. Source: none."""
  found = _numbers(text)
  return found[0] if found else None


def _numbers(text: str) -> list[Decimal]:
  # Decimal compares exactly at any length, where floats would call 2**53 and 2**53 + 1 equal.
  plain = text.replace('\N{MINUS SIGN}', '-')
  return [Decimal(found.replace(',', '')) for found in NUMBER.findall(plain)]

"""Arithmetic on a syntax tree: only numbers, operators and brackets are accepted, and their size is bounded."""

from __future__ import annotations

import ast
import fractions
import operator

_CHARACTERS, _BITS, _POWER = 200, 2000, 1000
_OPERATORS = {
  ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
  ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip


def calculate(expression: str) -> str:
  """`value` as text: 7/2 is 3.5, 1/3 is 1/3. Raises ValueError as `value` does."""
  return _written(value(expression))


def value(expression: str) -> fractions.Fraction:
  """The value of an expression of numbers, + − * / // % ** and brackets, exact.

  Raises ValueError for anything else, for division by zero, and for expressions or results that are too large.
  The calculator tool shows these messages to the model: another wording changes the tokens of an episode.

  """
  if len(expression) > _CHARACTERS:
    raise ValueError(f'more than {_CHARACTERS} characters')
  try:
    tree = ast.parse(expression.replace('^', '**').strip(), mode='eval')
  except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
    raise ValueError('no expression of numbers') from error
  return _value(tree.body)


def _value(node: ast.expr) -> fractions.Fraction:
  if isinstance(node, ast.Constant) and type(node.value) in (int, float):
    try:
      return _bounded(fractions.Fraction(str(node.value)))
    except ValueError as error:  # inf
      raise ValueError('too large') from error
  if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd | ast.USub):
    value = _value(node.operand)
    return -value if isinstance(node.op, ast.USub) else value
  if isinstance(node, ast.BinOp):
    left, right = _value(node.left), _value(node.right)
    if isinstance(node.op, ast.Pow):
      return _power(left, right)
    if type(node.op) in _OPERATORS:
      if right == 0 and isinstance(node.op, ast.Div | ast.FloorDiv | ast.Mod):
        raise ValueError('division by zero')
      return _bounded(fractions.Fraction(_OPERATORS[type(node.op)](left, right)))
  raise ValueError('no expression of numbers')


def _power(base: fractions.Fraction, exponent: fractions.Fraction) -> fractions.Fraction:
  if exponent.denominator != 1 or abs(exponent) > _POWER:
    raise ValueError('a power must be whole and small')
  if base == 0 and exponent < 0:
    raise ValueError('division by zero')
  bits = max(base.numerator.bit_length(), base.denominator.bit_length()) * abs(int(exponent))
  if bits > _BITS:
    raise ValueError('too large')
  return base ** int(exponent)


def _bounded(value: fractions.Fraction) -> fractions.Fraction:
  if max(value.numerator.bit_length(), value.denominator.bit_length()) > _BITS:
    raise ValueError('too large')
  return value


def _written(value: fractions.Fraction) -> str:
  """As a decimal where that ends within twelve digits, else as a fraction."""
  if value.denominator == 1:
    return str(value.numerator)
  scaled = value * 10**12
  if scaled.denominator != 1:
    return f'{value.numerator}/{value.denominator}'
  digits = f'{abs(scaled.numerator):013d}'
  sign = '-' if value < 0 else ''
  return f'{sign}{digits[:-12]}.{digits[-12:].rstrip("0")}'

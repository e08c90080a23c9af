"""Parsers of untrusted text that replace `eval` and sympy's `parse_expr`.

Each parses the text into Python's syntax tree and builds the value from known nodes; nothing is evaluated. Length,
nesting and the size of numbers are bounded. For other text all raise ValueError and no other error.
"""

from __future__ import annotations

import ast
import math
import operator
import re
import types
import warnings
from collections.abc import Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, Any, TypeAlias

from jaxrl_llm.rewards.parsing import arithmetic

if TYPE_CHECKING:
  import sympy

Literal: TypeAlias = Any  # numbers, text, bytes, booleans, None, and containers of these

_CHARACTERS = 100_000  # a matrix of 100 by 100 fits
_NESTING = 100  # levels of brackets; Python's parser stops at 200
_BITS = 100_000
_POWER = 1000
_POINT, _DIFFERS = 0.7391, 1e-6  # inside of the domain of log, asin and sqrt
_SYMBOL = re.compile('[A-Za-z][A-Za-z0-9_]{0,19}')
_CONSTANTS = frozenset({'E', 'I', 'pi'})
_FUNCTIONS = frozenset(
  'sin cos tan sec csc cot asin acos atan sinh cosh tanh asinh acosh atanh exp log ln sqrt Abs erf erfi Si Ci Ei '
  'li'.split()
)
_WHOLE = {
  ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
  ast.LShift: operator.lshift, ast.RShift: operator.rshift,
  ast.BitAnd: operator.and_, ast.BitOr: operator.or_, ast.BitXor: operator.xor,
}  # fmt: skip
_ALGEBRA = {
  ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
  ast.Div: operator.truediv, ast.Pow: operator.pow,
}  # fmt: skip
_SIGNS = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def literal(text: str) -> Literal:
  """A Python literal, as `ast.literal_eval` reads it."""
  try:
    return ast.literal_eval(_tree(text))
  except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
    raise ValueError('not a literal') from error


def number(text: str) -> Fraction:
  """The exact value of numbers with + - * / // % ** and brackets; ^ is refused, because sympy reads it as xor."""
  if not isinstance(text, str) or '^' in text:
    raise ValueError('not an expression of numbers')
  return arithmetic.value(text)


def whole_number(text: str) -> int:
  """The value of whole numbers with + - * << >> & | ^ ~ and brackets."""
  try:
    return _whole(_tree(text))
  except RecursionError as error:
    raise ValueError('nested too deep') from error


def algebra(text: str, local_dict: Mapping[str, sympy.Symbol] | None = None) -> sympy.Expr:
  """The sympy expression of numbers, symbols, elementary functions, + - * / ** and brackets.

  local_dict: name → symbol, as for sympy's `parse_expr`; any other name becomes a symbol.
  """
  try:
    return _algebra(_tree(text), local_dict or {})
  except RecursionError as error:
    raise ValueError('nested too deep') from error


def symbol(name: str) -> sympy.Symbol:
  """The sympy symbol of a short ASCII name."""
  if not isinstance(name, str) or not _SYMBOL.fullmatch(name):
    raise ValueError('not the name of a symbol')
  return _sympy().Symbol(name)


def sympy_names() -> types.SimpleNamespace:
  """The part of sympy that a scorer uses, with parsers in place of functions that evaluate text."""
  package = _sympy()
  return types.SimpleNamespace(
    Symbol=symbol, diff=package.diff, simplify=_simplify, parse_expr=algebra
  )


def _simplify(expression: sympy.Expr) -> sympy.Expr:
  """sympy's simplification for a comparison with 0; skipped where a cheap check decides the comparison."""
  if expression.expand() == 0:
    return _sympy().S.Zero
  if expression.is_polynomial() or _differs(expression):
    return expression
  return _sympy().simplify(expression)


def _differs(expression: sympy.Expr) -> bool:
  """Whether the value of an expression at a point is finite and not near 0."""
  point = dict.fromkeys(expression.free_symbols, _POINT)
  try:
    value = complex(expression.evalf(20, subs=point))
  except (TypeError, ValueError, OverflowError, ArithmeticError):
    return False
  return _DIFFERS < abs(value) < math.inf


def _tree(text: str) -> ast.expr:
  if not isinstance(text, str) or len(text) > _CHARACTERS or _nesting(text) > _NESTING:
    raise ValueError('not a text, too long, or nested too deep')
  try:
    with warnings.catch_warnings():
      warnings.simplefilter('ignore')  # warnings about invalid escapes and comparisons
      return ast.parse(text.strip(), mode='eval').body
  except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
    raise ValueError('not an expression') from error


def _nesting(text: str) -> int:
  depth = deepest = 0
  for character in re.findall(r'[][(){}]', text):
    depth += 1 if character in '[({' else -1
    deepest = max(deepest, depth)
  return deepest


def _whole(node: ast.expr) -> int:
  if isinstance(node, ast.Constant) and type(node.value) is int:
    return node.value
  if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert):
    return ~_whole(node.operand)
  if isinstance(node, ast.UnaryOp) and type(node.op) in _SIGNS:
    return _SIGNS[type(node.op)](_whole(node.operand))
  if isinstance(node, ast.BinOp) and type(node.op) in _WHOLE:
    left, right = _whole(node.left), _whole(node.right)
    shift = isinstance(node.op, ast.LShift | ast.RShift)
    if shift and not 0 <= right <= _BITS:
      raise ValueError('a shift must be small')
    value = _WHOLE[type(node.op)](left, right)
    if value.bit_length() > _BITS:
      raise ValueError('too large')
    return value
  raise ValueError('not an expression of whole numbers')


def _algebra(node: ast.expr, known: Mapping[str, sympy.Symbol]) -> sympy.Expr:
  package = _sympy()
  if isinstance(node, ast.Constant) and type(node.value) in (int, float):
    is_integer = type(node.value) is int
    return package.Integer(node.value) if is_integer else package.Float(repr(node.value))
  if isinstance(node, ast.Name):
    return _named(node.id, known)
  if isinstance(node, ast.UnaryOp) and type(node.op) in _SIGNS:
    return _SIGNS[type(node.op)](_algebra(node.operand, known))
  if isinstance(node, ast.BinOp) and type(node.op) in _ALGEBRA:
    left, right = _algebra(node.left, known), _algebra(node.right, known)
    if isinstance(node.op, ast.Pow) and right.is_number and not abs(right) <= _POWER:
      raise ValueError('an exponent must be small')
    return _ALGEBRA[type(node.op)](left, right)
  if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
    arguments = [_algebra(part, known) for part in node.args]
    if node.func.id in _FUNCTIONS and len(arguments) == 1:
      return getattr(package, node.func.id)(*arguments)
    # sympy writes an integral that it cannot solve in this form.
    if node.func.id == 'Integral' and len(arguments) == 2 and arguments[1].is_Symbol:
      return package.Integral(*arguments)
  raise ValueError('not an algebraic expression')


def _named(name: str, known: Mapping[str, sympy.Symbol]) -> sympy.Expr:
  if name in known:
    return known[name]
  if name in _CONSTANTS:
    return getattr(_sympy(), name)
  if hasattr(_sympy(), name):  # the name of something other than a symbol
    raise ValueError(f'{name} is not a symbol')
  return symbol(name)


def _sympy() -> types.ModuleType:
  import sympy  # slow to import, and needed by few tasks

  return sympy

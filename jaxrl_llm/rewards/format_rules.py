"""Graders of how a reply is written, whatever it says: another part of the registry of `config.rewards`.

They look at no answer: with config.data.answers=False rows need none.
"""

from __future__ import annotations

import decimal
import functools
import importlib
import json
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from jaxrl_llm.checkpointing import safe_files
from jaxrl_llm.rewards.parsing import answer_span
from jaxrl_llm.types import Row, UserError


def tags(
  text: str,
  row: Row,
  *,
  tags: tuple[str, ...] = ('think', 'answer'),
  opened: bool = False,
  share: bool = False,
) -> float:
  """1 where the text is <a>…</a> <b>…</b> of these tags: in order, each once, none empty, nothing outside but space.

  opened: the prompt ends with the first <a>, which the reply then lacks. share: instead, the share of the marks that
  occur exactly once, in whatever order. `tagged` asks for one pair at the end, behind whatever there is. Source: none.
  """
  del row
  text = f'<{tags[0]}>{text}' if opened else text
  marks = [mark for tag in tags for mark in (f'<{tag}>', f'</{tag}>')]
  once = [text.count(mark) == 1 for mark in marks]
  if share:
    return sum(once[opened:]) / len(once[opened:])
  rest = text
  for index, mark in enumerate(marks if all(once) else ()):
    before, found, rest = rest.partition(mark)
    # Before an opening mark there is nothing, and before a closing one something.
    if not found or bool(before.strip()) != bool(index % 2):
      return 0.0
  return float(all(once) and not rest.strip())


def pattern(text: str, row: Row, *, regex: str, whole: bool = True) -> float:
  """1 where Python's `regex` matches all of the text, less the space around it; with whole=False, any of it.

  Flags stand in front of it: (?s) lets a point stand for line ends, too. It runs in a worker: one that goes on for
  longer than config.rewards.deadline_s is a time-out. Source: none.
  """
  del row
  compiled = re.compile(regex)
  return float((compiled.fullmatch(text.strip()) if whole else compiled.search(text)) is not None)


def json_schema(text: str, row: Row, *, schema: str = '') -> float:
  """1 where the text, or its last fenced block, is JSON that the schema admits; NaN and Infinity are no JSON.

  schema: a JSON file; '': the row's own `schema`, an object or text. Its $schema says which draft, 2020-12 without one;
  `format` is not checked. Numbers are decimals, compared exactly: 19.99 is a multiple of 0.01. What a $ref names must
  be in the schema: nothing is ever fetched. A schema that is none, or that refers elsewhere, is an error. It runs in a
  worker, under its deadline. Source: none.
  """
  validator = _validator_of(row, schema)
  blocks = answer_span.fences(text)
  try:
    text = blocks[-1][1] if blocks else text
    found = json.loads(text, parse_constant=_no_constant, parse_float=Decimal)
  except (
    ValueError,
    RecursionError,
    decimal.InvalidOperation,
  ):  # the last: an exponent of 19 digits
    return 0.0
  try:
    return float(validator.is_valid(found))
  except RecursionError:  # as deep as a reply may go, a schema of trees follows it
    return 0.0


def repetition(text: str, row: Row, *, n: int = 3, characters: bool = False) -> float:
  """1 − different n-grams / n-grams, of words whatever their case, or of characters without space; 0 below n of them.

  A penalty: give it a negative weight, as in config.rewards.parts=(dict(fn='repetition', weight=-0.5),). The share that
  Open-R1's penalty is made of, from third-party notes; the paper's own stands at the tokens that repeat.
  Source: arXiv:2502.03373 (Demystifying long chain-of-thought reasoning), by way of Open-R1.
  """
  del row
  units = ''.join(text.split()) if characters else text.casefold().split()
  count = len(units) - n + 1
  if count < 1:
    return 0.0
  distinct = len({tuple(units[at : at + n]) for at in range(count)})
  return 1.0 - distinct / count


def _check_tags(told: dict[str, Any], where: str) -> None:
  names = told['tags']
  if (
    not names or len(set(names)) < len(names) or not all(re.fullmatch(r'[\w-]+', x) for x in names)
  ):
    raise UserError(
      f"{where}.tags={names!r} must be different names of letters, such as ('think', 'answer')."
    )


def _check_pattern(told: dict[str, Any], where: str) -> None:
  try:
    re.compile(told['regex'])
  except (re.error, OverflowError, RecursionError) as error:
    raise UserError(
      f'{where}.regex={told["regex"]!r} is no regular expression ({error}); mend it.'
    ) from error


def _check_schema(told: dict[str, Any], where: str) -> None:
  try:
    _validator(_file(told['schema'])) if told['schema'] else None
  except (OSError, ValueError) as error:
    raise UserError(
      f'{where}.schema={told["schema"]!r} is no file with a JSON schema ({error}); mend it, or leave it empty for '
      "the rows' own."
    ) from error


def _check_repetition(told: dict[str, Any], where: str) -> None:
  if told['n'] < 1:
    raise UserError(f'{where}.n={told["n"]!r} must be a whole number from 1 up.')


CHECKS = {
  tags: _check_tags,
  pattern: _check_pattern,
  json_schema: _check_schema,
  repetition: _check_repetition,
}
ROWS = {json_schema: lambda row, told: _validator_of(row, told['schema'])}
PREPARE = {json_schema: lambda: importlib.import_module('jsonschema')}


@functools.lru_cache(maxsize=16)
def _file(path: str) -> str:
  return safe_files.read(path).decode()


def _validator_of(row: Row, path: str) -> Any:
  told = _file(path) if path else row.extra.get('schema')
  if told is None:
    raise ValueError(f'row {row.id} holds no schema')
  return _validator(told if isinstance(told, str) else json.dumps(told, sort_keys=True))


@functools.lru_cache(maxsize=4096)
def _validator(schema: str) -> Any:
  import jsonschema
  import jsonschema_specifications

  plain = json.loads(schema)
  kind = jsonschema.validators.validator_for(plain, default=jsonschema.Draft202012Validator)
  try:
    kind.check_schema(plain)
  except jsonschema.SchemaError as error:
    raise ValueError(f'no JSON schema: {error.message[:100]}') from error
  exact = json.loads(schema, parse_float=Decimal)
  # The registry of the drafts alone: jsonschema's own would fetch what a $ref names.
  return _exact_kind(kind)(exact, registry=jsonschema_specifications.REGISTRY)


@functools.cache
def _exact_kind(kind: Any) -> Any:
  """A class of validators whose numbers are int and Decimal. A draft that calls 1.0 an integer still does."""
  import jsonschema

  standard, types, keywords = kind.TYPE_CHECKER, kind.TYPE_CHECKER, {}
  if standard.is_type(1.0, 'integer'):

    def integer(checker: Any, value: Any) -> bool:
      del checker
      whole = isinstance(value, Decimal) and value == value.to_integral_value()
      return whole or standard.is_type(value, 'integer')

    types = standard.redefine('integer', integer)
  for name in {'multipleOf', 'divisibleBy'} & kind.VALIDATORS.keys():
    keywords[name] = _check_multiple
  return jsonschema.validators.extend(kind, validators=keywords, type_checker=types)


def _check_multiple(validator: Any, unit: Any, value: Any, schema: Any) -> Iterator[Any]:
  """The keyword `multipleOf`, which jsonschema computes in floats, where 19.99 / 0.01 is not whole."""
  import jsonschema

  del schema
  if validator.is_type(value, 'number') and not _multiple(value, unit):
    yield jsonschema.ValidationError(f'{value!r} is not a multiple of {unit!r}')


def _multiple(value: int | Decimal, unit: int | Decimal) -> bool:
  (value, value_exponent), (unit, unit_exponent) = _scaled(value), _scaled(unit)
  places = value_exponent - unit_exponent
  if places >= 0:  # modular, since 10 ** places may have a billion digits
    return value * pow(10, places, unit) % unit == 0
  # A value of fewer bits than a power of ten has digits is below that power.
  return value == 0 or (value.bit_length() >= -places and value % (unit * 10**-places) == 0)


def _scaled(number: int | Decimal) -> tuple[int, int]:
  """(n, e) of |number| = n · 10^e."""
  if isinstance(number, int):
    return abs(number), 0
  exponent = number.as_tuple().exponent
  return int(Decimal((0, number.as_tuple().digits, 0))), exponent


def _no_constant(name: str) -> None:
  raise ValueError(f'{name} is no JSON')

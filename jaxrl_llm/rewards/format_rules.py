"""Format rules: reward functions of the form of a completion, for `config.rewards`.

They do not use the row's answer, so that config.data.answers=False is possible.
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
from jaxrl_llm.rewards.outcomes import Settings
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
  """1 if the text is <a>…</a> <b>…</b>: these tags in order, each once, none empty, and only white space outside;
  else 0.

  opened: the prompt ends with the first <a>, so that the completion lacks it. share: instead, the share of the marks
  that occur exactly once, in any order. `tagged` requires one pair at the end of any text.
  """
  del row
  text = f'<{tags[0]}>{text}' if opened else text
  marks = [mark for tag in tags for mark in (f'<{tag}>', f'</{tag}>')]
  once = [text.count(mark) == 1 for mark in marks]
  if share:
    return sum(once[opened:]) / len(once[opened:])
  rest = text
  for index, mark in enumerate(marks if all(once) else ()):
    before, separator, rest = rest.partition(mark)
    # Nothing may precede an opening mark; something must precede a closing mark.
    if not separator or bool(before.strip()) != bool(index % 2):
      return 0.0
  return float(all(once) and not rest.strip())


def pattern(text: str, row: Row, *, regex: str, whole: bool = True) -> float:
  """1 if Python's `regex` matches the whole stripped text, or with whole=False a part of it, else 0.

  Flags precede the expression: (?s) lets a dot match line ends. A match that takes longer than
  config.rewards.deadline_s is a time-out.
  """
  del row
  compiled = re.compile(regex)
  return float((compiled.fullmatch(text.strip()) if whole else compiled.search(text)) is not None)


def json_schema(text: str, row: Row, *, schema: str = '') -> float:
  """1 if the text, or its last fenced block, is valid JSON under the schema, else 0; NaN and Infinity are no JSON.

  schema: a JSON file; '' = the row's `schema`, an object or text. $schema names the draft, default 2020-12; `format` is
  not checked. Numbers are exact decimals: 19.99 is a multiple of 0.01. A $ref must be within the schema, because
  nothing is fetched. An invalid schema is an error. It runs in a worker under its deadline.
  """
  validator = _validator_of(row, schema)
  blocks = answer_span.fences(text)
  try:
    text = blocks[-1][1] if blocks else text
    value = json.loads(text, parse_constant=_refuse_constant, parse_float=Decimal)
  except (ValueError, RecursionError, decimal.InvalidOperation):  # the last: a huge exponent
    return 0.0
  try:
    return float(validator.is_valid(value))
  except RecursionError:  # a recursive schema follows the nesting of the text
    return 0.0


def repetition(text: str, row: Row, *, n: int = 3, characters: bool = False) -> float:
  """1 − distinct n-grams / n-grams, arXiv:2502.03373, of case-folded words or of characters without white space.

  0 for fewer than n units. It is a penalty: give it a negative weight, as in
  config.rewards.parts=(dict(fn='repetition', weight=-0.5),). This is the form of Open-R1, from third-party notes; the
  paper penalizes the repeated tokens.
  """
  del row
  units = ''.join(text.split()) if characters else text.casefold().split()
  count = len(units) - n + 1
  if count < 1:
    return 0.0
  distinct = len({tuple(units[at : at + n]) for at in range(count)})
  return 1.0 - distinct / count


def _check_tags(settings: Settings, where: str) -> None:
  names = settings['tags']
  if (
    not names or len(set(names)) < len(names) or not all(re.fullmatch(r'[\w-]+', x) for x in names)
  ):
    raise UserError(
      f"{where}.tags={names!r} must be different names of letters, such as ('think', 'answer')."
    )


def _check_pattern(settings: Settings, where: str) -> None:
  try:
    re.compile(settings['regex'])
  except (re.error, OverflowError, RecursionError) as error:
    raise UserError(
      f'{where}.regex={settings["regex"]!r} is no regular expression ({error}); correct it.'
    ) from error


def _check_schema(settings: Settings, where: str) -> None:
  try:
    _validator(_file(settings['schema'])) if settings['schema'] else None
  except (OSError, ValueError) as error:
    raise UserError(
      f'{where}.schema={settings["schema"]!r} is no file with a JSON schema ({error}); correct it, or leave '
      f'it empty to '
      'use that of the rows.'
    ) from error


def _check_repetition(settings: Settings, where: str) -> None:
  if settings['n'] < 1:
    raise UserError(f'{where}.n={settings["n"]!r} must be a whole number from 1 up.')


CHECKS = {
  tags: _check_tags,
  pattern: _check_pattern,
  json_schema: _check_schema,
  repetition: _check_repetition,
}
ROWS = {json_schema: lambda row, settings: _validator_of(row, settings['schema'])}
PREPARE = {json_schema: lambda: importlib.import_module('jsonschema')}


@functools.lru_cache(maxsize=16)
def _file(path: str) -> str:
  return safe_files.read(path).decode()


def _validator_of(row: Row, path: str) -> Any:
  schema = _file(path) if path else row.extra.get('schema')
  if schema is None:
    raise ValueError(f'row {row.id} holds no schema')
  return _validator(schema if isinstance(schema, str) else json.dumps(schema, sort_keys=True))


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
  # This registry has the drafts alone; the default one of jsonschema would fetch a $ref.
  return _exact_kind(kind)(exact, registry=jsonschema_specifications.REGISTRY)


@functools.cache
def _exact_kind(kind: Any) -> Any:
  """A validator class for int and Decimal. A draft that accepts 1.0 as an integer still does."""
  import jsonschema

  standard, types, keywords = kind.TYPE_CHECKER, kind.TYPE_CHECKER, {}
  if standard.is_type(1.0, 'integer'):

    def integer(checker: Any, value: Any) -> bool:
      del checker
      is_whole = isinstance(value, Decimal) and value == value.to_integral_value()
      return is_whole or standard.is_type(value, 'integer')

    types = standard.redefine('integer', integer)
  for name in {'multipleOf', 'divisibleBy'} & kind.VALIDATORS.keys():
    keywords[name] = _check_multiple
  return jsonschema.validators.extend(kind, validators=keywords, type_checker=types)


def _check_multiple(validator: Any, unit: Any, value: Any, schema: Any) -> Iterator[Any]:
  """The keyword `multipleOf`, exactly. jsonschema uses floats, where 19.99 / 0.01 is not whole."""
  import jsonschema

  del schema
  if validator.is_type(value, 'number') and not _multiple(value, unit):
    yield jsonschema.ValidationError(f'{value!r} is not a multiple of {unit!r}')


def _multiple(value: int | Decimal, unit: int | Decimal) -> bool:
  (value, value_exponent), (unit, unit_exponent) = _scaled(value), _scaled(unit)
  places = value_exponent - unit_exponent
  if places >= 0:  # modular, because 10 ** places may have a billion digits
    return value * pow(10, places, unit) % unit == 0
  # A value with fewer bits than the power of ten has digits is below that power.
  return value == 0 or (value.bit_length() >= -places and value % (unit * 10**-places) == 0)


def _scaled(number: int | Decimal) -> tuple[int, int]:
  """(n, e) of |number| = n · 10^e."""
  if isinstance(number, int):
    return abs(number), 0
  exponent = number.as_tuple().exponent
  return int(Decimal((0, number.as_tuple().digits, 0))), exponent


def _refuse_constant(name: str) -> None:
  raise ValueError(f'{name} is no JSON')

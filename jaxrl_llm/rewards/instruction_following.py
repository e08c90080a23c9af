"""Instruction following, verified by rules, for `config.rewards`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxrl_llm.config import stages
from jaxrl_llm.rewards import instruction_rules
from jaxrl_llm.types import JsonObject, Row, UserError


def instructions(text: str, row: Row, *, share: bool = False, after: str = '') -> float:
  """1 if the text follows all of the row's instructions, else 0; with `share`, followed / instructions.

  The strict accuracy of IFEval, arXiv:2311.07911, implemented from the paper. The row has `instructions`, a list of
  {id, kwargs}, where id is a function of instruction_rules.py and kwargs its arguments, or, as the paper's data,
  `instruction_id_list` and `kwargs`. after: only the text after the last such mark is read, for example '</think>'; 0
  without the mark. An empty completion follows no instruction.
  """
  if after:
    _, mark, text = text.rpartition(after)
    if not mark:
      return 0.0
  followed = [bool(text.strip()) and rule(text) for rule in _rules(row)]
  return sum(followed) / len(followed) if share else float(all(followed))


def _rules(row: Row) -> list[Callable[[str], bool]]:
  return [_rule(name, arguments, row) for name, arguments in _instructions_of(row)]


ROWS = {instructions: lambda row, settings: _rules(row)}


def _instructions_of(row: Row) -> list[tuple[str, JsonObject]]:
  """(id, arguments) of each instruction of a row. Raises ValueError where it has none."""
  entries = row.extra.get('instructions')
  try:
    if entries is not None:
      instructions = [(entry['id'], entry.get('kwargs') or {}) for entry in entries]
    else:
      ids, kwargs = row.extra['instruction_id_list'], row.extra['kwargs']
      instructions = [(name, each or {}) for name, each in zip(ids, kwargs, strict=True)]
    # In tables every instruction has all arguments, None if unused, and counts are floats.
    instructions = [
      (name, {k: _plain(v) for k, v in arguments.items() if v is not None})
      for name, arguments in instructions
    ]
  except (KeyError, TypeError, AttributeError, ValueError):
    instructions = []
  if not instructions:
    raise ValueError(f"row {row.id} holds no 'instructions', a list of {{id, kwargs}}")
  return instructions


def _plain(value: Any) -> Any:
  return int(value) if isinstance(value, float) and value.is_integer() else value


def _rule(name: str, arguments: JsonObject, row: Row) -> Callable[[str], bool]:
  try:
    return stages.pick(
      instruction_rules, {**arguments, 'fn': str(name).rpartition(':')[2]}, 'instructions'
    )
  except UserError as error:
    raise ValueError(f'row {row.id}: {str(error).removeprefix("config.")}') from None

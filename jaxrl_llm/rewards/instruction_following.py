"""Instruction following, judged by rules: another part of the registry of `config.rewards`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxrl_llm.config import stages
from jaxrl_llm.rewards import instruction_rules
from jaxrl_llm.types import Row, UserError


def instructions(text: str, row: Row, *, share: bool = False, after: str = '') -> float:
  """1 where the text follows all of the row's instructions, or with `share` followed / instructions.

  The row holds `instructions`, a list of {id, kwargs}, each id a function of rules.py and kwargs its arguments; or, as
  the paper's data, `instruction_id_list` and `kwargs`. after: judge what stands after the last of this mark, such as
  '</think>', 0 where it is missing. An empty reply follows none. Source: arXiv:2311.07911 (IFEval, its strict
  accuracy), written anew from the paper; the rules' details are in rules.py.
  """
  if after:
    _, mark, text = text.rpartition(after)
    if not mark:
      return 0.0
  asked = _rules(row)
  followed = [bool(text.strip()) and rule(text) for rule in asked]
  return sum(followed) / len(followed) if share else float(all(followed))


def _rules(row: Row) -> list[Callable[[str], bool]]:
  return [_rule(*told, row) for told in _asked(row)]


ROWS = {instructions: lambda row, told: _rules(row)}


def _asked(row: Row) -> list[tuple[str, dict[str, Any]]]:
  """(id, arguments) of each instruction of a row. Raises ValueError where it has none."""
  told = row.extra.get('instructions')
  try:
    if told is not None:
      found = [(one['id'], one.get('kwargs') or {}) for one in told]
    else:
      ids, arguments = row.extra['instruction_id_list'], row.extra['kwargs']
      found = [(one, given or {}) for one, given in zip(ids, arguments, strict=True)]
    # A table gives every instruction the arguments of all, None where it has none, and makes counts floats.
    found = [
      (one, {k: _plain(v) for k, v in given.items() if v is not None}) for one, given in found
    ]
  except (KeyError, TypeError, AttributeError, ValueError):
    found = []
  if not found:
    raise ValueError(f"row {row.id} holds no 'instructions', a list of {{id, kwargs}}")
  return found


def _plain(value: Any) -> Any:
  return int(value) if isinstance(value, float) and value.is_integer() else value


def _rule(name: str, arguments: dict[str, Any], row: Row) -> Callable[[str], bool]:
  try:
    return stages.pick(
      instruction_rules, {**arguments, 'fn': str(name).rpartition(':')[2]}, 'instructions'
    )
  except UserError as error:
    raise ValueError(f'row {row.id}: {str(error).removeprefix("config.")}') from None

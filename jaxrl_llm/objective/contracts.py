"""Contracts between stages of `config.objective`: which functions of other stages a function goes with.

A function that is another method beside the wrong partner says so with `tokens.requires`; `check` refuses such a pair.
"""

from __future__ import annotations

import types
from typing import Any

from jaxrl_llm.config.stages import choices
from jaxrl_llm.objective.token_inputs import Clause
from jaxrl_llm.types import UserError


def clauses(modules: dict[str, types.ModuleType]) -> list[tuple[str, str, Clause]]:
  """(stage, function, clause) of every function in `modules`, stage → module."""
  return [
    (stage, name, clause)
    for stage, module in modules.items()
    for name, fn in sorted(choices(module).items())
    for clause in getattr(fn, 'requires', ())
  ]


def check(
  objective: Any, modules: dict[str, types.ModuleType], optimizer: Any | None = None
) -> None:
  """Raises UserError for a function of a stage in `modules`, stage → module, beside one that it does not go with.

  `objective` is `config.objective`, whose stages these are, or those of `config.optimizer` if that is given.
  """
  section, where = (objective, 'objective') if optimizer is None else (optimizer, 'optimizer')
  for stage, module in modules.items():
    name = section[stage]['fn']
    for clause in getattr(choices(module).get(name), 'requires', ()):
      _hold(clause, f'config.{where}.{stage}.fn={name!r}', objective)


def _hold(clause: Clause, owner: str, objective: Any) -> None:
  partner, name = f'config.objective.{clause.stage}', objective[clause.stage]['fn']
  if name not in clause.allowed:
    raise UserError(
      f'{owner} does not go with {partner}.fn={name!r}: {clause.why}; '
      f'set --{partner}.fn={clause.allowed[0]}{_others(clause.allowed)}.'
    )
  for key, (low, high) in clause.between.items():
    value = objective[clause.stage].get(key)
    if value is None or not low < value < high:
      raise UserError(
        f'{owner} needs {partner}.{key} above {low} and below {high}, not {value!r}: {clause.why}; '
        f'set --{partner}.{key}={(low + high) / 2}.'
      )


def _others(allowed: tuple[str, ...]) -> str:
  return f' (or {", ".join(allowed[1:])})' if len(allowed) > 1 else ''

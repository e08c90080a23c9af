"""Contracts between stages of `config.objective`: which functions of different stages may be combined.

A function declares its contract with `token_inputs.requires`. `check` refuses a combination that breaks one.
"""

from __future__ import annotations

import types
from collections.abc import Mapping

from jaxrl_llm.config.schema import ObjectiveConfig, OptimizerConfig
from jaxrl_llm.config.stages import choices
from jaxrl_llm.objective.token_inputs import Clause
from jaxrl_llm.types import UserError


def clauses(modules: Mapping[str, types.ModuleType]) -> list[tuple[str, str, Clause]]:
  """(stage, function, clause) of every function in `modules`, which maps stages to modules."""
  return [
    (stage, name, clause)
    for stage, module in modules.items()
    for name, fn in sorted(choices(module).items())
    for clause in getattr(fn, 'requires', ())
  ]


def check(
  objective: ObjectiveConfig,
  modules: Mapping[str, types.ModuleType],
  optimizer: OptimizerConfig | None = None,
) -> None:
  """Raises UserError for a function of a stage in `modules` that another chosen stage excludes.

  The stages are those of `config.objective`, or of `config.optimizer` where that is passed.
  """
  section, prefix = (objective, 'objective') if optimizer is None else (optimizer, 'optimizer')
  for stage, module in modules.items():
    name = section[stage]['fn']
    for clause in getattr(choices(module).get(name), 'requires', ()):
      _check_clause(clause, f'config.{prefix}.{stage}.fn={name!r}', objective)


def _check_clause(clause: Clause, owner: str, objective: ObjectiveConfig) -> None:
  partner, name = f'config.objective.{clause.stage}', objective[clause.stage]['fn']
  if name not in clause.allowed:
    raise UserError(
      f'{owner} does not go with {partner}.fn={name!r}: {clause.why}; '
      f'set --{partner}.fn={clause.allowed[0]}{_alternatives(clause.allowed)}.'
    )
  for key, (low, high) in clause.between.items():
    value = objective[clause.stage].get(key)
    if value is None or not low < value < high:
      raise UserError(
        f'{owner} needs {partner}.{key} above {low} and below {high}, not {value!r}: {clause.why}; '
        f'set --{partner}.{key}={(low + high) / 2}.'
      )


def _alternatives(allowed: tuple[str, ...]) -> str:
  return f' (or {", ".join(allowed[1:])})' if len(allowed) > 1 else ''

"""Conditions on a configuration, and pairs of them that are refused: the rows of `compatibility.ROWS`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import ml_collections

from jaxrl_llm.config.schema import Config, Section
from jaxrl_llm.config.section import Setting

# Values that the config alone does not determine, by field: `objective.needs` (what the chosen functions need),
# `rewards.batched`, `mesh.<axis>` of the real mesh, `model.<field>` of the policy.
Facts = Mapping[str, Setting]


@dataclasses.dataclass(frozen=True)
class Condition:
  """A test of one field: `op` is used, in, not in, above, below, or needs (an input of the chosen functions)."""

  field: str
  op: str = 'used'
  value: Any = None
  label: str = ''  # for the table, where the test is not obvious

  def holds(self, config: Config | ml_collections.ConfigDict, facts: Facts) -> bool:
    """Whether `config` meets the condition; one on a fact that is not known yet is not met."""
    if self.op == 'needs':
      return self.value in facts.get('objective.needs', ())
    value = value_of(self.field, config, facts)
    if value is None:
      return False
    tests = {
      'used': lambda: value not in _UNUSED,
      'in': lambda: value in self.value,
      'not in': lambda: value not in self.value,
      'above': lambda: value > self.value,
      'below': lambda: value < self.value,
    }
    return tests[self.op]()

  def name(self, config: Config | ml_collections.ConfigDict, facts: Facts) -> str:
    """The field with its value, as a flag sets it; of the model, which no flag sets, its property."""
    if self.field.startswith('model.'):
      return f'a model with {self.field.removeprefix("model.")}={facts[self.field]!r}'
    value = config
    for part in self.field.split('.'):
      value = value.get(part) if isinstance(value, (ml_collections.ConfigDict, Section)) else None
    suffix = '.fn' if isinstance(value, (ml_collections.ConfigDict, Section)) else ''
    return f'config.{self.field}{suffix}={value_of(self.field, config, facts)!r}'

  def text(self) -> str:
    """The condition in the table."""
    value = ', '.join(map(repr, self.value)) if isinstance(self.value, tuple) else repr(self.value)
    words = {
      'used': '',
      'in': f' = {value.replace(", ", " or ")}',
      'not in': f' other than {value}',
      'above': f' above {value}',
      'below': f' below {value}',
      'needs': f' that needs {value}',
    }
    if self.label.startswith('a '):
      return self.label
    return f'`{self.field}` {self.label}' if self.label else f'`{self.field}`{words[self.op]}'


@dataclasses.dataclass(frozen=True)
class Row:
  """Two conditions that are refused together; `also` must hold besides."""

  a: Condition
  b: Condition
  reason: str
  remedy: str
  also: tuple[Condition, ...] = ()

  def holds(self, config: Config | ml_collections.ConfigDict, facts: Facts) -> bool:
    """Whether `config` has both."""
    return all(condition.holds(config, facts) for condition in (self.a, self.b, *self.also))


_UNUSED = ('none', '', 0, ())


def value_of(field: str, config: Config | ml_collections.ConfigDict, facts: Facts) -> Any:
  """The value of a field, or the name of its function; None for a fact that is not known."""
  if field in facts:
    return facts[field]
  value: Any = config
  for part in field.split('.'):
    if not isinstance(value, (ml_collections.ConfigDict, Section)):
      return None
    value = value.get(part)
  return value.get('fn') if isinstance(value, (ml_collections.ConfigDict, Section)) else value

"""Section and Stage: the building blocks of the typed configuration."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

# What config.json can hold: numbers, text, and lists or dicts of them.
Setting: TypeAlias = (
  'bool | int | float | str | tuple[Setting, ...] | list[Setting] | Mapping[str, Setting]'
)


@dataclasses.dataclass(frozen=True)
class Section:
  """A part of the configuration: read as attributes, or as a mapping whose names are sorted."""

  def keys(self) -> list[str]:
    """The names of the fields."""
    return sorted(self._entries())

  def items(self) -> list[tuple[str, Any]]:
    """Pairs of a name and a value."""
    return sorted(self._entries().items())

  def get(self, name: str, default: Any = None) -> Any:
    """The field of that name, or `default`."""
    return self._entries().get(name, default)

  def __getitem__(self, name: str) -> Any:
    return self._entries()[name]

  def __contains__(self, name: object) -> bool:
    return name in self._entries()

  def __iter__(self) -> Iterator[str]:
    return iter(self.keys())

  def to_dict(self) -> dict[str, Any]:
    """Plain dicts, in the order of the fields."""
    return {
      name: value.to_dict() if isinstance(value, Section) else value
      for name, value in self._entries().items()
    }

  def to_json(self, **options: Any) -> str:
    """The text of config.json; `options` are those of json.dumps."""
    return json.dumps(self.to_dict(), **options)

  def _entries(self) -> dict[str, Any]:
    """Fields by name; the settings of a function stand beside its name, as they do in a config file."""
    entries = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
    return entries | entries.pop('settings', {})


@dataclasses.dataclass(frozen=True)
class Stage(Section):
  """A function by name and its keyword settings: `dict(fn='clip', low=0.2, high=0.28)` of a config file."""

  fn: str
  settings: Mapping[str, Setting] = dataclasses.field(default_factory=dict)


def stage(fn: str, **settings: Setting) -> Stage:
  """Stage(fn, settings)."""
  return Stage(fn, settings)

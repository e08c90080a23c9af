"""Differences between the configuration of a run and that of a later start or of a mode that reads the run."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable

from jaxrl_llm.config import loading as configs
from jaxrl_llm.config.schema import is_stage
from jaxrl_llm.types import JsonObject, UserError

# Fields that may differ between two starts of a run: its length, what is evaluated and stored, and how the same
# computation is laid out on a machine. All other fields change what the steps compute.
CHANGEABLE = (
  'steps',
  'evaluation',
  'checkpoint',
  'rewards.workers',
  'rewards.deadline_s',
  'rewards.cpu_s',
  'rewards.memory_mb',
  'environment.workers',
  'environment.deadline_s',
  'environment.cpu_s',
  'environment.worker_memory_mb',
  'rewards.failed.stop_share',
  'rewards.failed.stop_steps',
  'monitoring',
  'mesh',
  'processes',
  'learner.microbatch_tokens',
  'learner.remat',
  'objective.head_chunk_tokens',
)
_MAX_NAMED = 8  # differing fields named in an error
_ABSENT = object()


def check(root: str, old: JsonObject, new: JsonObject) -> tuple[str, ...]:
  """Returns the changed fields as 'name: old -> new'. Raises UserError where one changes what the steps compute."""
  check_version(root, old, new)
  changed = changes(old, new)
  refused = [change for name, change in changed.items() if not is_changeable(name)]
  if refused:
    raise UserError(
      f'--workdir={root} holds a run of another config ({summary(refused)}); give '
      'the old values, or another --workdir.'
    )
  return tuple(changed.values())


def check_version(root: str, old: JsonObject, new: Collection[str]) -> None:
  """Raises UserError for a config.json with sections that have other names now, which cannot be compared."""
  if renamed := sorted(old.keys() - set(new) - {'fingerprint'}):
    raise UserError(
      f'--workdir={root} holds a run of an earlier version: its config.json has {", ".join(renamed)}, which are no '
      'fields of the configuration any more; give another --workdir, or continue the run with the version '
      'that began it.'
    )


def changes(old: JsonObject, new: JsonObject) -> dict[str, str]:
  """{field: 'field: old -> new'} of the fields that differ. One that is newer than the run had its default of now."""
  before, after = _defaults() | flatten(old), flatten(new)
  before.pop('fingerprint', None)
  return {
    name: f'{name}: {before.get(name, "unset")!r} -> {after.get(name, "unset")!r}'
    for name in sorted(before | after)
    if before.get(name, _ABSENT) != after.get(name, _ABSENT)
  }


def summary(found: Collection[str]) -> str:
  """The first changes, and the number of the others."""
  more = f'; and {len(found) - _MAX_NAMED} more' if len(found) > _MAX_NAMED else ''
  return '; '.join(list(found)[:_MAX_NAMED]) + more


def is_changeable(name: str, among: Iterable[str] = CHANGEABLE) -> bool:
  """Whether a field is one of `among`, or inside one of them."""
  return any(name == field or name.startswith(f'{field}.') for field in among)


def flatten(tree: JsonObject, prefix: str = '') -> JsonObject:
  """{'a.b': value} of nested dicts."""
  flat: JsonObject = {}
  for key, value in tree.items():
    if isinstance(value, dict):
      flat |= flatten(value, f'{prefix}{key}.')
    else:
      flat[prefix + key] = value
  return flat


def _defaults() -> JsonObject:
  """The default fields without those of stages, whose settings depend on the chosen function."""

  def without_stages(section: dict, field: str) -> dict:
    return {
      name: without_stages(value, f'{field}.{name}') if isinstance(value, dict) else value
      for name, value in section.items()
      if not (isinstance(value, dict) and is_stage(value, f'{field}.{name}'))
    }

  return flatten(without_stages(json.loads(configs.default().to_json()), 'config'))

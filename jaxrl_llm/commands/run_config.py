"""The configuration of a mode: that of --config, or without it the one that the run in --workdir saved."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import NamedTuple

import ml_collections

from jaxrl_llm.checkpointing import config_changes, safe_files, storage
from jaxrl_llm.config import loading, schema
from jaxrl_llm.types import JsonObject, UserError

# Fields that a mode takes from the command line whatever the run was trained with: they decide how completions are
# sampled, and how they are scored, never which weights there are.
GENERATION = (
  *('temperature', 'completion_tokens', 'prompt_tokens', 'evaluation'),
  *('data.template', 'data.system', 'data.chat'),
)
EVALUATION = (*GENERATION, 'data', 'rewards', 'environment')
# Of those, fields that change no result of an evaluation.
_WITHOUT_EFFECT = (
  *('evaluation.every', 'temperature', 'prompt_tokens', 'rewards.failed'),
  *('rewards.workers', 'rewards.deadline_s', 'rewards.cpu_s', 'rewards.memory_mb'),
  *('environment.workers', 'environment.deadline_s'),
)


class RunConfig(NamedTuple):
  """The configuration of a mode that works on a run."""

  trained: ml_collections.ConfigDict  # that of the run: it decides which checkpoints fit
  requested: ml_collections.ConfigDict  # with the fields that the mode takes from the command line
  # fields of an evaluation that differ from the run's, as 'name: old -> new'
  evaluation_changes: tuple[str, ...] = ()


def load(
  arguments: argparse.Namespace, overrides: Sequence[str], free: Sequence[str] = ()
) -> RunConfig:
  """The configuration of a mode that reads the run in --workdir; `free` fields may differ from the run's.

  Without a run, that of --config. Raises UserError where the command contradicts the run, and where --workdir is given
  without --config and holds no run.
  """
  path = storage.config_file(arguments.workdir)
  if not path:
    config = _without_run(arguments, overrides)
    return RunConfig(config, config)
  old = _own(arguments.workdir, path)
  requested = loading.load(arguments.config or path, overrides)
  if not requested.prompts:  # automatic: by the devices of this machine
    requested.prompts = old.get('prompts', 0)
  found = config_changes.changes(old, json.loads(schema.typed(requested).to_json()))
  typed = _typed(overrides)
  allowed = [
    name
    for name in found
    if config_changes.is_changeable(name)
    or (config_changes.is_changeable(name, free) and _is_typed(name, typed))
  ]
  if refused := [found[name] for name in found if name not in allowed]:
    remedy = "leave --config out to use the run's own" if arguments.config else 'leave that out'
    raise UserError(
      f'--workdir={arguments.workdir} holds a run of another config ({config_changes.summary(refused)}); {remedy}.'
    )
  trained = loading.load(path)
  for name in allowed:
    if config_changes.is_changeable(name):
      _copy(name, requested, trained)
  return RunConfig(trained, requested, _evaluation_changes(found))


def load_any(arguments: argparse.Namespace, overrides: Sequence[str]) -> ml_collections.ConfigDict:
  """The configuration of --config, else of the run in --workdir, else the defaults; nothing is compared."""
  path = '' if arguments.config else storage.config_file(arguments.workdir)
  if not path:
    _check_continues(arguments, overrides)
    return loading.load(arguments.config, overrides)
  _own(arguments.workdir, path)
  return loading.load(path, overrides)


def _check_continues(arguments: argparse.Namespace, overrides: Sequence[str]) -> None:
  """Raises UserError for a training whose flags are those of a run that is continued, where there is none."""
  given = arguments.workdir_given and arguments.mode == 'train' and not arguments.config
  if given and all(config_changes.is_changeable(name) for name in _typed(overrides)):
    raise UserError(
      f'--workdir={arguments.workdir} holds no run to continue: it has no config.json; name the folder of a run, or '
      'give --config to begin one.'
    )


def _without_run(
  arguments: argparse.Namespace, overrides: Sequence[str]
) -> ml_collections.ConfigDict:
  if arguments.workdir_given and not arguments.config and not arguments.base:
    raise UserError(
      f'--workdir={arguments.workdir} holds no run: it has no config.json; name the folder of a run, or give --config.'
    )
  return loading.load(arguments.config, overrides)


def _own(workdir: str, path: str) -> JsonObject:
  """The run's own settings. Raises UserError where they are damaged or of another version."""
  try:
    settings = dict(json.loads(safe_files.read(path)))
  except (ValueError, TypeError) as error:
    raise UserError(
      f'{path} is damaged ({error}); restore it, or start the training again, which rewrites it.'
    ) from error
  config_changes.check_version(workdir, settings, loading.default())
  settings.pop('fingerprint', None)
  return settings


def _typed(overrides: Sequence[str]) -> list[str]:
  """The fields that overrides such as '--config.a.b=v' set."""
  return [text.partition('=')[0].removeprefix('--config.') for text in overrides]


def _is_typed(name: str, typed: Sequence[str]) -> bool:
  """Whether a field was set on the command line: itself, its section, or the function or source that it belongs to."""
  stages = [field.removesuffix('.fn') for field in typed if field.endswith('.fn')]
  of_source = [f'data.{field}' for field in loading.OF_SOURCE if 'data.source' in typed]
  return config_changes.is_changeable(name, [*typed, *stages, *of_source])


def _copy(name: str, source: ml_collections.ConfigDict, to: ml_collections.ConfigDict) -> None:
  *parents, leaf = name.split('.')
  for parent in parents:
    source, to = source[parent], to[parent]
  with to.ignore_type():
    to[leaf] = source[leaf]


def _evaluation_changes(found: dict[str, str]) -> tuple[str, ...]:
  return tuple(
    change
    for name, change in found.items()
    if config_changes.is_changeable(name, EVALUATION)
    and not config_changes.is_changeable(name, _WITHOUT_EFFECT)
  )

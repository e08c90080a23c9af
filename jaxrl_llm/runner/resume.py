"""Checkpoints of a run: what is saved, how a run continues from it, and which run directories are refused."""

from __future__ import annotations

import json
import os
from typing import Any, Protocol

import jax

from jaxrl_llm.checkpointing import checkpoint, run_dir
from jaxrl_llm.config.schema import Config
from jaxrl_llm.distributed import sharding
from jaxrl_llm.learner import empty_records
from jaxrl_llm.learner import state as train_state
from jaxrl_llm.monitoring import console
from jaxrl_llm.runner import host_step
from jaxrl_llm.runner.context import Progress, RunContext
from jaxrl_llm.types import Batch, JsonObject, Prompts, UserError


class _Stateful(Protocol):
  def state_dict(self) -> JsonObject: ...
  def load_state_dict(self, state: JsonObject) -> None: ...


def open_directory(workdir: str, config: Config) -> run_dir.RunDirectory:
  """Open the run directory, compared with its checkpoints. Raises UserError as `run_dir.open_run` does."""
  folder = _checkpoints(workdir)
  return run_dir.open_run(
    workdir, config, steps=checkpoint.saved_steps(folder), saved=checkpoint.saved_config(folder)
  )


def fresh(context: RunContext) -> Progress:
  """The state of a run before its first step."""
  models, spec = context.models, context.spec
  state = train_state.init_state(
    spec, models.policy.params, _teacher_params(context), models.adapter
  )
  return Progress(state, empty_records.empty_batch(spec), None, 0)


def restore(
  context: RunContext,
  directory: run_dir.RunDirectory,
  screen: console.Console,
  step: int | None = None,
  *,
  trains: bool = False,
) -> Progress:
  """Restore the newest complete checkpoint or that of `step`; without one, return a fresh start.

  A run that `trains` on must have the same held-out prompts as before. Raises UserError where the data changed.
  """
  newest = checkpoint.latest(directory.checkpoints, step)
  if newest is None:
    return fresh(context)
  spec, batch = context.spec, empty_records.empty_batch(context.spec)
  abstract = (
    train_state.without_frozen(train_state.abstract_state(spec)),
    jax.eval_shape(lambda: batch),
  )
  (state, batch), host = checkpoint.restore(directory.checkpoints, newest, abstract)
  check_data(context, directory, newest, host, trains)
  for name, part in _stateful(context).items():
    part.load_state_dict(host[name])
  screen.info(f'resuming at step {newest}')
  pending = host_step.unpacked(host['flight']) if host['flight'] else None
  received = tuple(map(host_step.unpacked_received, host.get('received', ())))
  params = context.models.policy.params
  state = train_state.with_frozen(spec, state, params, _teacher_params(context))
  return Progress(state, sharding.fetch(batch), pending, newest, received)


def save(context: RunContext, saver: checkpoint.Saver, progress: Progress) -> None:
  """Save everything that the next step depends on; PRNG keys and data order follow from (seed, step)."""
  tables, pending = context.tables, progress.pending
  host = _host_state(context)
  host |= dict(fingerprint=tables.train.fingerprint, held_out=tables.held_out.fingerprint)
  host |= dict(step=progress.done, flight={} if pending is None else host_step.packed(pending))
  host |= dict(received=[host_step.packed_received(step) for step in progress.received])
  # For readers of a checkpoint without its run directory.
  host |= dict(config=json.loads(context.config.to_json()), versions=run_dir.versions())
  saver.save(progress.done, (train_state.without_frozen(progress.state), progress.batch), host)


def shared_state(
  context: RunContext, index: int, prompts: Prompts, batch: Batch
) -> JsonObject:  # fmt: skip
  """The state that decides step `index` and must be equal on all processes, by names for an error message."""
  tables, host = context.tables, _host_state(context)
  # Without the messages, which are of failures in this process.
  host['failures'] = [counts for counts, _ in host['failures']['seen']]
  data = index, tables.train.fingerprint, tables.held_out.fingerprint
  return host | dict(config=context.config.to_json(), data=data, prompts=prompts, batch=batch)


def check_trained(config: Config, workdir: str) -> None:
  """Raises UserError where `workdir` has no checkpoint, before anything is loaded or written."""
  check_supervised_start(config, workdir)
  if not checkpoint.saved_steps(_checkpoints(workdir)):
    raise UserError(
      f'--workdir={workdir} has no checkpoint: nothing was trained there; name the folder of a run, or give --base for '
      'config.model as it is.'
    )


def check_supervised_start(config: Config, workdir: str) -> None:
  """Raises UserError where a run begins with a supervised start that has not taken place yet."""
  if config.sft.steps and not checkpoint.saved_steps(_checkpoints(workdir)):
    raise UserError(
      f'config.sft.steps={config.sft.steps} begins a run with a supervised start, and --workdir={workdir} has no '
      'checkpoint behind one; train there first, or set --config.sft.steps=0 for config.model as it is.'
    )


def _checkpoints(workdir: str) -> str:
  return os.path.join(workdir, 'checkpoints')


def _teacher_params(context: RunContext) -> Any:
  return context.models.teacher and context.models.teacher.params


def _stateful(context: RunContext) -> dict[str, _Stateful]:
  """The host-side parts with state, by their names in a checkpoint."""
  selection, buffers, grading = context.selection, context.replay, context.grading
  parts = dict(
    curriculum=selection.curriculum,
    lengths=selection.lengths,
    unfinished=buffers.unfinished,
    drafts=buffers.drafts,
    successes=buffers.reuse,
    collect=buffers.collector,
    aid=selection.hints,
    labels=grading.labels,
    failures=grading.failures,
    health=context.health,
  )
  return {name: part for name, part in parts.items() if part is not None}


def _host_state(context: RunContext) -> JsonObject:
  return {name: part.state_dict() for name, part in _stateful(context).items()}


def check_data(
  context: RunContext,
  directory: run_dir.RunDirectory,
  step: int,
  host: JsonObject,
  trains: bool = False,
) -> None:
  """Raises UserError where the data differ from those in the `host` state of a checkpoint.

  Held-out prompts count where the run `trains` on.
  """
  tables = context.tables
  if host['fingerprint'] != tables.train.fingerprint:
    raise UserError(
      f'the data of {directory.root} changed since step {step} (config.data); restore the files, or '
      'start another --workdir.'
    )
  held_out = tables.held_out.fingerprint
  if trains and host.get('held_out', held_out) != held_out:
    raise UserError(
      f'the held-out prompts of {directory.root} changed since step {step} (config.data.eval_path, '
      f'config.evaluation.prompts, config.evaluation.benchmark), '
      'so that evaluations before and after would not compare; restore them, or start another --workdir.'
    )

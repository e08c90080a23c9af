"""Flags with which a step fits that does not: settings are tried from the mildest on, and compiled."""

from __future__ import annotations

import re
from collections.abc import Sequence

import jax

from jaxrl_llm import step as steps
from jaxrl_llm.commands import compile_report
from jaxrl_llm.config.schema import Config, replace
from jaxrl_llm.learner import compile as programs
from jaxrl_llm.learner import device_memory
from jaxrl_llm.learner.step_spec import StepSpec
from jaxrl_llm.runner import memory
from jaxrl_llm.types import JsonObject, UserError

_GIB = 2**30
_USED = re.compile(r'Used ([\d.]+)([KMG]) of ([\d.]+)([KMG])')
_UNITS = dict(K=2**10, M=2**20, G=2**30)


def find(config: Config, devices: Sequence[jax.Device], parts: JsonObject) -> str:
  """One sentence: flags with which the update and sampling fit, each as compiled, and what the whole step needs then.

  `parts`: those of a report, with the compiler's message where one does not fit. '' where all of them fit.
  """
  changes = memory.Changes()
  for name in ('update', 'generate'):
    if not parts[name]['oom']:
      continue
    found = _first_that_fits(config, changes, devices, name, parts[name]['oom'])
    if found is None:
      return f'{name} fits with no smaller setting on these devices; --sweep compares meshes, and more devices help.'
    changes = found
  if not changes:
    if not parts['fused']['oom']:
      return ''
    return 'update and sampling fit one by one: type --config.mode=split.'
  spec = compile_report.make(replace(config, changes), devices)
  fused = compile_report.build(steps.compile_step(spec), *compile_report.arguments(spec))
  if fused.oom:
    return f'update and sampling fit one by one: type {memory.flags(changes)} --config.mode=split.'
  peak = (fused.peak_bytes + fused.code_bytes) / _GIB
  return f'it fits, with a peak of {peak:.2f} GiB, if you type {memory.flags(changes)}.'


def _first_that_fits(
  config: Config, fixed: memory.Changes, devices: Sequence[jax.Device], name: str, message: str
) -> memory.Changes | None:
  """The first of the settings with which program `name` compiles; those that cannot fit by estimate are left out."""
  config = replace(config, fixed)
  before = compile_report.make(config, devices)
  choices = dict(update=memory.smaller_updates, generate=memory.smaller_rollouts)[name]
  for changes in choices(config, before):
    try:
      spec = compile_report.make(replace(config, changes), devices)
    except UserError:  # it does not go with other settings
      continue
    if _too_large(name, before, spec, message):
      continue
    if not _build(name, spec).oom:
      return fixed | changes
  return None


def _too_large(name: str, before: StepSpec, after: StepSpec, message: str) -> bool:
  """Whether program `name` surely stays too large, by what it used before and what shrinks.

  In the update at most everything but the state shrinks, with the tokens of a microbatch; in sampling the caches do.
  """
  numbers = _USED.search(message)
  if numbers is None or after.layout.mesh.shape != before.layout.mesh.shape:
    return False
  used, limit = (float(numbers[i]) * _UNITS[numbers[i + 1]] for i in (1, 3))
  if name == 'generate':
    return used - 2 * (device_memory.ring_bytes(before) - device_memory.ring_bytes(after)) > limit
  if (
    after.update.attention is not before.update.attention
    or after.update.remat != before.update.remat
  ):
    return False
  state, others = device_memory.state_bytes(after), used - device_memory.state_bytes(before)
  share = after.update.packing.bins / before.update.packing.bins
  return state + others * share > limit


def _build(name: str, spec: StepSpec) -> compile_report.Part:
  state, batch, *inputs = compile_report.arguments(spec)
  if name == 'update':
    return compile_report.build(programs.compile_update(spec), state, batch)
  sampling = programs.compile_sample(spec)
  return compile_report.build(sampling, state._replace(carried=()), state.carried, *inputs)

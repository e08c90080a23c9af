"""Which layout of a slice is the fastest: compiles the candidates and compares what the programs say of themselves."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

from jaxrl_llm import models
from jaxrl_llm.checkpointing import safe_files
from jaxrl_llm.commands import compile_report
from jaxrl_llm.distributed import hardware, sharding
from jaxrl_llm.learner import compile as programs
from jaxrl_llm.learner import state as train_state
from jaxrl_llm.learner.step_spec import StepSpec
from jaxrl_llm.profiling import roofline
from jaxrl_llm.types import ModelConfig, UserError

_GIB = 2**30
_ASSUMED = (
  'Assumed: every rollout takes all of config.completion_tokens; memory, links and arithmetic run at the vendor’s '
  'figures; grading and choosing prompts cost nothing. What is real is slower; the order is what to trust.'
)


def run(config: Any, topology: str, report: str = '') -> int:
  """Compiles each candidate for `topology`, prints them from the fastest on, and writes them as JSON to `report`.

  Returns 0, or 1 where none fits. Raises UserError for bad input, also before anything is compiled. Source: none.
  """
  compile_report.prepare()
  devices, found = compile_report.devices(topology), []
  for mesh in layouts(models.read_config(config.model, scratch=config.scratch), len(devices)):
    found += tried(config, devices, mesh)
    print(line(found[-1]), flush=True)
  found.sort(key=lambda one: one.get('step_s', math.inf))
  if report:
    safe_files.write(
      report, json.dumps(dict(topology=topology, model=config.model, tried=found), indent=2)
    )
  print(table(found))
  return 0 if 'step_s' in found[0] else 1


def layouts(model: ModelConfig, devices: int) -> list[dict[str, int]]:
  """Meshes to try: heads cut over 1 … 8 neighbors, experts over 1 … 16, weights over 16, 64 or all of the others.

  What a tensor axis would cut into unequal parts is left out, and all that leaves devices idle. Source: none.
  """
  found = []
  for tensor in (1, 2, 4, 8):
    for expert in (1, 4, 8, 16) if model.experts else (1,):
      rest = devices // (tensor * expert)
      even = model.kv_heads % tensor == 0 and model.mlp % tensor == 0
      if not even or (model.experts or 0) % expert or rest * tensor * expert != devices:
        continue
      for fsdp in sorted({n for n in (16, 64, rest) if rest % n == 0}):
        found.append(dict(data=rest // fsdp, fsdp=fsdp, context=1, expert=expert, tensor=tensor))
  return found


def tried(config: Any, devices: Sequence[Any], mesh: dict[str, int]) -> list[dict[str, Any]]:
  """One layout, with the largest slices of the update that fit: fewer slices, fewer gathers of the weights."""
  config = config.copy_and_resolve_references()
  config.mesh.update(mesh)
  found: list[dict[str, Any]] = []
  try:
    for rows in slices(config, devices):
      config.learner.microbatch_rollouts = rows
      spec = compile_report.make(config, devices)
      found.append(measure(spec, found[0] if found else None))
      if 'step_s' in found[-1] or 'update' not in found[-1]:
        break  # it fits, or no slice is small enough
  except UserError as error:  # this batch cannot be cut so
    found.append(dict(mesh=mesh, oom=str(error)))
  return found


def slices(config: Any, devices: Sequence[Any]) -> Iterator[int]:
  """Rows of a slice of the update, from all of a minibatch down by halves to one for each part of the batch."""
  spec = compile_report.make(config, devices)
  parts = sharding.rows_shards(spec.layout.mesh, sharding.UPDATE_ROWS)
  rows = spec.layout.prompts * spec.layout.group // spec.update.minibatches
  count = 1
  while rows % count == 0 and rows // count >= parts:
    yield rows // count
    count *= 2


def measure(spec: StepSpec, before: dict[str, Any] | None = None) -> dict[str, Any]:
  """Compiles generation and update apart, and predicts the time of a step: that of one after the other.

  `before`: what was found with other slices of the update, whose generation is the same. A state that does not fit is
  not compiled. seconds = rollouts · completion tokens / (tokens/s) + update. Source: none.
  """
  device, rows = (
    spec.layout.mesh.devices.flat[0],
    spec.layout.prompts * spec.rollout.decode.rollouts,
  )
  told: dict[str, Any] = dict(
    mesh=dict(spec.layout.mesh.shape),
    rows=rows,
    slice_rows=spec.update.microbatch.prompts * spec.update.microbatch.rollouts,
    hbm_gib=hardware.HBM_GIB.get(device.device_kind),
    state_gib=roofline.bytes_per_device(train_state.abstract_state(spec)) / _GIB,
  )
  if told['hbm_gib'] and told['state_gib'] > told['hbm_gib']:
    return told | dict(oom='weights and optimizer alone do not')
  told |= {name: before[name] for name in ('generate', 'sampling') if before and name in before}
  state, batch, *asked = compile_report.arguments(spec)
  if 'generate' not in told:
    halved = state._replace(carried=()), state.carried
    part = compile_report.build(programs.compile_sample(spec), *halved, *asked)
    told['generate'] = _of(part)
    if not part.oom:
      loop = compile_report.decode_report(compile_report.loops(spec, part.text)[0])
      told['sampling'] = dict(
        tokens_per_s=(compile_report.roofline(spec, loop) or {}).get('tokens_per_s'),
        **{k: loop[k] for k in ('cache_bytes', 'copied_bytes', 'weight_collectives', 'wire_bytes')},
      )
  if told['generate']['oom']:
    return told | dict(oom='generation does not')
  part = compile_report.build(programs.compile_update(spec), state, batch)
  told['update'] = _of(part)
  if part.oom:
    return told | dict(oom=f'the update does not with slices of {told["slice_rows"]} rows')
  told['learn'] = compile_report.learn(spec, part.text)
  per_s, learn_s = told['sampling']['tokens_per_s'], told['learn'].get('best_s')
  if per_s and learn_s:
    told['step_s'] = rows * spec.rollout.decode.max_tokens / per_s + learn_s
  return told


def _of(part: compile_report.Part) -> dict[str, Any]:
  peak = (part.peak_bytes + part.code_bytes) / _GIB
  return dict(peak_gib=peak, compile_s=part.compile_s, oom=part.oom)


def line(one: dict[str, Any]) -> str:
  """A candidate in a line. Source: none."""
  if 'oom' in one:
    return f'{sharding.describe(one["mesh"]):32} does not fit: {one["oom"]}'
  peak = max(one['generate']['peak_gib'], one['update']['peak_gib'])
  count = math.prod(one['mesh'].values())
  if 'step_s' not in one:
    return f'{sharding.describe(one["mesh"]):32} fits: {peak:.2f} GiB; the speed of these devices is not known'
  return (
    f'{sharding.describe(one["mesh"]):32} {one["slice_rows"]:6} {peak:8.2f} '
    f'{one["sampling"]["tokens_per_s"] / count:12,.0f} {100 * one["learn"]["mfu"]:6.0f} {one["step_s"]:8.1f}'
  )


def table(found: list[dict[str, Any]]) -> str:
  """All of them, and what to set for the first. Source: none."""
  head = (
    f'{"mesh":32} {"slice":>6} {"peak GiB":>8} {"tokens/s/chip":>12} {"MFU %":>6} {"step s":>8}'
  )
  lines = ['', head, *(line(one) for one in found)]
  best = found[0]
  if 'step_s' in best:
    flags = [f'--config.mesh.{axis}={size}' for axis, size in best['mesh'].items() if size > 1]
    flags += [f'--config.learner.microbatch_rollouts={best["slice_rows"]}']
    lines += ['', 'fastest: ' + ' '.join(flags), _ASSUMED]
  return '\n'.join(lines)

"""The fastest mesh of a TPU slice: compiles the candidates and compares their predicted step times."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxrl_llm import models
from jaxrl_llm.checkpointing import safe_files
from jaxrl_llm.commands import compile_report
from jaxrl_llm.config.schema import Config, replace, typed
from jaxrl_llm.config.validation import ConfigLike
from jaxrl_llm.distributed import hardware, sharding, slices
from jaxrl_llm.learner import compile as programs
from jaxrl_llm.learner import device_memory
from jaxrl_llm.learner.step_spec import StepSpec, full_bins
from jaxrl_llm.profiling import lengths, step_estimate
from jaxrl_llm.runner.memory import layouts
from jaxrl_llm.types import JsonObject, UserError

_GIB = 2**30
_ASSUMPTIONS = (
  'Assumed: completions as long as --lengths=mean,sigma says, or all of config.completion_tokens; memory, links and '
  'arithmetic run at the vendor’s figures, with communication hidden or one after the other; grading and choosing '
  'prompts cost nothing. What is real is slower; the order is what to trust.'
)


def run(config: ConfigLike, topology: str, report: str = '', expected_lengths: str = '') -> int:
  """Compile each candidate for `topology`, print them from the fastest on, and write them as JSON to `report`.

  `expected_lengths`: of completions, as `lengths.parse` reads them.

  Returns 0, or 1 where none fits. Raises UserError for bad input before anything is compiled.
  """
  survival_T = lengths.parse(expected_lengths, config.completion_tokens)
  compile_report.prepare()
  config = typed(config)
  devices, candidates = compile_report.devices(topology), []
  chips = len(devices) // slices.count(devices, config.mesh.slices)
  for mesh in layouts(models.read_shape(config.model, scratch=config.scratch), chips):
    candidates += try_mesh(config, devices, mesh, survival_T)
    print(line(candidates[-1]), flush=True)
  candidates.sort(key=lambda candidate: candidate.get('step_s', math.inf))
  if report:
    summary = dict(topology=topology, model=config.model, tried=candidates)
    safe_files.write(report, json.dumps(summary, indent=2))
  print(table(candidates))
  return 0 if 'step_s' in candidates[0] else 1


def try_mesh(
  config: ConfigLike,
  devices: Sequence[Any],
  mesh: dict[str, int],
  survival_T: np.ndarray | None = None,
) -> list[JsonObject]:
  """Measure a mesh with the largest microbatch that fits: fewer passes gather the weights fewer times."""
  config = replace(typed(config), {f'mesh.{axis}': size for axis, size in mesh.items()})
  candidates: list[JsonObject] = []
  try:
    for tokens in microbatch_sizes(config, devices):
      resized = replace(config, {'learner.microbatch_tokens': tokens})
      spec = compile_report.make(resized, devices)
      candidates.append(measure(spec, candidates[0] if candidates else None, survival_T))
      if 'step_s' in candidates[-1] or 'update' not in candidates[-1]:
        break  # it fits, or no microbatch is small enough
  except UserError as error:  # the batch does not divide over this mesh
    candidates.append(dict(mesh=mesh, oom=str(error)))
  return candidates


def microbatch_sizes(config: Config, devices: Sequence[Any]) -> Iterator[int]:
  """Tokens of a microbatch on a device: from all of a full minibatch down by halves to those of one bin."""
  spec = compile_report.make(config, devices)
  bins = full_bins(spec)
  while bins:
    yield bins * spec.update.packing.tokens
    bins //= 2


def measure(
  spec: StepSpec, previous: JsonObject | None = None, survival_T: np.ndarray | None = None
) -> JsonObject:
  """Compile generation and update apart, and predict the time of a step, one after the other.

  `previous` is a measurement with another microbatch, whose generation is the same. A state that does not fit is not
  compiled. `step_s` and `serial_s`: a step with hidden communication, and one thing after the other.
  """
  device = spec.layout.mesh.devices.flat[0]
  rows = spec.layout.prompts * spec.rollout.decode.rollouts
  packing_spec = spec.update.packing
  result: JsonObject = dict(
    mesh=dict(spec.layout.mesh.shape),
    rows=rows,
    microbatch_tokens=packing_spec.bins * packing_spec.tokens,
    hbm_gib=hardware.HBM_GIB.get(device.device_kind),
    state_gib=device_memory.state_bytes(spec) / _GIB,
  )
  if result['hbm_gib'] and result['state_gib'] > result['hbm_gib']:
    return result | dict(oom='weights and optimizer alone do not')
  if previous:
    names = ('generate', 'sampling', 'roofline')
    result |= {name: previous[name] for name in names if name in previous}
  if 'generate' not in result:
    result |= _measure_generation(spec, survival_T)
  if result['generate']['oom']:
    return result | dict(oom='generation does not')
  state, batch, *_ = compile_report.arguments(spec)
  part = compile_report.build(programs.compile_update(spec), state, batch)
  result['update'] = _summary(part)
  if part.oom:
    return result | dict(
      oom=f'the update does not with microbatches of {result["microbatch_tokens"]} tokens'
    )
  result['learn'] = compile_report.update_report(spec, part.text, survival_T)
  step = step_estimate.estimate(spec, result['roofline'], result['learn'], survival_T)
  if step:
    result |= dict(step=step, step_s=step['overlapped_s'], serial_s=step['serial_s'])
  return result


def _measure_generation(spec: StepSpec, survival_T: np.ndarray | None) -> JsonObject:
  state, _, *inputs = compile_report.arguments(spec)
  part = compile_report.build(
    programs.compile_sample(spec), state._replace(carried=()), state.carried, *inputs
  )
  result: JsonObject = dict(generate=_summary(part))
  if not part.oom:
    loop = compile_report.decode_report(compile_report.loops(spec, part.text)[0])
    result['roofline'] = compile_report.roofline(spec, loop, survival_T)
    bound = result['roofline'] or {}
    names = ('cache_bytes', 'copied_bytes', 'weight_collectives', 'wire_bytes')
    result['sampling'] = dict(
      tokens_per_s=bound.get('tokens_per_s'), **{name: loop[name] for name in names}
    )
  return result


def _summary(part: compile_report.Part) -> JsonObject:
  peak = (part.peak_bytes + part.code_bytes) / _GIB
  return dict(peak_gib=peak, compile_s=part.compile_s, oom=part.oom)


def line(candidate: JsonObject) -> str:
  """A candidate as a line of text."""
  mesh = sharding.describe(candidate['mesh'])
  if 'oom' in candidate:
    return f'{mesh:32} does not fit: {candidate["oom"]}'
  peak = max(candidate['generate']['peak_gib'], candidate['update']['peak_gib'])
  if 'step_s' not in candidate:
    return f'{mesh:32} fits: {peak:.2f} GiB; the speed of these devices is not known'
  count = math.prod(candidate['mesh'].values())
  return (
    f'{mesh:32} {candidate["microbatch_tokens"]:6} {peak:8.2f} '
    f'{candidate["sampling"]["tokens_per_s"] / count:12,.0f} {100 * candidate["learn"]["mfu"]:6.0f} '
    f'{candidate["step_s"]:8.1f} {candidate["serial_s"]:8.1f}'
  )


def table(candidates: list[JsonObject]) -> str:
  """All candidates as lines of text, and the flags that select the first."""
  head = f'{"mesh":32} {"tokens":>6} {"peak GiB":>8} {"tokens/s/chip":>12} {"MFU %":>6} {"hidden s":>8} {"serial s":>8}'
  lines = ['', head, *map(line, candidates)]
  fastest = candidates[0]
  if 'step_s' in fastest:
    flags = [f'--config.mesh.{axis}={size}' for axis, size in fastest['mesh'].items() if size > 1]
    flags += [f'--config.learner.microbatch_tokens={fastest["microbatch_tokens"]}']
    lines += ['', 'fastest: ' + ' '.join(flags), _ASSUMPTIONS]
  return '\n'.join(lines)

"""Compiles the step for TPUs that nobody has at hand, and reports whether it fits and what a token costs."""

from __future__ import annotations

import importlib.metadata
import json
import os
import tempfile
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm import models
from jaxrl_llm import step as steps
from jaxrl_llm.checkpointing import safe_files
from jaxrl_llm.config import validation
from jaxrl_llm.distributed import hardware, sharding
from jaxrl_llm.learner import compile as programs
from jaxrl_llm.learner import empty_records
from jaxrl_llm.learner import state as train_state
from jaxrl_llm.learner.step_spec import StepSpec, check_objective, check_rows, make_spec
from jaxrl_llm.profiling import hlo_decode, hlo_update
from jaxrl_llm.profiling import roofline as roofline_lib
from jaxrl_llm.rollout import carried_kv, ring_decode, slot_loop
from jaxrl_llm.runner import validate
from jaxrl_llm.types import Batch, UserError

_GIB = 2**30
_TOPOLOGIES = 'v5e-16, v5e-256, v5p-128, v6e-64, v5e:4x4, v5p:4x4x4, tpu7x:2x2x1'
# libtpu looks for the machine that it runs on, and there is none.
_ENVIRONMENT = dict(
  JAX_PLATFORMS='cpu',
  TPU_SKIP_MDS_QUERY='1',
  ALLOW_MULTIPLE_LIBTPU_LOAD='1',
  TPU_WORKER_HOSTNAMES='localhost',
)


def run(config: Any, topology: str, report: str = '') -> int:
  """Compiles the step of `config` for `topology`, prints the report and writes it as JSON to `report`.

  Returns 0, or 1 where it does not fit or the decode loop copies its cache or exchanges weights.
  Raises UserError for bad input. Source: none.
  """
  prepare()
  spec = make(config, devices(topology))
  found = measure(spec) | dict(topology=topology, model=config.model)
  if report:
    safe_files.write(report, json.dumps(found, indent=2))
  print(table(found))
  return 1 if found['problems'] else 0


def prepare() -> None:
  """Sets what libtpu needs in order to compile without a TPU; call it before jax is first used.

  Source: none.
  """
  os.environ.update(_ENVIRONMENT)
  jax.config.update('jax_platforms', 'cpu')


def devices(topology: str) -> list:
  """The devices of a topology such as 'v5e-16' or 'v5e:4x4': real enough to compile for.

  Raises UserError without libtpu, and for a topology that it does not know. Source: none.
  """
  from jax.experimental import topologies

  try:
    importlib.metadata.version('libtpu')
  except importlib.metadata.PackageNotFoundError as error:
    raise UserError(
      "--mode=compile needs libtpu, the TPU's compiler: pip install 'jaxrl_llm[aot]'."
    ) from error
  try:
    found = topologies.get_topology_desc(platform='tpu', topology_name=hardware.topology(topology))
  except Exception as error:  # the plugin raises its own
    raise UserError(
      f'--topology={topology!r} is unknown ({_first_line(error)}); give one such as: {_TOPOLOGIES}.'
    ) from error
  return list(found.devices)


def make(config: Any, devices: Sequence[Any]) -> StepSpec:
  """The program of `config` on these devices; the model's weights are not read. Source: none.

  One end token stands for the model's own: their number changes neither memory nor exchanges.
  """
  config = validation.sized(config, devices)
  validate.validate(config)
  check_objective(config)
  mesh = sharding.make_mesh(config.mesh, list(devices))
  check_rows(config, mesh)
  model = models.read_config(config.model, scratch=config.scratch)
  teacher = config.objective.teacher
  teacher = models.read_config(teacher, scratch=config.scratch) if teacher else None
  return make_spec(config, model, (0,), mesh, teacher=teacher)


def arguments(spec: StepSpec) -> tuple:
  """What `steps.compile_step` takes, as shapes with their shardings: nothing is allocated.

  Source: none.
  """
  place = lambda tree, sharding: jax.tree.map(  # noqa: E731
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
  )
  rows, whole = sharding.rows(spec.layout.mesh), sharding.replicated(spec.layout.mesh)
  batch: Batch = place(jax.eval_shape(lambda: empty_records.empty_batch(spec)), rows)
  sampled = place(jax.eval_shape(lambda: empty_records.empty_rollout(spec)), rows)
  begun = sampled._replace(turns=None) if spec.rollout.continues else None
  draft = sampled if spec.rollout.drafts.verify else None
  cap = jax.ShapeDtypeStruct((), np.int32, sharding=whole)
  return train_state.abstract_state(spec), batch, batch.prompts, begun, draft, cap


class Part(NamedTuple):
  """One compiled program: sizes per device, and the optimized program as text."""

  argument_bytes: int
  alias_bytes: int  # of arguments that results are written over
  temp_bytes: int
  code_bytes: int
  peak_bytes: int  # arguments, results and temporaries at the worst moment, without the code
  compile_s: float
  compile_cpu_s: float
  oom: str  # what the compiler says where it does not fit; '' where it does
  text: str


def parts(spec: StepSpec) -> dict[str, Part]:
  """The update alone, generation alone, and both fused as training runs them. Source: none."""
  state, batch, *asked = arguments(spec)
  halved = state._replace(carried=()), state.carried
  return {
    'update': build(programs.compile_update(spec), state, batch),
    'generate': build(programs.compile_sample(spec), *halved, *asked),
    'fused': build(steps.compile_step(spec), state, batch, *asked),
  }


def build(fn: Any, *arguments: Any) -> Part:
  """Compiles one jit for the devices its arguments name. Source: none."""
  lowered = fn.lower(*arguments)
  with tempfile.TemporaryDirectory() as folder:
    # A dump, because `as_text` fails on some targets.
    options = dict(xla_dump_to=folder, xla_dump_hlo_as_text=True)
    began, cpu = time.perf_counter(), time.process_time()
    try:
      memory = lowered.compile(compiler_options=options).memory_analysis()
      oom = ''
    except jax.errors.JaxRuntimeError as error:
      if 'RESOURCE_EXHAUSTED' not in str(error):
        raise
      memory, oom = None, _first_line(error)
    took, used = time.perf_counter() - began, time.process_time() - cpu
    text = '' if oom else _dumped(folder)
  size = lambda name: int(getattr(memory, f'{name}_in_bytes', 0))  # noqa: E731
  names = ('argument_size', 'alias_size', 'temp_size', 'generated_code_size', 'peak_memory')
  return Part(*map(size, names), took, used, oom, text)


def _dumped(folder: str) -> str:
  """The largest optimized program of a dump: the smaller ones are helpers of it."""
  names = [n for n in os.listdir(folder) if n.endswith('.after_optimizations.txt')]
  path = max((os.path.join(folder, n) for n in names), key=os.path.getsize)
  return safe_files.read(path).decode(errors='replace')


def loops(spec: StepSpec, text: str) -> list[hlo_decode.Loop]:
  """The decode loops of a compiled program. Source: none."""
  decode, shards = spec.rollout.decode, sharding.rows_shards(spec.layout.mesh)
  rows = (decode.slots or spec.layout.prompts * decode.rollouts) // shards
  widths = {
    w
    for width in ring_decode.widths(decode)
    for w in slot_loop.ring_widths(spec.model.config, width)
  }
  cache = [
    (rows, spec.model.config.kv_heads, width, spec.model.config.head_dim) for width in widths
  ]
  return hlo_decode.decode_loops(text, f'{ring_decode.LOOP_SCOPE}/', cache)


def measure(spec: StepSpec) -> dict[str, Any]:
  """Compiles the parts of `program` and reads them: the report, ready for JSON. Source: none."""
  found = parts(spec)
  device = spec.layout.mesh.devices.flat[0]
  compiled = found['fused'] if not found['fused'].oom else found['generate']
  decode = [decode_report(loop) for loop in loops(spec, compiled.text)]
  limit = hardware.HBM_GIB.get(device.device_kind)
  report = dict(
    device_kind=device.device_kind,
    devices=spec.layout.mesh.size,
    mesh=dict(spec.layout.mesh.shape),
    dtype=spec.model.dtype,
    versions={n: importlib.metadata.version(n) for n in ('jax', 'libtpu')},
    parameters=sum(x.size for x in jax.tree.leaves(train_state.abstract_sampling_weights(spec))),
    state_bytes=roofline_lib.bytes_per_device(train_state.abstract_state(spec)),
    hbm_gib=limit,
    fits=not found['fused'].oom,
    headroom_gib=_headroom(found['fused'], limit),
    parts={n: {k: v for k, v in p._asdict().items() if k != 'text'} for n, p in found.items()},
    compile_s=sum(p.compile_s for p in found.values()),
    decode=decode,
    roofline=roofline(spec, decode[0]) if decode else None,
    learn=None if found['update'].oom else learn(spec, found['update'].text),
  )
  return report | dict(problems=problems(report))


def _headroom(part: Part, limit: float | None) -> float | None:
  """What is left in GiB; the code lies in the same memory."""
  if part.oom or limit is None:
    return None
  return limit - (part.peak_bytes + part.code_bytes) / _GIB


def decode_report(loop: hlo_decode.Loop) -> dict[str, Any]:
  """What one token of every row costs on one device, besides computing. Source: none."""
  kinds: dict[tuple, dict[str, Any]] = {}
  for c in loop.collectives:
    kind = kinds.setdefault(
      (c.opcode, c.bytes, c.fixed),
      dict(opcode=c.opcode, bytes=c.bytes, fixed=c.fixed, count=0, wire_bytes=0, source=c.source),
    )
    kind['count'] += c.times
    kind['wire_bytes'] += c.wire_bytes * c.times
  fixed = [c for c in loop.collectives if c.fixed]
  # A carried row is copied into its slot once, in a branch that other rounds do not take.
  copies = [c for c in loop.copies if f'{carried_kv.LOAD_SCOPE}/' not in c.source]
  return dict(
    cache_bytes=sum(a.bytes for a in loop.cache),
    cache_shape=loop.cache[0].dims if loop.cache else (),
    copies=[c._asdict() for c in copies],
    copied_bytes=sum(c.bytes * c.times for c in copies),
    weight_collectives=sum(c.times for c in fixed),
    weight_collective_bytes=sum(c.bytes * c.times for c in fixed),
    collectives=sorted(kinds.values(), key=lambda k: -k['wire_bytes']),
    wire_bytes=sum(c.wire_bytes * c.times for c in loop.collectives),
  )


def roofline(spec: StepSpec, decode: dict[str, Any]) -> dict[str, Any] | None:
  """Tokens/s at best: rows / (max(bytes / bandwidth, flops / peak) + wire bytes / link bandwidth).

  Operations are two for each weight that a token goes through, of experts those that it chooses. Bytes are weights
  as stored and laid out for decoding, the whole ring, and the prompts' cache; exchanges wait for the products before
  them, so that their time adds; latency is left out. None for a device whose figures are not known. Source: none.
  """
  chip = hardware.CHIPS.get(spec.layout.mesh.devices.flat[0].device_kind)
  if chip is None or not decode['cache_shape']:
    return None
  each = roofline_lib.decode(spec, decode['cache_bytes'])
  seconds = {
    'weights': each.weight_bytes / chip.memory_bandwidth,
    'cache': (each.cache_bytes + each.prompt_cache_bytes) / chip.memory_bandwidth,
    'links': decode['wire_bytes'] / chip.link_bandwidth,
    'compute': each.flops / chip.flops,
  }
  total = max(seconds['weights'] + seconds['cache'], seconds['compute']) + seconds['links']
  return dict(
    tokens_per_s=each.rows / total,
    bound=max(seconds, key=seconds.get),
    ms_per_token={k: 1e3 * v for k, v in seconds.items()},
    rows=each.rows,
    weight_bytes=each.weight_bytes,
    prompt_cache_bytes=each.prompt_cache_bytes,
    chip=chip._asdict(),
  )


def learn(spec: StepSpec, text: str) -> dict[str, Any]:
  """`update_cost.report` of a compiled update. Source: none."""
  return hlo_update.report(
    spec, text, hardware.CHIPS.get(spec.layout.mesh.devices.flat[0].device_kind)
  )


def problems(report: dict[str, Any]) -> list[str]:
  """What is wrong with a compiled step, one sentence each. Source: none."""
  found = [f'{n} does not fit: {p["oom"]}' for n, p in report['parts'].items() if p['oom']]
  fused = report['parts']['fused']
  if not fused['oom'] and fused['alias_bytes'] < report['state_bytes']:
    found.append(
      f'only {fused["alias_bytes"]:,} bytes are written in place, of a state of {report["state_bytes"]:,}.'
    )
  if not report['decode'] and not (fused['oom'] and report['parts']['generate']['oom']):
    found.append('no decode loop was found in the compiled program: nothing is known about it.')
  for loop in report['decode']:
    if not loop['cache_shape']:
      found.append('the decode loop carries no keys and values of the expected shape.')
    if loop['copied_bytes']:
      found.append(
        f'{len(loop["copies"])} copies of keys and values, {loop["copied_bytes"]:,.0f} bytes a token.'
      )
    if loop['weight_collectives']:
      found.append(
        f'{loop["weight_collectives"]} exchanges of what does not change, weights most likely, '
        f'{loop["weight_collective_bytes"]:,.0f} bytes a token.'
      )
  return found


def _first_line(error: Exception) -> str:
  return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def table(report: dict[str, Any]) -> str:
  """The report as text. Source: none."""
  mesh = sharding.describe(report['mesh'])
  lines = [
    f'{report["model"]}, {report["parameters"] / 1e9:.2f}e9 parameters, {report["dtype"]}, on '
    f'{report["topology"]} ({report["devices"]} × {report["device_kind"]}; {mesh})',
    '',
    f'{"per device":10} {"arguments":>10} {"in place":>10} {"temporary":>10} {"code":>10} {"peak GiB":>10} '
    f'{"compile s":>10} {"CPU s":>8}',
  ]
  for name, part in report['parts'].items():
    if part['oom']:
      lines.append(f'{name:10} does not fit')
      continue
    sizes = ('argument_bytes', 'alias_bytes', 'temp_bytes', 'code_bytes', 'peak_bytes')
    cells = ' '.join(f'{part[k] / _GIB:10.3f}' for k in sizes)
    lines.append(f'{name:10} {cells} {part["compile_s"]:10.1f} {part["compile_cpu_s"]:8.1f}')
  if report['fits'] and report['hbm_gib']:
    lines.append(
      f'fits: {report["headroom_gib"]:.2f} of {report["hbm_gib"]} GiB are left; compiled in '
      f'{report["compile_s"]:.0f} s together'
    )
  lines += [line for loop in report['decode'] for line in _decode_lines(loop)]
  lines += _roofline_lines(report['roofline']) if report['roofline'] else []
  lines += hlo_update.report_lines(report['learn']) if report['learn'] else []
  return '\n'.join(lines + [''] + [f'PROBLEM: {p}' for p in report['problems']]).rstrip()


def _decode_lines(loop: dict[str, Any]) -> list[str]:
  lines = [
    '',
    f'per token: {loop["copied_bytes"]:,.0f} bytes of keys and values copied, '
    f'{loop["weight_collectives"]} exchanges of weights, {loop["wire_bytes"] / 1e6:.3f} MB over links',
  ]
  return lines + [
    f'  {c["count"]:5} × {c["opcode"]:18} {c["bytes"] / 1e6:10.4f} MB each  {c["source"][-60:]}'
    for c in loop['collectives']
  ]


def _roofline_lines(roof: dict[str, Any]) -> list[str]:
  parts = ', '.join(f'{k} {v:.3f}' for k, v in roof['ms_per_token'].items())
  return [
    f'at best {roof["tokens_per_s"]:,.0f} tokens/s with {roof["rows"]} rows, bound by {roof["bound"]} '
    f'(ms per token of every row: {parts})'
  ]

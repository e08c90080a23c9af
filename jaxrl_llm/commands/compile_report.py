"""Ahead-of-time compilation for TPU slices: memory per device, and the cost of a decoded token."""

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
from jaxrl_llm.commands import compile_table
from jaxrl_llm.config import extras, validation
from jaxrl_llm.config.validation import ConfigLike
from jaxrl_llm.distributed import hardware, sharding
from jaxrl_llm.learner import compile as programs
from jaxrl_llm.learner import device_memory, empty_records
from jaxrl_llm.learner import state as train_state
from jaxrl_llm.learner.spec_from_config import check_objective, check_rows, make_spec
from jaxrl_llm.learner.step_spec import StepSpec
from jaxrl_llm.models import decoder
from jaxrl_llm.profiling import hlo_decode, hlo_update, lengths, step_estimate
from jaxrl_llm.profiling import roofline as roofline_lib
from jaxrl_llm.rollout import carried_kv, ring_decode, slot_loop
from jaxrl_llm.runner import memory, validate
from jaxrl_llm.types import Batch, JsonObject, UserError

_GIB = 2**30
# A compiler may update a layer's ring in fast memory and write it back: up to this share of the cache is no problem.
_COPIED_SHARE = 0.05
_TOPOLOGIES = 'v5e-16, 2xv5e-16, v5e-1, v5e-256, v5p-128, v6e-64, v5e:4x4, v5p:4x4x4, tpu7x:2x2x1'
# Without these, libtpu searches for a TPU machine.
_ENVIRONMENT = dict(
  JAX_PLATFORMS='cpu',
  TPU_SKIP_MDS_QUERY='1',
  ALLOW_MULTIPLE_LIBTPU_LOAD='1',
  TPU_WORKER_HOSTNAMES='localhost',
)


def run(config: ConfigLike, topology: str, report: str = '', expected_lengths: str = '') -> int:
  """Compile the step of `config` for `topology`, print the report and write it as JSON to the file `report`.

  `expected_lengths`: of completions, as `lengths.parse` reads them.

  Returns 0, or 1 where it does not fit or the decode loop copies its cache or exchanges weights. The table always says
  how many bytes are copied.
  Raises UserError for bad input.
  """
  survival_T = lengths.parse(expected_lengths, config.completion_tokens)
  prepare()
  chips = devices(topology)
  spec = make(config, chips)
  sized = validation.sized(config, chips)
  memory.check_state(sized, spec)
  measured = measure(spec, survival_T) | dict(topology=topology, model=config.model)
  if not measured['fits']:
    from jaxrl_llm.commands import fitting_flags  # it compiles with this module

    measured['problems'].append(fitting_flags.find(sized, chips, measured['parts']))
  if report:
    safe_files.write(report, json.dumps(measured, indent=2))
  print(compile_table.table(measured))
  return 1 if measured['problems'] else 0


def prepare() -> None:
  """Set what libtpu needs to compile without a TPU. Call it before jax is first used."""
  os.environ.update(_ENVIRONMENT)
  jax.config.update('jax_platforms', 'cpu')


def devices(topology: str) -> list[Any]:
  """The devices of a topology such as 'v5e-16' or 'v5e:4x4', to compile for.

  Raises UserError without libtpu, and for an unknown topology.
  """
  from jax.experimental import topologies

  if ':' not in hardware.topology(topology):
    raise UserError(f'--topology={topology!r} is unknown; give one such as: {_TOPOLOGIES}.')
  try:
    importlib.metadata.version('libtpu')
  except importlib.metadata.PackageNotFoundError as error:
    raise UserError(
      f"--mode=compile needs libtpu, the TPU's compiler: {extras.install('aot')}."
    ) from error
  try:
    description = topologies.get_topology_desc(
      platform='tpu',
      topology_name=hardware.topology(topology),
      **hardware.topology_options(topology),
    )
  except Exception as error:  # the plugin has exceptions of its own
    raise UserError(
      f'--topology={topology!r} is unknown ({_first_line(error)}); give one such as: {_TOPOLOGIES}.'
    ) from error
  return list(description.devices)


def make(config: ConfigLike, devices: Sequence[jax.Device]) -> StepSpec:
  """The step specification of `config` on these devices; no weights are read.

  One end token stands for the model's own: their number changes neither memory nor collectives.
  """
  config = validation.sized(config, devices)
  validate.validate(config)
  check_objective(config)
  mesh = sharding.make_mesh(config.mesh.to_dict(), list(devices))
  check_rows(config, mesh)
  model = models.read_shape(config.model, scratch=config.scratch)
  teacher = config.objective.teacher
  teacher = models.read_shape(teacher, scratch=config.scratch) if teacher else None
  return make_spec(config, model, (0,), mesh, teacher=teacher)


def arguments(spec: StepSpec) -> tuple[Any, ...]:
  """The arguments of the compiled step, as shapes with shardings; nothing is allocated."""
  place = lambda tree, sharding: jax.tree.map(  # noqa: E731
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
  )
  rows, replicated = sharding.rows(spec.layout.mesh), sharding.replicated(spec.layout.mesh)
  batch: Batch = place(jax.eval_shape(lambda: empty_records.empty_batch(spec)), rows)
  sampled = place(jax.eval_shape(lambda: empty_records.empty_rollout(spec)), rows)
  begun = sampled._replace(turns=None) if spec.rollout.continues else None
  draft = sampled if spec.rollout.drafts.verify else None
  cap = jax.ShapeDtypeStruct((), np.int32, sharding=replicated)
  empty = jax.eval_shape(lambda: empty_records.empty_prompts(spec, spec.layout.prompts))
  return train_state.abstract_state(spec), batch, place(empty, rows), begun, draft, cap


class Part(NamedTuple):
  """One compiled program: sizes per device, and the optimized program as text."""

  argument_bytes: int
  alias_bytes: int  # of arguments that results are written over
  temp_bytes: int
  code_bytes: int
  peak_bytes: int  # arguments, results and temporaries at the worst moment, without the code
  compile_s: float
  compile_cpu_s: float
  oom: str  # the compiler's message where the program does not fit; '' where it does
  text: str


def parts(spec: StepSpec) -> dict[str, Part]:
  """The update alone, generation alone, and both fused as training runs them."""
  state, batch, *inputs = arguments(spec)
  split_state = state._replace(carried=()), state.carried
  return {
    'update': build(programs.compile_update(spec), state, batch),
    'generate': build(programs.compile_sample(spec), *split_state, *inputs),
    'fused': build(steps.compile_step(spec), state, batch, *inputs),
  }


def build(fn: Any, *arguments: Any) -> Part:
  """Compile a jitted function for the devices of its arguments."""
  lowered = fn.lower(*arguments)
  with tempfile.TemporaryDirectory() as folder:
    # A dump, because `as_text` fails on some targets.
    options = dict(xla_dump_to=folder, xla_dump_hlo_as_text=True)
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    try:
      memory = lowered.compile(compiler_options=options).memory_analysis()
      oom = ''
    except jax.errors.JaxRuntimeError as error:
      if 'RESOURCE_EXHAUSTED' not in str(error):
        raise
      memory, oom = None, _first_line(error)
    wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    text = '' if oom else _dumped(folder)
  size = lambda name: int(getattr(memory, f'{name}_in_bytes', 0))  # noqa: E731
  names = ('argument_size', 'alias_size', 'temp_size', 'generated_code_size', 'peak_memory')
  argument, alias, temp, code, peak = map(size, names)
  return Part(argument, alias, temp, code, peak, wall_s, cpu_s, oom, text)


def _dumped(folder: str) -> str:
  """The largest optimized program of a dump; the smaller ones are its helpers."""
  names = [n for n in os.listdir(folder) if n.endswith('.after_optimizations.txt')]
  path = max((os.path.join(folder, n) for n in names), key=os.path.getsize)
  return safe_files.read(path).decode(errors='replace')


def loops(spec: StepSpec, text: str) -> list[hlo_decode.Loop]:
  """The decode loops of a compiled program."""
  decode, shards = spec.rollout.decode, sharding.rows_shards(spec.layout.mesh)
  rows = (decode.slots or spec.layout.prompts * decode.rollouts) // shards
  widths = {
    w
    for width in ring_decode.widths(decode)
    for w in slot_loop.ring_widths(spec.model.config, width)
  }
  sizes = dict.fromkeys(s for sizes in decoder.cached_sizes(spec.model.config) for s in sizes)
  # The loop goes on with fewer slots once these suffice, each time with a cache of its own.
  fewer = ring_decode.fewer_slots(decode, spec.layout.prompt_tokens, rows)
  counts = [rows, *(() if spec.rollout.carried_calls else fewer)]
  cache = [(n, K, width, d) for n in counts for K, d in sizes for width in widths]
  numbers = _numbers_of_a_row(spec, {*widths, spec.layout.prompt_tokens})
  return hlo_decode.decode_loops(
    text,
    f'{ring_decode.LOOP_SCOPE}/',
    cache,
    hlo_update.slice_size(spec),
    others=[n * size for n in counts for size in numbers],
  )


def _numbers_of_a_row(spec: StepSpec, attended: set[int]) -> set[int]:
  """Sizes of a row's arrays besides keys and values: logits, and scores of all heads with `attended` tokens."""
  model, parts = (
    spec.model.config,
    sharding.rows_shards(spec.layout.mesh, sharding.SAMPLED_FEATURES),
  )
  heads = {model.heads, model.heads // parts}  # not all meshes divide them
  return {-(-model.vocab // parts)} | {n * tokens for n in heads for tokens in attended}


def measure(spec: StepSpec, survival_T: np.ndarray | None = None) -> JsonObject:
  """Compile the programs of a step and read them: the report, ready for JSON.

  `survival_T`: expected lengths of completions, as in `lengths`; default: all tokens.
  """
  compiled_parts = parts(spec)
  device = spec.layout.mesh.devices.flat[0]
  fused, update = compiled_parts['fused'], compiled_parts['update']
  sampling = compiled_parts['generate'] if fused.oom else fused
  decode = [decode_report(loop) for loop in loops(spec, sampling.text)]
  limit = hardware.HBM_GIB.get(device.device_kind)
  report = dict(
    device_kind=device.device_kind,
    devices=spec.layout.mesh.size,
    mesh=dict(spec.layout.mesh.shape),
    slices=spec.layout.slices,
    dtype=spec.model.dtype,
    versions={n: importlib.metadata.version(n) for n in ('jax', 'libtpu')},
    parameters=sum(x.size for x in jax.tree.leaves(train_state.abstract_sampling_weights(spec))),
    state_bytes=device_memory.state_bytes(spec),
    hbm_gib=limit,
    fits=not fused.oom,
    headroom_gib=_headroom(fused, limit),
    parts={name: _sizes(part) for name, part in compiled_parts.items()},
    compile_s=sum(part.compile_s for part in compiled_parts.values()),
    decode=decode,
    roofline=roofline(spec, decode[0], survival_T) if decode else None,
    learn=None if update.oom else update_report(spec, update.text, survival_T),
  )
  report['step'] = step_estimate.estimate(spec, report['roofline'], report['learn'], survival_T)
  return report | dict(problems=problems(report))


def _sizes(part: Part) -> JsonObject:
  return {name: value for name, value in part._asdict().items() if name != 'text'}


def _headroom(part: Part, limit: float | None) -> float | None:
  """Free memory in GiB; the code occupies the same memory."""
  if part.oom or limit is None:
    return None
  return limit - (part.peak_bytes + part.code_bytes) / _GIB


def decode_report(loop: hlo_decode.Loop) -> JsonObject:
  """Copies and collectives for one token of every row, on one device."""
  kinds: dict[tuple, JsonObject] = {}
  for c in loop.collectives:
    kind = kinds.setdefault(
      (c.opcode, c.bytes, c.fixed),
      dict(
        opcode=c.opcode,
        bytes=c.bytes,
        fixed=c.fixed,
        count=0,
        wire_bytes=0,
        dcn_bytes=0,
        source=c.source,
      ),
    )
    kind['count'] += c.times
    kind['wire_bytes'] += (c.wire_bytes - c.dcn_bytes) * c.times
    kind['dcn_bytes'] += c.dcn_bytes * c.times
  fixed = [c for c in loop.collectives if c.fixed]
  # A carried row is copied into its slot once, in a branch that other iterations do not take.
  copies = [c for c in loop.copies if f'{carried_kv.LOAD_SCOPE}/' not in c.source]
  return dict(
    cache_bytes=sum(a.bytes for a in loop.cache),
    cache_shape=loop.cache[0].dims if loop.cache else (),
    copies=[c._asdict() for c in copies],
    copied_bytes=sum(c.bytes * c.times for c in copies),
    weight_collectives=sum(c.times for c in fixed),
    weight_collective_bytes=sum(c.bytes * c.times for c in fixed),
    collectives=sorted(kinds.values(), key=lambda k: -k['wire_bytes']),
    wire_bytes=sum((c.wire_bytes - c.dcn_bytes) * c.times for c in loop.collectives),
    dcn_bytes=sum(c.dcn_bytes * c.times for c in loop.collectives),
    dcn_collectives=sum(c.times for c in loop.collectives if c.dcn_bytes),
  )


def roofline(
  spec: StepSpec, decode: JsonObject, survival_T: np.ndarray | None = None
) -> JsonObject | None:
  """An upper bound of tokens/s: rows / (max(bytes / bandwidth, flops / peak) + wire bytes / link bandwidth).

  Flops are two for each weight that a token uses, of experts those of its top k, and those of attention. Bytes are
  weights as stored and sharded for decoding, the share of the ring that is read at the expected lengths `survival_T`
  (default: all tokens), and the prompts' cache. Collectives wait for the products before them, so their time adds;
  latency is left out. `overlapped_tokens_per_s` lets them overlap fully.
  None for a device of unknown speed.
  """
  kind = spec.layout.mesh.devices.flat[0].device_kind
  chip = hardware.CHIPS.get(kind)
  if chip is None or not decode['cache_shape']:
    return None
  each = roofline_lib.decode(spec, decode['cache_bytes'])
  if survival_T is None:
    survival_T = lengths.at_cap(spec.rollout.decode.max_tokens)
  ring_share = step_estimate.ring_share(spec, survival_T)
  seconds = {
    'weights': each.weight_bytes / chip.memory_bandwidth,
    'cache': (ring_share * each.cache_bytes + each.prompt_cache_bytes) / chip.memory_bandwidth,
    'links': decode['wire_bytes'] / chip.link_bandwidth,
    'compute': each.flops / chip.flops,
  }
  if decode.get('dcn_bytes'):
    seconds['dcn'] = hardware.dcn_seconds(kind, decode['dcn_bytes']) or 0.0
  serial_s, overlapped_s = step_estimate.iteration_seconds(seconds)
  return dict(
    tokens_per_s=each.rows / serial_s,
    overlapped_tokens_per_s=each.rows / overlapped_s,
    bound=max(seconds, key=lambda name: seconds[name]),
    ms_per_token={k: 1e3 * v for k, v in seconds.items()},
    rows=each.rows,
    ring_share=ring_share,
    weight_bytes=each.weight_bytes,
    prompt_cache_bytes=each.prompt_cache_bytes,
    chip=chip._asdict(),
  )


def update_report(spec: StepSpec, text: str, survival_T: np.ndarray | None = None) -> JsonObject:
  """The `hlo_update.report` of a compiled update."""
  chip = hardware.CHIPS.get(spec.layout.mesh.devices.flat[0].device_kind)
  return hlo_update.report(spec, text, chip, survival_T)


def problems(report: JsonObject) -> list[str]:
  """The problems of a compiled step, one sentence each."""
  messages = [f'{n} does not fit: {p["oom"]}' for n, p in report['parts'].items() if p['oom']]
  fused = report['parts']['fused']
  if not fused['oom'] and fused['alias_bytes'] < report['state_bytes']:
    messages.append(
      f'only {fused["alias_bytes"]:,} bytes are written in place, of a state of {report["state_bytes"]:,}.'
    )
  if not report['decode'] and not (fused['oom'] and report['parts']['generate']['oom']):
    messages.append('no decode loop was found in the compiled program: nothing is known about it.')
  for loop in report['decode']:
    if not loop['cache_shape']:
      messages.append('the decode loop carries no keys and values of the expected shape.')
    if loop['copied_bytes'] > _COPIED_SHARE * loop['cache_bytes']:
      messages.append(
        f'{len(loop["copies"])} copies of keys and values, {loop["copied_bytes"]:,.0f} bytes a token.'
      )
    if loop['weight_collectives']:
      messages.append(
        f'{loop["weight_collectives"]} exchanges of what does not change, weights most likely, '
        f'{loop["weight_collective_bytes"]:,.0f} bytes a token.'
      )
  return messages


def _first_line(error: Exception) -> str:
  return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__

"""Device time from a trace (config.monitoring.profile.steps), by part of the step and kind of operation."""

from __future__ import annotations

import collections
import os
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax

from jaxrl_llm.checkpointing import safe_files
from jaxrl_llm.types import JsonObject

PARTS = ('update', 'generate')  # jax.named_scope of the two halves of a step; the rest is 'other'
# Named scopes that are kinds of their own, whatever operation they contain.
_SCOPES = ('attention', 'head', 'sampling', 'optimizer')
_COLLECTIVES = re.compile(
  r'(all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute|collective-broadcast|nccl)',
  re.IGNORECASE,
)
_PRODUCTS = re.compile(r'(dot|convolution|gemm|matmul|cublas|cudnn|onednn)', re.IGNORECASE)
_COPIES = re.compile(
  r'(copy|memcpy|memset|transpose|bitcast|reshape|slice|concatenate|pad|gather|scatter)',
  re.IGNORECASE,
)
# They contain other operations, which have events of their own.
_CONTAINERS = re.compile(r'(while|conditional|call|async)(\.\d+)?$')
_OPS = 'XLA Ops'  # a TPU's line of operations; its other lines repeat the same time
_TOP_COUNT = 12  # operations listed one by one


class Op(NamedTuple):
  """An instruction of a compiled program."""

  opcode: str
  source: str  # XLA's op_name: named scopes with slashes
  product: bool  # a matrix product, alone or in a fusion


# The instructions of a program by name.
_Ops = dict[str, Op]


class Event(NamedTuple):
  """An interval of one operation on one thread or stream of a device, in nanoseconds."""

  device: str
  line: str
  start: float
  end: float
  op: str
  # The name and number of the program. A program from the compilation cache has another number than its text.
  program: tuple[str, int]
  source: str  # the op_name in the event itself, else ''


# (start, end, index of the event), of one line.
_Interval = tuple[float, float, int]


def newest(folder: str) -> list[str]:
  """The .xplane.pb files of the last trace under `folder`, one per process; [] without a trace."""
  root = os.path.join(folder, 'plugins', 'profile')
  for run in sorted(os.listdir(root) if os.path.isdir(root) else (), reverse=True):
    names = sorted(os.listdir(os.path.join(root, run)))
    if paths := [os.path.join(root, run, n) for n in names if n.endswith('.xplane.pb')]:
      return paths
  return []


def read(paths: list[str]) -> JsonObject | None:
  """Seconds that a device spent, over the whole trace; None without a traced operation.

  parts: part → kind → seconds of operations, averaged over devices, without the time of operations inside another one.
  busy: part → seconds with an operation running ('all': any part). op_s: Σ parts. span_s: from the start of the first
  operation to the end of the last. devices: their number. top: the longest operations, as
  [name, kind, part, seconds, times].
  """
  events, programs = [], {}
  for number, path in enumerate(paths):
    data = safe_files.read(path)
    file_events = list(_events(data))
    compiled = _programs(data)
    for key in {event.program for event in file_events}:
      names = {e.op for e in file_events if e.program == key}
      programs[number, key] = _match_program(compiled, key, names)
    events += [(number, event) for event in file_events]
  if not events:
    return None
  return _summarize(events, programs)


def _summarize(
  events: list[tuple[int, Event]], programs: dict[tuple[int, tuple[str, int]], _Ops]
) -> JsonObject:
  lines: dict[tuple, list[_Interval]] = collections.defaultdict(list)
  for index, (number, event) in enumerate(events):
    lines[number, event.device, event.line].append((event.start, event.end, index))
  devices = {key[:2] for key in lines}
  parts: dict[str, dict[str, float]] = {part: {} for part in (*PARTS, 'other')}
  totals: dict[tuple, list[float]] = collections.defaultdict(lambda: [0.0, 0])
  intervals: dict[tuple, list[tuple[float, float]]] = collections.defaultdict(list)
  for (number, device, _), line in lines.items():
    for index, self_ns in _self_times(line):
      event = events[index][1]
      op = programs.get((number, event.program), {}).get(event.op, Op('', '', False))
      op = op._replace(source=event.source or op.source)
      if _CONTAINERS.match(op.opcode or event.op):
        continue
      part, kind, seconds = part_of(op), kind_of(event.op, op), self_ns / 1e9 / len(devices)
      parts[part][kind] = parts[part].get(kind, 0.0) + seconds
      for name in (part, 'all'):
        intervals[number, device, name].append((event.start, event.end))
      total = totals[_short(event.op, op), kind, part]
      total[0], total[1] = total[0] + seconds, total[1] + 1
  busy: dict[str, float] = collections.defaultdict(float)
  for (_, _, name), own in intervals.items():
    busy[name] += _union(own) / 1e9 / len(devices)
  top = sorted(totals.items(), key=lambda pair: -pair[1][0])[:_TOP_COUNT]
  return dict(
    parts={k: dict(sorted(v.items(), key=lambda pair: -pair[1])) for k, v in parts.items() if v},
    busy=dict(busy),
    op_s=sum(sum(v.values()) for v in parts.values()),
    span_s=_span(lines) / 1e9,
    devices=len(devices),
    top=[[*key, seconds, round(times / len(devices))] for key, (seconds, times) in top],
  )


def _match_program(
  compiled: dict[tuple[str, int], _Ops], key: tuple[str, int], op_names: set[str]
) -> _Ops:
  """The program with this name and number; else the one with this name that has most of `op_names`."""
  if key in compiled:
    return compiled[key]
  candidates = [ops for (name, _), ops in compiled.items() if name == key[0]]
  return max(candidates, key=lambda ops: len(op_names & ops.keys()), default={})


def part_of(op: Op) -> str:
  """'update' or 'generate', the outermost scope that is one of them; else 'other'."""
  return next((scope for scope in _scopes(op.source) if scope in PARTS), 'other')


def kind_of(name: str, op: Op) -> str:
  """'collectives', the name of a scope, 'matrix products', 'copies' or 'other'."""
  if _COLLECTIVES.search(op.opcode or name):
    return 'collectives'
  scopes = [scope for scope in _scopes(op.source) if scope in _SCOPES]
  if scopes:
    return scopes[-1]
  if op.product or (not op.opcode and _PRODUCTS.search(name)):
    return 'matrix products'
  return 'copies' if _COPIES.match(op.opcode or name) else 'other'


def _scopes(source: str) -> list[str]:
  """The scopes of an op_name, outermost first; 'transpose(jvp(head))' contains 'head'."""
  return re.findall(r'[\w\-]+', source)


def _short(name: str, op: Op) -> str:
  """The name of an operation in the report: its scopes, without the program's name and loops."""
  skipped = ('while', 'body', 'cond', 'closed_call', 'checkpoint', 'remat', 'shard_map')
  scopes = [x for x in op.source.split('/')[1:] if x not in skipped]
  return '/'.join(scopes[-4:]) or re.sub(r'\.\d+$', '', name)


def _self_times(line: list[_Interval]) -> Iterator[tuple[int, float]]:
  """(index of the event, nanoseconds without events inside it), of one line."""
  stack: list[tuple[float, int]] = []
  self_ns: dict[int, float] = {}
  for start, end, index in sorted(line, key=lambda x: (x[0], -x[1])):
    while stack and stack[-1][0] <= start:
      stack.pop()
    if stack:
      self_ns[stack[-1][1]] -= min(end, stack[-1][0]) - start
    self_ns[index] = end - start
    stack.append((end, index))
  return iter(self_ns.items())


def _union(intervals: Iterable[tuple[float, float]]) -> float:
  """Nanoseconds covered by one or more intervals."""
  covered, reached = 0.0, float('-inf')
  for start, end in sorted(intervals):
    covered += max(end - max(start, reached), 0.0)
    reached = max(reached, end)
  return covered


def _span(lines: dict[tuple, list[_Interval]]) -> float:
  """The longest span of a file from its first operation to the end of its last; clocks differ between hosts."""
  bounds: dict[int, list[float]] = collections.defaultdict(list)
  for (number, *_), line in lines.items():
    bounds[number] += [min(s for s, _, _ in line), max(e for _, e, _ in line)]
  return max(max(times) - min(times) for times in bounds.values())


def _events(data: bytes) -> Iterator[Event]:
  """The operations of all devices. On a CPU, those of threads whose events name an instruction."""
  for plane in jax.profiler.ProfileData.from_serialized_xspace(data).planes:
    if not plane.name.startswith(('/device:', '/host:CPU')):
      continue
    lines = list(plane.lines)
    op_lines = [line for line in lines if line.name == _OPS]
    for line in op_lines or lines:
      for event in line.events:
        stats = dict(event.stats)
        op = stats.get('hlo_op') or (op_lines and re.match(r'%?([\w.\-]+)', event.name)[1])
        if not op or event.name.startswith('end: '):
          continue
        device = f'{plane.name} {stats.get("device_ordinal", 0)}'
        source = str(stats.get('tf_op') or stats.get('op_name') or '')
        program = str(stats.get('hlo_module', '')), int(stats.get('program_id', -1))
        yield Event(device, line.name, event.start_ns, event.end_ns, str(op), program, source)


def _programs(data: bytes) -> dict[tuple[str, int], _Ops]:
  """(name, number) → instructions of the compiled programs in a trace, which no API of jax returns.

  Numbers are the fields of XSpace, XPlane, XEventMetadata and XStat (tsl/profiler/protobuf/xplane.proto).
  """
  programs: dict[tuple[str, int], _Ops] = {}
  for plane in _all(memoryview(data), 1):
    if not any(bytes(name) == b'/host:metadata' for name in _all(plane, 2)):
      continue
    for entry in _all(plane, 4):
      for metadata in _all(entry, 2):
        name = re.match(r'(.*?)(?:\((\d+)\))?$', str(next(_all(metadata, 2), b''), 'utf-8'))
        key = name[1], int(name[2] or next(_all(metadata, 1), -1))
        for stat in _all(metadata, 5):
          for proto in _all(stat, 6):
            programs[key] = _HloModule(proto).ops()
  return programs


class _HloInstruction(NamedTuple):
  name: str
  opcode: str
  op_name: str
  called: list[int]  # computations
  target: str  # of a custom call


class _HloModule:
  """The instructions of an HloProto (xla/service/hlo.proto) by computation."""

  def __init__(self, proto: memoryview):
    self._computations: dict[int, list[_HloInstruction]] = {}
    for computation in _all(next(_all(proto, 1), memoryview(b'')), 3):
      instructions = [_instruction(i) for i in _all(computation, 2)]
      self._computations[next(_all(computation, 5), 0)] = instructions
    pairs = [(n, i) for n, instructions in self._computations.items() for i in instructions]
    self._callers = {number: i for _, i in pairs for number in i.called}
    self._parents = {i.name: number for number, i in pairs}
    self._contents: dict[int, tuple[bool, str]] = {}
    self._outer_scopes: dict[int, str] = {}

  def ops(self) -> _Ops:
    return {
      i.name: Op(i.opcode, self._source(i), self._is_product(i))
      for instructions in self._computations.values()
      for i in instructions
    }

  def _content(self, number: int) -> tuple[bool, str]:
    """Whether a computation contains a matrix product, and the op_name of that or of its last instruction."""
    if number not in self._contents:
      self._contents[number] = (False, '')
      instructions = [(self._is_product(i), i.op_name) for i in self._computations.get(number, ())]
      products = [name for is_product, name in instructions if is_product and name]
      last = next((name for _, name in reversed(instructions) if name), '')
      has_product = any(is_product for is_product, _ in instructions)
      self._contents[number] = has_product, (products or [last])[-1]
    return self._contents[number]

  def _is_product(self, i: _HloInstruction) -> bool:
    return bool(
      i.opcode in ('dot', 'convolution', 'ragged-dot')
      or (i.opcode == 'custom-call' and _PRODUCTS.search(i.target))
      or (i.opcode == 'fusion' and any(self._content(number)[0] for number in i.called))
    )

  def _outer_scope(self, number: int) -> str:
    """The scopes of a computation's caller: op_names inside it may begin at the call."""
    if number not in self._outer_scopes:
      self._outer_scopes[number] = ''
      if caller := self._callers.get(number):
        self._outer_scopes[number] = self._source(caller)
    return self._outer_scopes[number]

  def _source(self, i: _HloInstruction) -> str:
    op_name = i.op_name or (self._content(i.called[0])[1] if i.called else '')
    if op_name.startswith('jit('):
      return op_name
    return f'{self._outer_scope(self._parents[i.name])}/{op_name}'.strip('/')


def _instruction(proto: memoryview) -> _HloInstruction:
  name = opcode = source = target = ''
  called: list[int] = []
  for number, value in _fields(proto):
    if number == 1:
      name = str(value, 'utf-8')
    elif number == 2:
      opcode = str(value, 'utf-8')
    elif number == 7:
      source = str(next(_all(value, 2), b''), 'utf-8')
    elif number == 28:
      target = str(value, 'utf-8')
    elif number == 38:
      called += [value] if isinstance(value, int) else _packed(value)
  return _HloInstruction(name, opcode, source, called, target)


def _all(message: memoryview, field: int) -> Iterator[Any]:
  return (value for number, value in _fields(message) if number == field)


def _fields(message: memoryview) -> Iterator[tuple[int, Any]]:
  """(field number, integer or bytes) of a protobuf message, read without its schema."""
  at, end = 0, len(message)
  while at < end:
    key, at = _varint(message, at)
    number, wire = key >> 3, key & 7
    if wire == 0:
      value, at = _varint(message, at)
    else:
      size, at = _varint(message, at) if wire == 2 else ({1: 8, 5: 4}[wire], at)
      value, at = message[at : at + size], at + size
    yield number, value


def _packed(message: memoryview) -> list[int]:
  values, at = [], 0
  while at < len(message):
    value, at = _varint(message, at)
    values.append(value)
  return values


def _varint(message: memoryview, at: int) -> tuple[int, int]:
  value, shift = 0, 0
  while True:
    byte = message[at]
    value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
    if byte < 128:
      return value, at

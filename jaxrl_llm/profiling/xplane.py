"""Where a device's time went, from a trace of `config.monitoring.profile.steps`: by part of the step and by kind of operation."""

from __future__ import annotations

import collections
import os
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax

from jaxrl_llm.checkpointing import safe_files

PARTS = ('update', 'generate')  # jax.named_scope of the two halves; all else is 'other'
# Named scopes that are a kind of their own, whatever is computed there.
_SCOPES = ('attention', 'head', 'sampling', 'optimizer')
_EXCHANGES = re.compile(
  r'(all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute|collective-broadcast|nccl)',
  re.IGNORECASE,
)
_PRODUCTS = re.compile(r'(dot|convolution|gemm|matmul|cublas|cudnn|onednn)', re.IGNORECASE)
_COPIES = re.compile(
  r'(copy|memcpy|memset|transpose|bitcast|reshape|slice|concatenate|pad|gather|scatter)',
  re.IGNORECASE,
)
# They hold other operations, which have events of their own.
_HOLDERS = re.compile(r'(while|conditional|call|async)(\.\d+)?$')
_OPS = 'XLA Ops'  # a TPU's line of operations beside lines that tell the same time again
_MOST = 12  # operations told one by one


class Op(NamedTuple):
  """An instruction of a compiled program."""

  opcode: str
  source: str  # XLA's op_name: named scopes with slashes
  product: bool  # a matrix product, alone or in a fusion


class Event(NamedTuple):
  """A stretch of time of one operation on one thread or stream of a device, in nanoseconds."""

  device: str
  line: str
  start: float
  end: float
  op: str
  program: tuple[
    str, int
  ]  # its name, and a number that a program from a cache does not share with its text
  source: str  # where the event itself says it, else ''


def newest(folder: str) -> list[str]:
  """The .xplane.pb files of the last trace under `folder`, one a process; none: []."""
  root = os.path.join(folder, 'plugins', 'profile')
  for session in sorted(os.listdir(root) if os.path.isdir(root) else (), reverse=True):
    names = sorted(os.listdir(os.path.join(root, session)))
    if found := [os.path.join(root, session, n) for n in names if n.endswith('.xplane.pb')]:
      return found
  return []


def read(paths: list[str]) -> dict[str, Any] | None:
  """Seconds a device spent, over the whole trace; None where no operation was traced.

  parts: part → kind → seconds of operations, a mean over devices, the time of what runs inside another one taken off;
  busy: part → seconds in which it had an operation running ('all': any); op_s: Σ parts; span_s: from the first
  operation to the end of the last; devices; runs: calls of the busiest program, on one device; top: the operations that
  took most, as [name, kind, part, seconds, times].
  """
  events, programs = [], {}
  for number, path in enumerate(paths):
    data = safe_files.read(path)
    own = list(_events(data))
    known = _programs(data)
    for key in {event.program for event in own}:
      programs[number, key] = _match_program(known, key, {e.op for e in own if e.program == key})
    events += [(number, event) for event in own]
  if not events:
    return None
  return _summarize(events, programs)


def _summarize(events: list[tuple[int, Event]], programs: dict) -> dict[str, Any]:
  lines: dict[tuple, list[tuple[float, float, int]]] = collections.defaultdict(list)
  for at, (number, event) in enumerate(events):
    lines[number, event.device, event.line].append((event.start, event.end, at))
  devices = {key[:2] for key in lines}
  parts: dict[str, dict[str, float]] = {part: {} for part in (*PARTS, 'other')}
  single: dict[tuple, list[float]] = collections.defaultdict(lambda: [0.0, 0])
  stretches: dict[tuple, list[tuple[float, float]]] = collections.defaultdict(list)
  for (number, device, _), stretch in lines.items():
    for at, own in _self_times(stretch):
      event = events[at][1]
      op = programs.get((number, event.program), {}).get(event.op, Op('', '', False))
      op = op._replace(source=event.source or op.source)
      if _HOLDERS.match(op.opcode or event.op):
        continue
      part, kind, seconds = part_of(op), kind_of(event.op, op), own / 1e9 / len(devices)
      parts[part][kind] = parts[part].get(kind, 0.0) + seconds
      for name in (part, 'all'):
        stretches[number, device, name].append((event.start, event.end))
      told = single[_short(event.op, op), kind, part]
      told[0], told[1] = told[0] + seconds, told[1] + 1
  busy: dict[str, float] = collections.defaultdict(float)
  for (_, _, name), own in stretches.items():
    busy[name] += _union(own) / 1e9 / len(devices)
  top = sorted(single.items(), key=lambda pair: -pair[1][0])[:_MOST]
  return dict(
    parts={k: dict(sorted(v.items(), key=lambda pair: -pair[1])) for k, v in parts.items() if v},
    busy=dict(busy),
    op_s=sum(sum(v.values()) for v in parts.values()),
    span_s=_span(lines) / 1e9,
    devices=len(devices),
    top=[[*key, seconds, round(times / len(devices))] for key, (seconds, times) in top],
  )


def _match_program(
  known: dict[tuple[str, int], dict[str, Op]], key: tuple[str, int], ops: set[str]
) -> dict[str, Op]:
  """The program of that name and number; else the one of that name which has most of these operations."""
  if key in known:
    return known[key]
  alike = [own for (name, _), own in known.items() if name == key[0]]
  return max(alike, key=lambda own: len(ops & own.keys()), default={})


def part_of(op: Op) -> str:
  """'update', 'generate' or 'other', by the outermost of its scopes that is one."""
  return next((word for word in _words(op.source) if word in PARTS), 'other')


def kind_of(name: str, op: Op) -> str:
  """'exchanges', a scope's name, 'matrix products', 'copies' or 'other'."""
  if _EXCHANGES.search(op.opcode or name):
    return 'exchanges'
  scopes = [word for word in _words(op.source) if word in _SCOPES]
  if scopes:
    return scopes[-1]
  if op.product or (not op.opcode and _PRODUCTS.search(name)):
    return 'matrix products'
  return 'copies' if _COPIES.match(op.opcode or name) else 'other'


def _words(source: str) -> list[str]:
  """The scopes of an op_name, from the outside; 'transpose(jvp(head))' is that of 'head', too."""
  return re.findall(r'[\w\-]+', source)


def _short(name: str, op: Op) -> str:
  """What an operation is called on a page: where it comes from, without the program's name and the loops."""
  dull = ('while', 'body', 'cond', 'closed_call', 'checkpoint', 'remat', 'shard_map')
  told = [x for x in op.source.split('/')[1:] if x not in dull]
  return '/'.join(told[-4:]) or re.sub(r'\.\d+$', '', name)


def _self_times(stretches: list[tuple[float, float, int]]) -> Iterator[tuple[int, float]]:
  """(event, nanoseconds without those of events inside it), of one line."""
  stack: list[tuple[float, int]] = []
  own: dict[int, float] = {}
  for start, end, at in sorted(stretches, key=lambda x: (x[0], -x[1])):
    while stack and stack[-1][0] <= start:
      stack.pop()
    if stack:
      own[stack[-1][1]] -= min(end, stack[-1][0]) - start
    own[at] = end - start
    stack.append((end, at))
  return iter(own.items())


def _union(stretches: Iterable[tuple[float, float]]) -> float:
  """Nanoseconds covered by one or more of them."""
  covered, reached = 0.0, float('-inf')
  for start, end in sorted(stretches):
    covered += max(end - max(start, reached), 0.0)
    reached = max(reached, end)
  return covered


def _span(lines: dict[tuple, list[tuple[float, float, int]]]) -> float:
  """From the first operation of a file to the end of its last, the longest of all: clocks differ between hosts."""
  ends: dict[int, list[float]] = collections.defaultdict(list)
  for (number, *_), own in lines.items():
    ends[number] += [min(s for s, _, _ in own), max(e for _, e, _ in own)]
  return max(max(both) - min(both) for both in ends.values())


def _events(data: bytes) -> Iterator[Event]:
  """The operations of all devices. A CPU's are those of its threads that name an instruction."""
  for plane in jax.profiler.ProfileData.from_serialized_xspace(data).planes:
    if not plane.name.startswith(('/device:', '/host:CPU')):
      continue
    lines = list(plane.lines)
    only = [line for line in lines if line.name == _OPS]
    for line in only or lines:
      for event in line.events:
        stats = dict(event.stats)
        op = stats.get('hlo_op') or (only and re.match(r'%?([\w.\-]+)', event.name)[1])
        if not op or event.name.startswith('end: '):
          continue
        device = f'{plane.name} {stats.get("device_ordinal", 0)}'
        where = str(stats.get('tf_op') or stats.get('op_name') or '')
        program = str(stats.get('hlo_module', '')), int(stats.get('program_id', -1))
        yield Event(device, line.name, event.start_ns, event.end_ns, str(op), program, where)


def _programs(data: bytes) -> dict[tuple[str, int], dict[str, Op]]:
  """(name, number) → instruction → Op: what the profiler keeps of the compiled programs, which no reader of jax gives.

  Numbers are the fields of XSpace, XPlane, XEventMetadata and XStat (tsl/profiler/protobuf/xplane.proto).
  """
  found: dict[tuple[str, int], dict[str, Op]] = {}
  for plane in _all(memoryview(data), 1):
    if not any(bytes(name) == b'/host:metadata' for name in _all(plane, 2)):
      continue
    for entry in _all(plane, 4):
      for metadata in _all(entry, 2):
        named = re.match(r'(.*?)(?:\((\d+)\))?$', str(next(_all(metadata, 2), b''), 'utf-8'))
        identity = named[1], int(named[2] or next(_all(metadata, 1), -1))
        for stat in _all(metadata, 5):
          for proto in _all(stat, 6):
            found[identity] = _instructions(proto)
  return found


def _instructions(proto: memoryview) -> dict[str, Op]:
  """Of an HloProto (xla/service/hlo.proto): every instruction of every computation."""
  computations: dict[int, list[tuple[str, str, str, list[int], str]]] = {}
  for computation in _all(next(_all(proto, 1), memoryview(b'')), 3):
    own = [_instruction(i) for i in _all(computation, 2)]
    computations[next(_all(computation, 5), 0)] = own
  inside: dict[int, tuple[bool, str]] = {}

  def look(number: int) -> tuple[bool, str]:
    """Whether a computation multiplies matrices, and where its product, or else its last instruction, comes from."""
    if number not in inside:
      inside[number] = (False, '')
      told = [(tell(i), i[2]) for i in computations.get(number, ())]
      products = [source for is_product, source in told if is_product and source]
      last = next((source for _, source in reversed(told) if source), '')
      inside[number] = any(p for p, _ in told), (products or [last])[-1]
    return inside[number]

  def tell(i: tuple[str, str, str, list[int], str]) -> bool:
    _, opcode, _, called, target = i
    return bool(
      opcode in ('dot', 'convolution', 'ragged-dot')
      or (opcode == 'custom-call' and _PRODUCTS.search(target))
      or (opcode == 'fusion' and any(look(number)[0] for number in called))
    )

  callers = {number: i for own in computations.values() for i in own for number in i[3]}
  home = {i[0]: number for number, own in computations.items() for i in own}
  above: dict[int, str] = {}

  def around(number: int) -> str:
    """The scopes of whoever calls a computation: what is in it may name those from there on alone."""
    if number not in above:
      above[number] = ''
      if caller := callers.get(number):
        above[number] = placed(caller)
    return above[number]

  def placed(i: tuple[str, str, str, list[int], str]) -> str:
    own = i[2] or (look(i[3][0])[1] if i[3] else '')
    return own if own.startswith('jit(') else f'{around(home[i[0]])}/{own}'.strip('/')

  return {i[0]: Op(i[1], placed(i), tell(i)) for own in computations.values() for i in own}


def _instruction(proto: memoryview) -> tuple[str, str, str, list[int], str]:
  """name, opcode, op_name, the computations it calls, and the target of a custom call."""
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
  return name, opcode, source, called, target


def _all(message: memoryview, wanted: int) -> Iterator[Any]:
  return (value for number, value in _fields(message) if number == wanted)


def _fields(message: memoryview) -> Iterator[tuple[int, Any]]:
  """(field number, integer or bytes) of a protobuf message, whose schema nobody asks for."""
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
  told, at = [], 0
  while at < len(message):
    value, at = _varint(message, at)
    told.append(value)
  return told


def _varint(message: memoryview, at: int) -> tuple[int, int]:
  value, shift = 0, 0
  while True:
    byte = message[at]
    value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
    if byte < 128:
      return value, at

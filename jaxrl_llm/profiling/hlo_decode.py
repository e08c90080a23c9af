"""Copies and collectives per iteration of a compiled decode loop, from the text of the optimized program."""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from jaxrl_llm.profiling import dcn, hlo

COLLECTIVES = (
  'all-gather',
  'all-reduce',
  'reduce-scatter',
  'all-to-all',
  'collective-permute',
  'collective-broadcast',
)
_CACHE_TYPES = ('bf16', 'f16', 'f32', 's8', 'f8e4m3fn', 'f8e5m2')
# A fusion of libtpu that continues a collective which an earlier one, with the flag −1, started.
_PIECE = re.compile(r'"async_collective_fusion_config":\{"flag_start":"\d')
# Instructions that forward an array or update one column in place. Reads of it are other instructions.
_IN_PLACE = (
  'parameter',
  'get-tuple-element',
  'tuple',
  'bitcast',
  'while',
  'conditional',
  'call',
  'opt-barrier',
  'dynamic-update-slice',
  'scatter',
)


class Collective(NamedTuple):
  """A collective operation between devices inside the loop."""

  opcode: str
  name: str
  source: str  # XLA's op_name: the scopes of the Python program that it comes from
  bytes: float  # of the larger of operand and result, on one device
  wire_bytes: float  # received per device on a ring
  dcn_bytes: float  # of these, from other slices
  times: int  # per iteration
  fixed: bool  # its operands do not change between iterations: weights, or the prompts' cache
  attributes: str  # XLA's text, with the groups of devices


class Copy(NamedTuple):
  """An instruction that writes a full array of keys or values."""

  opcode: str
  name: str
  source: str
  bytes: float
  times: int


class _Places(NamedTuple):
  """Where the devices of a program are: their positions in the mesh, slice after slice."""

  devices: int
  slice_size: int  # 0 = one slice


class Loop(NamedTuple):
  """Data movement in one iteration of a decode loop."""

  name: str
  cache: tuple[hlo.Array, ...]  # keys and values that the loop carries
  copies: tuple[Copy, ...]
  collectives: tuple[Collective, ...]


def decode_loops(
  text: str,
  mark: str,
  cache_dims: Sequence[Sequence[int]],
  slice_size: int = 0,
  others: Collection[int] = (),
) -> list[Loop]:
  """The outermost loops whose op_name contains `mark`, with the copies and collectives of one iteration.

  `cache_dims`: (rows, key-value heads, tokens, head width) of the keys of each layer on one device, with heads before
  sharding; layers may differ in tokens. A copy is an instruction that is not an update in place, depends on values
  that the loop changes, and has as many elements as one or more of the carried caches. An array of another shape or
  dtype with a size among `others` is none: logits and scores may have the size of several caches. A collective is
  `fixed` if it depends only on values that the loop carries unchanged. All branches of a condition count. Each
  `slice_size` consecutive devices form a slice; 0 = all of them.
  """
  program = hlo.parse(text)
  places = _Places(device_count(text), slice_size)
  marked = [
    (name, i)
    for name, computation in program.items()
    for i in computation
    if i.opcode == 'while' and mark in hlo.op_name(i)
  ]
  nested = {c for _, i in marked for c in hlo.reachable(program, hlo.attribute(i, 'body'))}
  sizes = frozenset(others)
  return [
    _analyze(program, i, cache_dims, places, sizes) for name, i in marked if name not in nested
  ]


def all_collectives(text: str, data_trips: int = 1, slice_size: int = 0) -> list[Collective]:
  """Every collective of a program, with the number of its executions; both branches of a condition count.

  `data_trips`: assumed iterations of a loop whose number of iterations depends on data.
  """
  program = hlo.parse(text)
  entry = re.search(r'^ENTRY %?([\w.\-]+)', text, re.MULTILINE)[1]
  walk = _Walk(program, set(), 0, _Places(device_count(text), slice_size), data_trips)
  walk.run(entry, [False] * len(program[entry]), 1, record=True)
  return list(walk.collectives.values())


def device_count(text: str) -> int:
  """Devices that a program is for; of several TPU slices, those of one: each slice has a program of its own."""
  return int((re.search(r'num_partitions=(\d+)', text) or (0, 1))[1])


def _analyze(
  program: hlo.Program,
  loop: hlo.Instruction,
  cache_dims: Sequence[Sequence[int]],
  places: _Places,
  others: frozenset[int],
) -> Loop:
  body = hlo.attribute(loop, 'body')
  carried = [(a, max(_layer_size(a, dims) for dims in cache_dims)) for a in loop.arrays]
  cache = tuple(a for a, size in carried if size)
  walk = _Walk(program, {s for _, s in carried if s}, sum(a.size for a in cache), places)
  kept = {a.dtype for a in cache}
  walk.is_other = lambda a: (
    a.size in others and (a.dtype not in kept or not any(_layer_size(a, d) for d in cache_dims))
  )
  unchanged = _unchanged(program[body], len(loop.arrays))
  for computation in (body, hlo.attribute(loop, 'condition')):
    walk.run(computation, [unchanged], 1, record=True)
  return Loop(loop.name, cache, tuple(walk.copies), tuple(walk.collectives.values()))


def _layer_size(array: hlo.Array, cache_dims: Sequence[int]) -> int:
  """The number of elements of one layer's keys in `array`, or 0 if it holds no keys or values.

  Its dimensions must be [rows, heads or a divisor of them, tokens, width] in any order, of one layer or several.
  """
  rows, heads, tokens, width = cache_dims
  dims = collections.Counter(d for d in array.dims if d != 1)
  for local_heads in range(heads, 0, -1):
    layer = collections.Counter(d for d in (rows, local_heads, tokens, width) if d != 1)
    if heads % local_heads == 0 and layer <= dims and (dims - layer).total() <= 1:
      return rows * local_heads * tokens * width if array.dtype in _CACHE_TYPES else 0
  return 0


def _unchanged(body: list[hlo.Instruction], count: int) -> list[bool]:
  """For each element of a loop's tuple, whether the body returns it unchanged."""
  by_name = {i.name: i for i in body}
  root = next(i for i in body if i.root)

  def origin(name: str) -> int | None:
    i = by_name.get(name)
    while i and i.opcode in ('copy', 'bitcast', 'copy-done', 'copy-start', 'opt-barrier'):
      i = by_name.get(i.operands[0])
    if i and i.opcode == 'get-tuple-element' and by_name[i.operands[0]].opcode == 'parameter':
      return int(hlo.attribute(i, 'index'))
    return None

  if root.opcode != 'tuple':
    return [False] * count
  return [origin(name) == index for index, name in enumerate(root.operands)]


# Whether a value is fixed: a bool, or a list of these for a tuple.
_Fixed = bool | list


class _Walk:
  """Propagates through a computation and its callees which values are fixed, and records copies and collectives."""

  def __init__(
    self,
    program: hlo.Program,
    layer_sizes: set[int],
    cache_size: int,
    places: _Places,
    data_trips: int = 1,
  ):
    self.program, self.places, self.data_trips = program, places, data_trips
    self.layer_sizes, self.cache_size = layer_sizes, cache_size
    self.is_other: Callable[[hlo.Array], bool] = lambda a: False  # certainly no keys or values
    self.copies: list[Copy] = []
    self.collectives: dict[str, Collective] = {}  # by name: copies of one share their channel
    self.with_collectives = {
      name
      for name in program
      if any(_is_collective(i) for c in hlo.reachable(program, name) for i in program.get(c, ()))
    }

  def run(
    self, name: str, arguments: list[_Fixed], times: int, record: bool, fused: bool = False
  ) -> _Fixed:
    """Whether the result of a computation is fixed, from that of its arguments."""
    values: dict[str, _Fixed] = {}
    result: _Fixed = False
    for i in self.program.get(name, ()):
      values[i.name] = self._value(i, values, arguments, times, record, fused)
      if i.root:
        result = values[i.name]
      if record:
        self._record(i, values, times, fused)
    return result

  def _value(
    self,
    i: hlo.Instruction,
    values: dict[str, _Fixed],
    arguments: list[_Fixed],
    times: int,
    record: bool,
    fused: bool,
  ) -> _Fixed:
    operands = [values.get(o, False) for o in i.operands]
    if i.opcode == 'parameter':
      return arguments[int(i.arguments)]
    if i.opcode == 'tuple':
      return operands
    if i.opcode == 'get-tuple-element':
      operand = operands[0]
      return operand[int(hlo.attribute(i, 'index'))] if isinstance(operand, list) else operand
    if i.opcode in ('bitcast', 'copy', 'opt-barrier'):
      return operands[0]
    if i.opcode == 'while':
      return self._while(i, operands[0], times, record)
    if i.opcode == 'conditional':
      branches = hlo.called(i)
      results = [
        self.run(c, [o], times, record) for c, o in zip(branches, operands[1:], strict=False)
      ]
      return _both(results) if _all(operands[0]) else _none(_both(results))
    if (names := hlo.called(i)) and names[0] in self.with_collectives:
      return self.run(names[0], operands, times, record, fused=i.opcode != 'call')
    return all(map(_all, operands))

  def _while(self, i: hlo.Instruction, start: _Fixed, times: int, record: bool) -> _Fixed:
    """An element is fixed if it is fixed before the loop and after every iteration."""
    body, state = hlo.attribute(i, 'body'), start
    while (after := _both([state, self.run(body, [state], times, False)])) != state:
      state = after
    trips = _trips(self.program, hlo.attribute(i, 'condition')) or self.data_trips
    self.run(body, [state], times * trips, record)
    return state

  def _record(self, i: hlo.Instruction, values: dict[str, _Fixed], times: int, fused: bool) -> None:
    fixed = all(_all(values.get(o, False)) for o in i.operands)
    if _is_collective(i) and not _PIECE.search(i.attributes):
      before = self.collectives.get(i.name)
      executions = times + (before.times if before else 0)
      self.collectives[i.name] = _collective(i, executions, fixed, self.places)
    if not (fused or fixed) and (copied_bytes := sum(a.bytes for a in self._copied(i))):
      self.copies.append(Copy(i.opcode, i.name, hlo.op_name(i), copied_bytes, times))

  def _copied(self, i: hlo.Instruction) -> list[hlo.Array]:
    """The arrays of a cache's size that the instruction writes in full."""
    if (
      i.opcode in _IN_PLACE
      or i.opcode.endswith('-done')
      or 'output_to_operand_aliasing=' in i.attributes
    ):
      return []
    # A prefetch into fast memory, of an array or its slices, is a read. The result of a start includes its operands.
    arrays = i.arrays
    if 'custom_call_target="ConcatBitcast"' in i.attributes:  # the slices together
      arrays = [a for a in arrays if not a.space]
    if i.opcode in ('copy-start', 'async-start'):
      results = arrays[:1] if i.opcode == 'copy-start' else arrays[len(i.operands) :]
      arrays = [a for a in results if not a.space]
    large = [
      (n, a)
      for n, a in enumerate(arrays)
      if a.size <= self.cache_size
      and any(a.size and a.size % s == 0 for s in self.layer_sizes)
      and not self.is_other(a)
    ]
    if i.opcode == 'fusion' and large:
      body = self.program.get(hlo.called(i)[0], [])
      return [a for n, a in large if not _updates_in_place(body, n)]
    return [a for _, a in large]


def _updates_in_place(body: list[hlo.Instruction], output: int) -> bool:
  """Whether output `output` of a fusion is its operand with a part updated."""
  by_name = {i.name: i for i in body}

  def skip_bitcasts(i: hlo.Instruction) -> hlo.Instruction:
    while i.opcode == 'bitcast':
      i = by_name[i.operands[0]]
    return i

  root = next((i for i in body if i.root), None)
  if root is not None and root.opcode == 'tuple':
    root = by_name[root.operands[output]]
  if root is None or skip_bitcasts(root).opcode not in ('dynamic-update-slice', 'scatter'):
    return False
  return skip_bitcasts(by_name[skip_bitcasts(root).operands[0]]).opcode == 'parameter'


def _is_collective(i: hlo.Instruction) -> bool:
  return i.opcode.removesuffix('-start') in COLLECTIVES or dcn.is_transfer(i)


def _collective(i: hlo.Instruction, times: int, fixed: bool, places: _Places) -> Collective:
  source = hlo.op_name(i)
  if dcn.is_transfer(i):
    kind, size_bytes, received = dcn.transfer(i)
    return Collective(
      kind, i.name, source, size_bytes, received, received, times, fixed, i.attributes
    )
  opcode = i.opcode.removesuffix('-start')
  n = group_size(i.attributes, places.devices)
  # The result of a start also holds its operand and context scalars, except that of an all-reduce.
  combine = sum if i.opcode == opcode or opcode == 'all-reduce' else max
  size_bytes = combine(a.bytes for a in i.arrays)
  if opcode == 'reduce-scatter' and i.opcode == opcode:
    size_bytes *= n
  share = {'all-reduce': 2 * (n - 1) / n, 'collective-permute': 1.0, 'collective-broadcast': 1.0}
  wire_bytes = size_bytes * share.get(opcode, (n - 1) / n)
  crossing = dcn.crossing_share(opcode, i.attributes, places.devices, places.slice_size)
  dcn_bytes = crossing * size_bytes
  return Collective(
    opcode, i.name, source, size_bytes, wire_bytes, dcn_bytes, times, fixed, i.attributes
  )


def group_size(attributes: str, devices: int) -> int:
  """The number of devices in each group of a collective."""
  return hlo.replica_groups(attributes, devices).shape[1]


def _trips(program: hlo.Program, condition: str) -> int:
  """The number of iterations of a loop with a counter: the one constant in its condition; else 0."""
  numbers = [
    int(i.arguments)
    for c in hlo.reachable(program, condition)
    for i in program.get(c, ())
    if i.opcode == 'constant' and i.arrays[0].dims == () and re.fullmatch(r'\d+', i.arguments)
  ]
  return max(1, numbers[0]) if len(set(numbers)) == 1 else 0


def _all(value: _Fixed) -> bool:
  return all(map(_all, value)) if isinstance(value, list) else bool(value)


def _both(values: Sequence[_Fixed]) -> _Fixed:
  """Fixed where all of `values` are; lists are combined element by element."""
  lists = [v for v in values if isinstance(v, list)]
  if not lists:
    return all(values)
  length = len(lists[0])
  return [_both([v[k] if isinstance(v, list) else v for v in values]) for k in range(length)]


def _none(value: _Fixed) -> _Fixed:
  return [_none(v) for v in value] if isinstance(value, list) else False

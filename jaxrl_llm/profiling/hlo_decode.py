"""What a compiled decode loop copies and exchanges for every token, read from the optimized program."""

from __future__ import annotations

import collections
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxrl_llm.profiling import hlo

COLLECTIVES = (
  'all-gather',
  'all-reduce',
  'reduce-scatter',
  'all-to-all',
  'collective-permute',
  'collective-broadcast',
)
_CACHE_TYPES = ('bf16', 'f16', 'f32', 's8', 'f8e4m3fn', 'f8e5m2')
# These hand an array on, or change one column of it where it lies; whoever reads it is another instruction.
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
  """An exchange between devices inside the loop."""

  opcode: str
  name: str
  source: str  # XLA's op_name: where in the Python program it comes from
  bytes: float  # of the largest of operand and result, on one device
  wire_bytes: float  # received per device on a ring
  times: int  # per iteration
  fixed: bool  # it moves what no iteration changes: weights, or the prompts' cache
  attributes: str  # as XLA writes them: who exchanges with whom


class Copy(NamedTuple):
  """An instruction that writes a whole array of keys or values."""

  opcode: str
  name: str
  source: str
  bytes: float
  times: int


class Loop(NamedTuple):
  """What one iteration of a decode loop does, besides computing."""

  name: str
  cache: tuple[hlo.Array, ...]  # keys and values it carries
  copies: tuple[Copy, ...]
  collectives: tuple[Collective, ...]


def decode_loops(text: str, mark: str, cache_dims: Sequence[Sequence[int]]) -> list[Loop]:
  """The outermost loops whose op_name holds `mark`, and what one iteration of each does.

  `cache_dims` are (rows, key-value heads, tokens, head width) of layers' keys on one device, the heads before they are
  cut; layers may differ in tokens. A copy is an instruction that is no update in place, whose operands the loop
  changes, and whose result has as many elements as one or more of the carried caches. A collective is `fixed` where
  its operands follow from nothing but what the loop hands on unchanged.
  Branches count in full.
  """
  program = hlo.parse(text)
  devices = int((re.search(r'num_partitions=(\d+)', text) or (0, 1))[1])
  marked = [
    (name, i)
    for name, computation in program.items()
    for i in computation
    if i.opcode == 'while' and mark in hlo.op_name(i)
  ]
  inside = {c for _, i in marked for c in hlo.reachable(program, hlo.attribute(i, 'body'))}
  return [_read(program, i, cache_dims, devices) for name, i in marked if name not in inside]


def all_collectives(text: str) -> list[Collective]:
  """Every exchange of the whole program, with how often it runs; both branches of a condition count."""
  program = hlo.parse(text)
  devices = int((re.search(r'num_partitions=(\d+)', text) or (0, 1))[1])
  entry = re.search(r'^ENTRY %?([\w.\-]+)', text, re.MULTILINE)[1]
  walk = _Walk(program, set(), 0, devices)
  walk.run(entry, [False] * len(program[entry]), 1, record=True)
  return list(walk.collectives.values())


def _read(program, loop: hlo.Instruction, cache_dims, devices: int) -> Loop:
  body = hlo.attribute(loop, 'body')
  held = [(a, max(_layer_size(a, dims) for dims in cache_dims)) for a in loop.arrays]
  cache = tuple(a for a, size in held if size)
  walk = _Walk(program, {s for _, s in held if s}, sum(a.size for a in cache), devices)
  unchanged = _unchanged(program[body], len(loop.arrays))
  for computation in (body, hlo.attribute(loop, 'condition')):
    walk.run(computation, [unchanged], 1, record=True)
  return Loop(loop.name, cache, tuple(walk.copies), tuple(walk.collectives.values()))


def _layer_size(array: hlo.Array, cache_dims: Sequence[int]) -> int:
  """Elements of one layer's keys where the array holds [rows, heads or a part of them, tokens, width]
  in any order, of one layer or of several; else 0."""
  rows, heads, tokens, width = cache_dims
  dims = collections.Counter(d for d in array.dims if d != 1)
  for kept in range(heads, 0, -1):
    wanted = collections.Counter(d for d in (rows, kept, tokens, width) if d != 1)
    if heads % kept == 0 and wanted <= dims and (dims - wanted).total() <= 1:
      return rows * kept * tokens * width if array.dtype in _CACHE_TYPES else 0
  return 0


def _unchanged(body: list[hlo.Instruction], count: int) -> list[bool]:
  """Which elements of a loop's tuple come out of the body as they went in."""
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


class _Walk:
  """Follows what is fixed through a computation and all it calls, and notes copies and exchanges.

  What an instruction returns is True (fixed), False, or a list of these for a tuple.
  """

  def __init__(self, program: dict, layer_sizes: set[int], cache_size: int, devices: int):
    self.program, self.devices = program, devices
    self.layer_sizes, self.cache_size = layer_sizes, cache_size
    self.copies: list[Copy] = []
    self.collectives: dict[tuple[str, str], Collective] = {}
    self.exchanging = {
      name
      for name in program
      if any(_exchange(i) for c in hlo.reachable(program, name) for i in program.get(c, ()))
    }

  def run(self, name: str, arguments: list, times: int, record: bool, fused: bool = False) -> Any:
    """What the computation returns, given what its parameters are."""
    known: dict[str, Any] = {}
    result: Any = False
    for i in self.program.get(name, ()):
      known[i.name] = self._value(i, known, arguments, times, record, fused)
      if i.root:
        result = known[i.name]
      if record:
        self._note(i, known, times, fused)
    return result

  def _value(
    self, i: hlo.Instruction, known, arguments, times: int, record: bool, fused: bool
  ) -> Any:
    operands = [known.get(o, False) for o in i.operands]
    if i.opcode == 'parameter':
      return arguments[int(i.inside)]
    if i.opcode == 'tuple':
      return operands
    if i.opcode == 'get-tuple-element':
      held = operands[0]
      return held[int(hlo.attribute(i, 'index'))] if isinstance(held, list) else held
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
    if (names := hlo.called(i)) and names[0] in self.exchanging:
      return self.run(names[0], operands, times, record, fused=i.opcode != 'call')
    return all(map(_all, operands))

  def _while(self, i: hlo.Instruction, start: Any, times: int, record: bool) -> Any:
    """An element stays fixed where it is fixed before the loop and after every iteration."""
    body, state = hlo.attribute(i, 'body'), start
    while (after := _both([state, self.run(body, [state], times, False)])) != state:
      state = after
    trips = _trips(self.program, hlo.attribute(i, 'condition'))
    self.run(body, [state], times * trips, record)
    return state

  def _note(self, i: hlo.Instruction, known: dict[str, Any], times: int, fused: bool) -> None:
    fixed = all(_all(known.get(o, False)) for o in i.operands)
    if _exchange(i):
      channel = (re.search(r'channel_id=(\d+)', i.attributes) or (0, i.name))[1]
      # A chain of asynchronous pieces repeats its channel: the first one counts. So do sums of shard_map, all of them.
      key = channel, hlo.op_name(i)
      self.collectives.setdefault(key, _collective(i, times, fixed, self.devices))
    if not (fused or fixed) and (written := sum(a.bytes for a in self._copied(i))):
      self.copies.append(Copy(i.opcode, i.name, hlo.op_name(i), written, times))

  def _copied(self, i: hlo.Instruction) -> list[hlo.Array]:
    """The arrays of a cache's size that the instruction writes anew."""
    if (
      i.opcode in _IN_PLACE
      or i.opcode.endswith('-done')
      or 'output_to_operand_aliasing=' in i.attributes
    ):
      return []
    # What is fetched to fast memory ahead of its use, whole or by slices, is a read; a start names its operands, too.
    arrays = i.arrays
    if i.opcode in ('copy-start', 'async-start'):
      own = arrays[:1] if i.opcode == 'copy-start' else arrays[len(i.operands) :]
      arrays = [a for a in own if not a.space]
    large = [
      (n, a)
      for n, a in enumerate(arrays)
      if a.size <= self.cache_size and any(a.size and a.size % s == 0 for s in self.layer_sizes)
    ]
    if i.opcode == 'fusion' and large:
      body = self.program.get(hlo.called(i)[0], [])
      return [a for n, a in large if not _updates_in_place(body, n)]
    return [a for _, a in large]


def _updates_in_place(body: list[hlo.Instruction], output: int) -> bool:
  """Whether output `output` of a fusion is its operand with a part of it changed."""
  by_name = {i.name: i for i in body}

  def through(i: hlo.Instruction) -> hlo.Instruction:
    while i.opcode == 'bitcast':
      i = by_name[i.operands[0]]
    return i

  root = next((i for i in body if i.root), None)
  if root is not None and root.opcode == 'tuple':
    root = by_name[root.operands[output]]
  if root is None or through(root).opcode not in ('dynamic-update-slice', 'scatter'):
    return False
  return through(by_name[through(root).operands[0]]).opcode == 'parameter'


def _exchange(i: hlo.Instruction) -> bool:
  return i.opcode.removesuffix('-start') in COLLECTIVES


def _collective(i: hlo.Instruction, times: int, fixed: bool, devices: int) -> Collective:
  opcode = i.opcode.removesuffix('-start')
  n = group_size(i.attributes, devices)
  # The result of a start holds its operand too, and scalars of context; that of an all-reduce does not.
  joined = sum if i.opcode == opcode or opcode == 'all-reduce' else max
  size = joined(a.bytes for a in i.arrays)
  if opcode == 'reduce-scatter' and i.opcode == opcode:
    size *= n
  share = {'all-reduce': 2 * (n - 1) / n, 'collective-permute': 1.0, 'collective-broadcast': 1.0}
  wire = size * share.get(opcode, (n - 1) / n)
  return Collective(opcode, i.name, hlo.op_name(i), size, wire, times, fixed, i.attributes)


def group_size(attributes: str, devices: int) -> int:
  """How many devices exchange with each other."""
  return hlo.replica_groups(attributes, devices).shape[1]


def _trips(program: dict, condition: str) -> int:
  """How often a loop with a counter runs: the one number its condition compares with; else 1."""
  numbers = [
    int(i.inside)
    for c in hlo.reachable(program, condition)
    for i in program.get(c, ())
    if i.opcode == 'constant' and i.arrays[0].dims == () and re.fullmatch(r'\d+', i.inside)
  ]
  return max(1, numbers[0]) if len(set(numbers)) == 1 else 1


def _all(value: Any) -> bool:
  return all(map(_all, value)) if isinstance(value, list) else bool(value)


def _both(values: Sequence[Any]) -> Any:
  """Fixed where all of them are; lists are met element by element."""
  lists = [v for v in values if isinstance(v, list)]
  if not lists:
    return all(values)
  length = len(lists[0])
  return [_both([v[k] if isinstance(v, list) else v for v in values]) for k in range(length)]


def _none(value: Any) -> Any:
  return [_none(v) for v in value] if isinstance(value, list) else False

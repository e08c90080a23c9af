"""An optimized XLA program as text, read into computations and instructions."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

_BYTES = dict(pred=1, s4=0.5, u4=0.5, s8=1, u8=1, s16=2, u16=2, bf16=2, f16=2, s32=4, u32=4, f32=4)
_BYTES |= dict(s64=8, u64=8, f64=8, f8e4m3fn=1, f8e5m2=1, c64=8)


class Array(NamedTuple):
  """One array of a shape; `space` is XLA's memory space, 0 the main memory."""

  dtype: str
  dims: tuple[int, ...]
  space: int

  @property
  def size(self) -> int:
    """Number of elements."""
    return math.prod(self.dims)

  @property
  def bytes(self) -> float:
    """Without the padding of tiles."""
    return self.size * _BYTES.get(self.dtype, 0)


class Instruction(NamedTuple):
  """`name = shape opcode(operands), attributes`."""

  name: str
  root: bool
  arrays: tuple[Array, ...]  # of a tuple, all of them in order
  opcode: str
  operands: tuple[str, ...]
  inside: (
    str  # what stands between the parentheses: the number of a parameter, the value of a constant
  )
  attributes: str


_INSTRUCTION = re.compile(r'\s+(ROOT )?%?([\w.\-]+) = (.*)')
_COMPUTATION = re.compile(r'(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{\s*$')
_ARRAY = re.compile(r'\b([a-z]\w*)\[([\d,<=]*)\](?:\{([^{}]*)\})?')
_CALLED = re.compile(
  r'(?:calls|to_apply|body|branch_computations|called_computations|'
  r'true_computation|false_computation)=\{?((?:%[\w.\-]+(?:, )?)+)'
)


def parse(text: str) -> dict[str, list[Instruction]]:
  """Computations by name, instructions in their order; what is neither is skipped.

  Kernels write programs of their own over many lines into attributes: a line counts only where it
  reads as an instruction with an XLA shape, and a computation ends where the next one begins. XLA of 2026 writes
  `%x#2` for element 2 of the tuple x: an instruction of that name stands for it, as get-tuple-element did.
  """
  computations: dict[str, list[Instruction]] = {}
  current, shapes = None, {}
  for line in text.splitlines():
    header = None if line[:1].isspace() else _COMPUTATION.match(line)
    if header:
      current, shapes = computations.setdefault(header[2], []), {}
    elif current is not None and (found := _instruction(line)):
      instruction, shapes[found[0].name] = found
      for operand in instruction.operands:
        current += _elements(operand, shapes)
      current.append(instruction)
  return computations


def _elements(operand: str, shapes: dict[str, str]) -> list[Instruction]:
  """What takes an operand such as x#2 out of its tuple, the first time that it is used; adds to `shapes`."""
  whole, mark, index = operand.rpartition('#')
  if not mark or operand in shapes:
    return []
  before = _elements(whole, shapes)
  shapes[operand] = _element(shapes.get(whole, ''), int(index))
  arrays = tuple(_arrays(shapes[operand]))
  taken = f', index={index}'
  return [
    *before,
    Instruction(operand, False, arrays, 'get-tuple-element', (whole,), f'%{whole}', taken),
  ]


def _element(shape: str, index: int) -> str:
  """The shape at `index` of a tuple's, as text; '' where there is none."""
  depth, start, found = 0, 1, []
  for position, character in enumerate(shape):
    depth += {'(': 1, '{': 1, '[': 1, ')': -1, '}': -1, ']': -1}.get(character, 0)
    if (character == ',' and depth == 1) or (depth == 0 and position == len(shape) - 1):
      found.append(shape[start:position])
      start = position + 1
  return re.sub(r'/\*.*?\*/', '', found[index]).strip() if index < len(found) else ''


def _instruction(line: str) -> tuple[Instruction, str] | None:
  """The instruction of a line, and its shape as text."""
  match = _INSTRUCTION.match(line)
  if not match:
    return None
  rest = match[3]
  end = _balanced(rest, 0) if rest.startswith('(') else _first_space(rest)
  opcode = re.match(r'\s*([a-z][\w\-]*)\(', rest[end:])
  arrays = tuple(_arrays(rest[:end]))
  if not opcode or not (arrays or rest.startswith(('(', 'token[]'))):
    return None
  start = end + opcode.end() - 1
  stop = _balanced(rest, start)
  inside = rest[start + 1 : stop - 1]
  operands = tuple(re.findall(r'%([\w.\-]+(?:#\d+)*)', inside))
  found = Instruction(match[2], bool(match[1]), arrays, opcode[1], operands, inside, rest[stop:])
  return found, rest[:end].strip()


def _balanced(text: str, start: int) -> int:
  """The position after the parenthesis that closes the one at `start`."""
  depth = 0
  for position in range(start, len(text)):
    depth += {'(': 1, ')': -1}.get(text[position], 0)
    if depth == 0:
      return position + 1
  return len(text)


def _first_space(text: str) -> int:
  position = text.find(' ')
  return len(text) if position < 0 else position


def _arrays(shape: str) -> Iterator[Array]:
  for dtype, dims, layout in _ARRAY.findall(shape):
    space = re.search(r'S\((\d+)\)', layout)
    sizes = tuple(int(d.lstrip('<=')) for d in dims.split(',') if d)
    yield Array(dtype, sizes, int(space[1]) if space else 0)


def reachable(program: dict, name: str) -> set[str]:
  """A computation and all it calls."""
  found, waiting = set(), [name]
  while waiting:
    if (name := waiting.pop()) not in found:
      found.add(name)
      waiting += [c for i in program.get(name, ()) for c in called(i)]
  return found


def called(i: Instruction) -> list[str]:
  """The computations an instruction names."""
  return [n for group in _CALLED.findall(i.attributes) for n in re.findall(r'%([\w.\-]+)', group)]


def attribute(i: Instruction, key: str) -> str:
  """The name or number after `key=`, or ''."""
  match = re.search(rf'\b{key}=%?([\w.\-]+)', i.attributes)
  return match[1] if match else ''


def op_name(i: Instruction) -> str:
  """Where it comes from in the Python program: XLA's op_name."""
  match = re.search(r'op_name="([^"]*)"', i.attributes)
  return match[1] if match else ''


def replica_groups(attributes: str, devices: int) -> np.ndarray:
  """Who exchanges with whom, [groups, members]: numbers of places in the mesh, in its order.

  [2,4]<=[4,2]T(1,0) stands for arange(8).reshape(4, 2).T.reshape(2, 4), a group a row; mesh['x'=4,'y'=2] {'y'} for the
  devices that differ along y alone, in the order of device_ids=([2,4]T(1,0)) where that is told; {} or nothing for one
  group of all. Raises ValueError for what it cannot read: a guess would be bytes that nobody sends.
  """
  if iota := re.search(r'replica_groups=\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)', attributes):
    return _iota(iota[2]).reshape(_numbers(iota[1]))
  if mesh := re.search(
    r'replica_groups=mesh\[(.*?)\](?:, device_ids=\((.*?)\))? \{(.*?)\}', attributes
  ):
    return _along(*mesh.groups())
  for name in ('replica_groups', 'source_target_pairs'):
    if listed := re.search(rf'{name}=\{{(\{{[\d,{{}}]*\}})\}}', attributes):
      return np.array([_numbers(one) for one in re.findall(r'[\d,]+\d|\d', listed[1])])
  told = re.search(r'replica_groups=(?!\{\}).{0,80}', attributes)
  if told:
    raise ValueError(f'groups of devices are told in a way that is not known: {told[0]}')
  return np.arange(devices)[None]


def _along(mesh: str, order: str | None, axes: str) -> np.ndarray:
  """Groups of devices that differ along `axes` alone; 'x':(2)4 is the part of size 4 that one of size 2 is before."""
  sizes = {name: int(n) for name, n in re.findall(r"'([^']+)'=(\d+)", mesh)}
  found = re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", axes)
  parts = [(name, int(before or 1), int(size or sizes[name])) for name, before, size in found]
  dims, inside = [], []
  for axis, n in sizes.items():
    own = [(before, before * size) for name, before, size in parts if name == axis]
    cuts = sorted({1, n, *(edge for pair in own for edge in pair)})
    for low, high in zip(cuts, cuts[1:], strict=False):
      dims.append(high // low)
      inside.append(any(a <= low and high <= b for a, b in own))
  count = math.prod(sizes.values())
  ids = np.arange(count) if order is None else _iota(order)
  turned = np.argsort(inside, kind='stable')  # those that the groups run along are the last
  members = math.prod(d for d, own in zip(dims, inside, strict=True) if own)
  return ids.reshape(dims or [1]).transpose(turned if dims else [0]).reshape(-1, members)


def _iota(told: str) -> np.ndarray:
  """[4,2]T(1,0) → arange(8).reshape(4, 2).T, flat; or numbers one by one."""
  found = re.fullmatch(r'\[([\d,]+)\](?:T\(([\d,]+)\))?', told)
  if not found:
    return np.array(_numbers(told))
  ids = np.arange(math.prod(_numbers(found[1]))).reshape(_numbers(found[1]))
  return (ids.transpose(_numbers(found[2])) if found[2] else ids).reshape(-1)


def _numbers(told: str) -> list[int]:
  return [int(n) for n in told.split(',')]

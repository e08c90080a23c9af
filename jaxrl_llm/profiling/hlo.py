"""Parser for the text of an optimized XLA program: computations and their instructions."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

_BYTES = dict(pred=1, s4=0.5, u4=0.5, s8=1, u8=1, s16=2, u16=2, bf16=2, f16=2, s32=4, u32=4, f32=4)
_BYTES |= dict(s64=8, u64=8, f64=8, f8e4m3fn=1, f8e5m2=1, c64=8)


class Array(NamedTuple):
  """An array type within the shape of an instruction."""

  dtype: str
  dims: tuple[int, ...]
  space: int  # XLA's memory space; 0 is the main memory

  @property
  def size(self) -> int:
    """Number of elements."""
    return math.prod(self.dims)

  @property
  def bytes(self) -> float:
    """Size in bytes, without the padding of tiles."""
    return self.size * _BYTES.get(self.dtype, 0)


class Instruction(NamedTuple):
  """`name = shape opcode(operands), attributes`."""

  name: str
  root: bool
  arrays: tuple[Array, ...]  # the elements of a tuple in order
  opcode: str
  operands: tuple[str, ...]
  arguments: str  # the text in parentheses: the index of a parameter, the value of a constant
  attributes: str


Program = dict[str, list[Instruction]]  # computations by name


_INSTRUCTION = re.compile(r'\s+(ROOT )?%?([\w.\-]+) = (.*)')
_COMPUTATION = re.compile(r'(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{\s*$')
_ARRAY = re.compile(r'\b([a-z]\w*)\[([\d,<=]*)\](?:\{([^{}]*)\})?')
_CALLED = re.compile(
  r'(?:calls|to_apply|body|branch_computations|called_computations|'
  r'true_computation|false_computation)=\{?((?:%[\w.\-]+(?:, )?)+)'
)


def parse(text: str) -> Program:
  """The computations of a program by name, with their instructions in order. Other lines are skipped.

  Attributes of kernels contain programs over many lines. Therefore a line counts only if it parses as an instruction
  with an XLA shape, and a computation ends where the next one begins. XLA of 2026 writes `%x#2` for element 2 of the
  tuple x; the result contains an instruction of that name, a get-tuple-element.
  """
  computations: Program = {}
  current, shapes = None, {}
  for line in text.splitlines():
    header = None if line[:1].isspace() else _COMPUTATION.match(line)
    if header:
      current, shapes = computations.setdefault(header[2], []), {}
    elif current is not None and (parsed := _instruction(line)):
      instruction, shapes[parsed[0].name] = parsed
      for operand in instruction.operands:
        current += _elements(operand, shapes)
      current.append(instruction)
  return computations


def _elements(operand: str, shapes: dict[str, str]) -> list[Instruction]:
  """Instructions that extract an operand such as x#2 from its tuple, at its first use; extends `shapes`."""
  parent, mark, index = operand.rpartition('#')
  if not mark or operand in shapes:
    return []
  outer = _elements(parent, shapes)
  shapes[operand] = _element(shapes.get(parent, ''), int(index))
  arrays = tuple(_arrays(shapes[operand]))
  attributes = f', index={index}'
  return [
    *outer,
    Instruction(operand, False, arrays, 'get-tuple-element', (parent,), f'%{parent}', attributes),
  ]


def _element(shape: str, index: int) -> str:
  """The shape of element `index` of a tuple shape, as text; '' if there is none."""
  depth, start, elements = 0, 1, []
  for position, character in enumerate(shape):
    depth += {'(': 1, '{': 1, '[': 1, ')': -1, '}': -1, ']': -1}.get(character, 0)
    if (character == ',' and depth == 1) or (depth == 0 and position == len(shape) - 1):
      elements.append(shape[start:position])
      start = position + 1
  return re.sub(r'/\*.*?\*/', '', elements[index]).strip() if index < len(elements) else ''


def _instruction(line: str) -> tuple[Instruction, str] | None:
  """The instruction on a line, and its shape as text; None for other lines."""
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
  arguments = rest[start + 1 : stop - 1]
  operands = tuple(re.findall(r'%([\w.\-]+(?:#\d+)*)', arguments))
  instruction = Instruction(
    match[2], bool(match[1]), arrays, opcode[1], operands, arguments, rest[stop:]
  )
  return instruction, rest[:end].strip()


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


def reachable(program: Program, name: str) -> set[str]:
  """A computation and all computations that it calls, directly or not."""
  visited, pending = set(), [name]
  while pending:
    if (name := pending.pop()) not in visited:
      visited.add(name)
      pending += [c for i in program.get(name, ()) for c in called(i)]
  return visited


def called(i: Instruction) -> list[str]:
  """The computations that an instruction calls."""
  return [n for group in _CALLED.findall(i.attributes) for n in re.findall(r'%([\w.\-]+)', group)]


def attribute(i: Instruction, key: str) -> str:
  """The name or number after `key=`, or ''."""
  match = re.search(rf'\b{key}=%?([\w.\-]+)', i.attributes)
  return match[1] if match else ''


def op_name(i: Instruction) -> str:
  """XLA's op_name: the scopes of the Python program that the instruction comes from; '' without one."""
  match = re.search(r'op_name="([^"]*)"', i.attributes)
  return match[1] if match else ''


def replica_groups(attributes: str, devices: int) -> np.ndarray:
  """Groups of devices that communicate, [groups, members], as positions in the mesh.

  Notations: [2,4]<=[4,2]T(1,0) means arange(8).reshape(4, 2).T.reshape(2, 4), one group per row.
  mesh['x'=4,'y'=2] {'y'} groups devices that differ along y alone, in the order of device_ids=([2,4]T(1,0)) if given.
  {} or nothing means one group of all. Raises ValueError for other notations, as a guess would misstate the traffic.
  """
  if iota := re.search(r'replica_groups=\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)', attributes):
    return _iota(iota[2]).reshape(_numbers(iota[1]))
  if mesh := re.search(
    r'replica_groups=mesh\[(.*?)\](?:, device_ids=\((.*?)\))? \{(.*?)\}', attributes
  ):
    return _along(*mesh.groups())
  for name in ('replica_groups', 'source_target_pairs'):
    if listed := re.search(rf'{name}=\{{(\{{[\d,{{}}]*\}})\}}', attributes):
      return np.array([_numbers(group) for group in re.findall(r'[\d,]+\d|\d', listed[1])])
  unknown = re.search(r'replica_groups=(?!\{\}).{0,80}', attributes)
  if unknown:
    raise ValueError(f'unknown notation for groups of devices: {unknown[0]}')
  return np.arange(devices)[None]


def _along(mesh: str, order: str | None, axes: str) -> np.ndarray:
  """Groups of devices that differ along `axes` alone; 'x':(2)4 is the factor 4 of x that follows its factor 2."""
  sizes = {name: int(n) for name, n in re.findall(r"'([^']+)'=(\d+)", mesh)}
  factors = [
    (name, int(major or 1), int(size or sizes[name]))
    for name, major, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", axes)
  ]
  dims, is_member_dim = [], []
  for axis, n in sizes.items():
    ranges = [(major, major * size) for name, major, size in factors if name == axis]
    edges = sorted({1, n, *(edge for pair in ranges for edge in pair)})
    for low, high in zip(edges, edges[1:], strict=False):
      dims.append(high // low)
      is_member_dim.append(any(a <= low and high <= b for a, b in ranges))
  count = math.prod(sizes.values())
  ids = np.arange(count) if order is None else _iota(order)
  permutation = np.argsort(is_member_dim, kind='stable')  # dimensions within a group come last
  members = math.prod(d for d, is_member in zip(dims, is_member_dim, strict=True) if is_member)
  return ids.reshape(dims or [1]).transpose(permutation if dims else [0]).reshape(-1, members)


def _iota(text: str) -> np.ndarray:
  """[4,2]T(1,0) → arange(8).reshape(4, 2).T, flattened; or a list of numbers."""
  match = re.fullmatch(r'\[([\d,]+)\](?:T\(([\d,]+)\))?', text)
  if not match:
    return np.array(_numbers(text))
  ids = np.arange(math.prod(_numbers(match[1]))).reshape(_numbers(match[1]))
  return (ids.transpose(_numbers(match[2])) if match[2] else ids).reshape(-1)


def _numbers(text: str) -> list[int]:
  return [int(n) for n in text.split(',')]

"""Traffic between slices, over the data-center network (DCN), of the collectives of a compiled program.

The unit is bytes that a device receives from other slices in one execution of a collective, as a mean over devices;
callers multiply by the executions in a run of the program. Slices are of one size, so as many bytes leave a device.
Counted are elements in their type, without padding to tiles, as the best algorithm exchanges them: it sums within a
slice first, and each device of a slice exchanges its share.

CPUs and GPUs run one program on all devices, and the groups of a collective span slices. Each slice of TPUs has a
program of its own: an exchange with other slices is a pair of `send` and `recv` with the host.
"""

from __future__ import annotations

import re

import numpy as np

from jaxrl_llm.profiling import hlo

_TRANSFER_TYPE = re.compile(r'_xla_megascale_transfer_type="(\w+)"')


def crossing_share(opcode: str, attributes: str, devices: int, slice_size: int) -> float:
  """Bytes that a device receives from other slices, as a share of the collective's size.

  The size is that of a whole gathered or summed array. Of a group of n devices in s slices, it crosses s − 1 times, for
  an all-reduce twice, and each device receives 1 / n of that. Rows for other devices cross where their slices differ,
  and a permutation as often as its pairs do. `slice_size`: consecutive devices of a slice, 0 = all.
  """
  if not slice_size:
    return 0.0
  groups = hlo.replica_groups(attributes, devices) // slice_size
  if opcode == 'collective-permute':
    return float((groups[:, 0] != groups[:, 1]).sum() / devices)
  crossings = 0.0
  for group in groups:
    sizes = np.unique(group, return_counts=True)[1]
    if opcode == 'all-to-all':
      crossings += float((sizes * (len(group) - sizes)).sum() / len(group))
    else:
      crossings += (2 if opcode == 'all-reduce' else 1) * (len(sizes) - 1)
  return crossings / devices


def is_transfer(i: hlo.Instruction) -> bool:
  """Whether a TPU hands an array to its host, which exchanges it with other slices."""
  return i.opcode == 'send' and _TRANSFER_TYPE.search(i.attributes) is not None


def transfer(i: hlo.Instruction) -> tuple[str, float, float]:
  """(kind, bytes handed over, bytes received from other slices) of a transfer.

  The program has summed or scattered the array within the slice before. A device receives what the collective of this
  kind needs at least. Raises ValueError for an unknown notation, and for an unknown kind.
  """
  kind = (_TRANSFER_TYPE.search(i.attributes) or ('', ''))[1]
  s = len(_slices_of(i.attributes))
  shares = {
    'ALL_REDUCE': 2 * (s - 1) / s,
    'ALL_GATHER': s - 1.0,
    'REDUCE_SCATTER': (s - 1) / s,
    'ALL_TO_ALL': (s - 1) / s,
  }
  size_bytes = sum(a.bytes for a in i.arrays if a.dims)  # besides a number for the context
  return kind.lower().replace('_', '-'), size_bytes, size_bytes * shares.get(kind, 1.0)


def _slices_of(attributes: str) -> list[int]:
  """The slices of one group of an exchange: 1 and 2 of {1,2}x{0:15}, 1 to 4 of {1:4}x{0:15}."""
  target = re.search(r'_xla_megascale_target="\{*([\d,:]+)\}', attributes)
  if target is None:
    raise ValueError(f'unknown notation for slices: {attributes[:200]}')
  ids: list[int] = []
  for part in target[1].split(','):
    first, _, last = part.partition(':')
    ids += range(int(first), int(last or first) + 1)
  return ids

"""Traffic between slices, over the data-center network (DCN), of the collectives of a compiled program.

CPUs and GPUs run one program on all devices, and the groups of a collective span slices. Each slice of TPUs has a
program of its own: an exchange with other slices is a pair of `send` and `recv` with the host.
"""

from __future__ import annotations

import re

from jaxrl_llm.profiling import hlo

_TRANSFER_TYPE = re.compile(r'_xla_megascale_transfer_type="(\w+)"')


def crossing_share(opcode: str, attributes: str, devices: int, slice_size: int) -> float:
  """Bytes that a device receives from other slices, as a share of the collective's size.

  Of a group of s slices with m devices each, a device receives its 1 / m of what the slice lacks, and the rest over
  the slice's own links; both together are the bytes of one ring. Rows for other devices cannot be shared, and a
  permutation crosses as often as its pairs do. `slice_size`: consecutive devices of a slice, 0 = all.
  """
  if not slice_size:
    return 0.0
  groups = hlo.replica_groups(attributes, devices) // slice_size
  if opcode == 'collective-permute':
    return float((groups[:, 0] != groups[:, 1]).sum() / devices)
  s = max(len(set(group)) for group in groups.tolist())
  m = groups.shape[1] / s
  share = {'all-reduce': 2 / m, 'all-to-all': 1.0}
  return (s - 1) / s * share.get(opcode, 1 / m)


def is_transfer(i: hlo.Instruction) -> bool:
  """Whether a TPU hands an array to its host, which exchanges it with other slices."""
  return i.opcode == 'send' and _TRANSFER_TYPE.search(i.attributes) is not None


def transfer(i: hlo.Instruction) -> tuple[str, float, float]:
  """(kind, bytes handed over, bytes received from other slices) of a transfer.

  A device receives what the collective of this kind needs at least. Raises ValueError for an unknown notation.
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

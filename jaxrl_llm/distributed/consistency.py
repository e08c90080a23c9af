"""Whether all processes of a run hold the same on their hosts: a hash of each part, compared now and then.

Each process chooses prompts, grades and learns on its own copy of the curriculum. One that drifts (another library,
another file, an order that chance decided) would feed its devices another batch than the others, and nothing else
would tell.
"""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxrl_llm.types import UserError


def check(step: int, held: dict[str, Any]) -> None:
  """Raises UserError, on all processes, where a part of `held` is not the same on all; all of them call it.

  Only one integer for each part crosses.
  """
  codes_K = np.array([digest(part) for part in held.values()], np.int32)
  told = difference(list(held), multihost_utils.process_allgather(codes_K))
  if told:
    raise UserError(
      f'at step {step} {told} (config.processes.same_every): all must compute the same. See that command, code, '
      'packages and files are the same, and start the same command again: the run resumes at its last checkpoint.'
    )


def difference(names: Sequence[str], codes_DxK: np.ndarray) -> str:
  """Who holds what that most others, or with as many on both sides process 0, do not; '' for nobody."""
  found: dict[int, list[str]] = {}
  for name, code_D in zip(names, np.asarray(codes_DxK).T.tolist(), strict=True):
    (usual, _), *_ = collections.Counter(code_D).most_common(1)
    for process in (d for d, code in enumerate(code_D) if code != usual):
      found.setdefault(process, []).append(name)
  return ' and '.join(
    f'process {process} of {len(codes_DxK)} holds other {", ".join(parts)} than the rest'
    for process, parts in sorted(found.items())
  )


def digest(value: Any) -> int:
  """32 bits, signed, of nested dicts, sequences, arrays, numbers and texts: the same on every machine."""
  hashed = hashlib.blake2b(digest_size=4)
  _feed(hashed, value)
  return int.from_bytes(hashed.digest(), 'little', signed=True)


def _feed(hashed: Any, value: Any) -> None:
  """Each value with its kind and size, so that none can be taken for two others."""
  if isinstance(value, dict):
    hashed.update(f'dict {len(value)};'.encode())
    for key in sorted(value, key=str):
      _feed(hashed, str(key))
      _feed(hashed, value[key])
  elif isinstance(value, list | tuple):
    hashed.update(f'list {len(value)};'.encode())
    for part in value:
      _feed(hashed, part)
  elif isinstance(value, np.ndarray | np.generic | jax.Array):
    array = np.ascontiguousarray(value)
    hashed.update(f'array {array.dtype.str} {array.shape};'.encode())
    hashed.update(array.tobytes())
  else:
    text = repr(value).encode(errors='surrogatepass')
    hashed.update(f'{type(value).__name__} {len(text)};'.encode() + text)

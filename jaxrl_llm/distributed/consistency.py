"""Consistency check: all processes of a run must have the same host state, which they compare by hashes.

Each process chooses prompts and updates its own copy of the curriculum. A process that diverges (another library
version, another file, a nondeterministic order) would feed its devices another batch, silently.
"""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxrl_llm.types import JsonObject, UserError


def check(step: int, state: JsonObject) -> None:
  """Raise UserError on all processes if a part of `state` differs between them; all processes call it.

  Processes exchange one integer per part.
  """
  hash_K = np.array([digest(part) for part in state.values()], np.int32)
  differing = difference(list(state), multihost_utils.process_allgather(hash_K))
  if differing:
    raise UserError(
      f'at step {step} {differing} (config.processes.same_every): all must compute the same. Check that command, code, '
      'packages and files are the same, and start the same command again: the run resumes at its last checkpoint.'
    )


def difference(names: Sequence[str], hash_DxK: np.ndarray) -> str:
  """The processes and parts that differ from the majority, or from process 0 in a tie; '' if all agree."""
  differing: dict[int, list[str]] = {}
  for name, hash_D in zip(names, np.asarray(hash_DxK).T.tolist(), strict=True):
    (majority, _), *_ = collections.Counter(hash_D).most_common(1)
    for process in (d for d, code in enumerate(hash_D) if code != majority):
      differing.setdefault(process, []).append(name)
  return ' and '.join(
    f'process {process} of {len(hash_DxK)} holds other {", ".join(parts)} than the rest'
    for process, parts in sorted(differing.items())
  )


def digest(value: Any) -> int:
  """A signed 32-bit hash of nested dicts, sequences, arrays, numbers and strings, equal on every machine."""
  hashed = hashlib.blake2b(digest_size=4)
  _feed(hashed, value)
  return int.from_bytes(hashed.digest(), 'little', signed=True)


def _feed(hashed: hashlib.blake2b, value: Any) -> None:
  """Hash each value with its kind and size, so that different structures differ."""
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

"""A lock on a run directory in an object store: an object that its owner rewrites while it lives.

Each write is conditional on the generation that was last seen. tensorstore checks the condition of S3 by a request
before the write, so that two processes that start within milliseconds may both succeed; one of them finds this at its
next renewal, at the latest before the marker of a checkpoint. A lock that does not change for a while is that of a
killed process and is taken over; clocks are never compared.
"""

from __future__ import annotations

import json
import secrets
import threading
import time

from absl import logging

from jaxrl_llm.checkpointing.object_store import Store
from jaxrl_llm.types import UserError

KEY = 'lock.json'
LEASE_S = 60.0  # without a renewal; the owner renews several times as often


class Lock:
  """The lock of this process on the directory of a store."""

  def __init__(self, store: Store, owner: str, lease_s: float = LEASE_S):
    """`owner` names this machine; the caller made sure that no other process of the same owner is alive."""
    self._store, self._owner, self.lease_s = store, owner, lease_s
    self._token, self._count, self._generation = secrets.token_hex(8), 0, b''
    self._conditional, self._mutex = True, threading.Lock()

  def acquire(self) -> None:
    """Takes the lock, after waiting for the owner's next renewal if there is one. Raises UserError if it is alive."""
    content, before = self._store.read_versioned(KEY)
    if content is not None and self._other_owner(content):
      logging.warning(
        '%s is locked by %s; this start goes on if that process does not renew the lock within %.0f s.',
        self._store.url, self._other_owner(content), self.lease_s,
      )  # fmt: skip
      before = self._wait(content)
    if not self._write(before):
      raise UserError(self._in_use('another process'))
    # The generation before the write is outdated: a store that accepts it ignores conditions.
    if self._write(before):
      self._conditional = False
      logging.warning(
        '%s has no conditional writes: a second run in the same directory on another machine may not be noticed.',
        self._store.url,
      )

  def renew(self) -> None:
    """Shows that this process lives. Raises UserError if another one has taken the lock over."""
    with self._mutex:
      if not (self._conditional or self._is_mine()) or not self._write(self._generation):
        raise UserError(self._lost())

  def release(self) -> None:
    """Removes the lock, unless another process has it."""
    with self._mutex:
      if self._conditional or self._is_mine():
        self._store.write_if(KEY, None, self._generation)

  def _is_mine(self) -> bool:
    content, self._generation = self._store.read_versioned(KEY)
    return content is not None and self._token.encode() in content

  def _write(self, expected: bytes) -> bool:
    self._count += 1  # the generation of S3 is a hash of the content
    fields = dict(owner=self._owner, token=self._token, count=self._count)
    content = json.dumps(fields).encode()
    generation = self._store.write_if(KEY, content, expected)
    if generation is None:  # a retry of a write whose reply was lost finds its own content
      found, generation = self._store.read_versioned(KEY)
      if found != content:
        return False
    self._generation = generation
    return True

  def _wait(self, content: bytes) -> bytes:
    """Waits for the lease; returns the generation to replace."""
    deadline = time.monotonic() + self.lease_s
    while True:
      newest, generation = self._store.read_versioned(KEY)
      if newest is None:  # released meanwhile
        return generation
      if newest != content:
        raise UserError(self._in_use(self._other_owner(newest) or 'this machine'))
      if time.monotonic() > deadline:
        return generation
      time.sleep(min(1.0, self.lease_s / 10))

  def _other_owner(self, content: bytes) -> str:
    """The owner in the lock if it is another one, or ''."""
    try:
      owner = str(json.loads(content)['owner'])
    except (ValueError, KeyError, TypeError):
      owner = 'an unknown process'
    return '' if owner == self._owner else owner

  def _in_use(self, by: str) -> str:
    return f'--workdir={self._store.url} is in use by {by}; wait for it, or give another --workdir.'

  def _lost(self) -> str:
    return (
      f'--workdir={self._store.url} was taken over by another process while this one could not reach the store; '
      'nothing more is written there.'
    )

"""One end of the two pipes: sends requests to the other side, and serves its requests in the meantime."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from typing import BinaryIO

from jaxrl_llm.rewards.code_execution.guest_protocol import wire
from jaxrl_llm.rewards.code_execution.guest_protocol.wire import Packed, Value

_LINE_BYTES = 1 << 26  # a longer message is cut, and a cut message is invalid
# Containers that are compared before every message, and their items.
_MOST_SHARED, _MOST_ITEMS = 64, 2000


class Peer:
  """The common part of both sides. A subclass defines references to objects (export, find) and operations (perform).

  Messages: ['request', [name, arguments, keywords], changed containers, printed text]. Replies: ['value', value, …] or
  ['raise', error, …]. A reference is ['mine' or 'theirs', number, …] to an object of the sending side, and
  ['yours', number] to one of the receiving side.
  """

  sign = 1  # sign of the numbers that this side assigns to containers

  def __init__(self, read: BinaryIO, write: BinaryIO):
    self._read, self._write = read, write
    self._lock = threading.RLock()
    self._numbers: dict[int, int] = {}  # id → number, of own objects that were sent
    # number → own object; keeps it alive, so that its id stays unique
    self.objects: dict[int, Value] = {}
    self.stand_ins: dict[int, Value] = {}  # number → stand-in for an object of the other side
    self.number_of: dict[int, int] = {}  # id of a stand-in → number
    self._containers: dict[int, Value] = {}  # number → list, dict, …
    self._container_of: dict[int, int] = {}  # id → number
    self._last: dict[int, Packed] = {}  # number → content at the last message, equal on both sides
    self._fresh: list[int] = []  # numbers of the containers in the message that is being read
    self._depth, self._count, self._sharing = 0, 0, True

  def request(self, name: str, /, *args: Value, **keywords: Value) -> Value:
    """Perform an operation on the other side; return its value or raise its error."""
    with self._lock:
      self._depth += 1
      try:
        self._sharing = True
        packed = [name, [wire.pack(arg, self) for arg in args]]
        packed.append({key: wire.pack(value, self) for key, value in keywords.items()})
        self._send('request', packed)
        return self._receive()
      finally:
        self._depth -= 1
        self._trim()

  def number(self, value: Value) -> int:
    """The number of an own object, by which the other side refers to it."""
    if id(value) not in self._numbers:
      self._numbers[id(value)] = len(self._numbers) + 1
      self.objects[self._numbers[id(value)]] = value
    return self._numbers[id(value)]

  def stand_in(self, number: int, value: Value) -> Value:
    """Register `value` as the stand-in for an object of the other side, and return it."""
    self.stand_ins[number] = value
    self.number_of[id(value)] = number
    return value

  def share(self, value: Value) -> int:
    """The number of a container, or 0 for one whose changes need not reach the other side."""
    number = self._container_of.get(id(value), 0)
    if not number and self._sharing:
      self._count += 1
      number = self.sign * self._count
      self._containers[number], self._container_of[id(value)] = value, number
      self._last[number] = None  # set after the message is encoded
    return number

  def shared(self, number: int, value: Value) -> Value:
    """The container of that number with the content of `value`; `value` itself where there is none yet."""
    if not number:
      return value
    container = self._containers.get(number)
    if type(container) is type(value):
      wire.replace_content(container, value)
    else:
      container = self._containers[number] = value
      self._container_of[id(value)] = number
    self._fresh.append(number)
    return container

  def serve(self, line: bytes) -> None:
    """Perform a request and send its value or error."""
    with self._lock:
      self._depth += 1
      try:
        self._reply(json.loads(line))
      finally:
        self._depth -= 1
        self._trim()

  def _reply(self, message: list) -> None:
    try:
      name, args, keywords = self._payload(message)
      args = [wire.unpack(arg, self) for arg in args]
      keywords = {key: wire.unpack(value, self) for key, value in keywords.items()}
      self._record_contents()
      value = self.perform(name, args, keywords)
      # A function's result is usually a new container; either side may change one that an object holds.
      self._sharing = name in ('name', '__getattr__')
      reply = 'value', wire.pack(value, self)
    except BaseException as error:
      self._sharing = False
      reply = 'raise', self.pack_error(error)
    self._send(*reply)

  def _receive(self) -> Value:
    while True:
      line = self._read.readline(_LINE_BYTES)
      message = json.loads(line)
      if message[0] == 'request':
        self._reply(message)
        continue
      packed = self._payload(message)
      value = wire.unpack(packed, self) if message[0] == 'value' else self.unpack_error(packed)
      self._record_contents()
      if message[0] == 'value':
        return value
      raise value

  def _send(self, kind: str, packed: Packed) -> None:
    message = [kind, packed, self._changes(kind), self.printed()]
    self._write.write(json.dumps(message).encode() + b'\n')
    self._write.flush()

  def _payload(self, message: list) -> Packed:
    """The payload of a message, after applying the output and the changes of the other side."""
    _, packed, changed, text = message
    self.print(text)
    for container in changed:
      wire.unpack(container, self)
    return packed

  def _record_contents(self) -> None:
    """Record the content of the containers of a received message."""
    while self._fresh:
      number = self._fresh.pop()
      if number in self._containers:
        self._last[number] = self._content(number)

  def _changes(self, kind: str) -> list:
    """Containers whose content differs from the last message."""
    if (kind == 'request' or self._depth > 1) and self._items() > _MOST_ITEMS:
      return []  # otherwise each callback of a sort would cost as much as the whole list
    changed = []
    for number in [*self._containers]:
      before, now = self._last.get(number), self._content(number)
      if before is not None and now != before:
        changed.append(now)
      self._last[number] = now
    return changed

  def _content(self, number: int) -> Packed:
    with self.unshared():
      return wire.pack(self._containers[number], self)

  @contextlib.contextmanager
  def unshared(self) -> Iterator[None]:
    """A context in which containers get no new numbers."""
    sharing, self._sharing = self._sharing, False
    try:
      yield
    finally:
      self._sharing = sharing

  def _trim(self) -> None:
    """Between two calls, track only a few small containers."""
    if self._depth:
      return
    items = self._items()
    for number in [*self._containers]:
      if len(self._containers) <= _MOST_SHARED and items <= _MOST_ITEMS:
        break
      dropped = self._containers.pop(number)
      items -= len(dropped)
      self._container_of.pop(id(dropped), None)
      self._last.pop(number, None)

  def _items(self) -> int:
    return sum(map(len, self._containers.values()))

  def export(self, value: Value) -> list:
    """The reference to an object that has no encoding by content."""
    raise NotImplementedError

  def find(self, kind: str, *packed: Packed) -> Value:
    """The object, or its stand-in, of a reference."""
    raise NotImplementedError

  def perform(self, name: str, args: list, keywords: dict) -> Value:
    """The value of a requested operation."""
    raise NotImplementedError

  def pack_error(self, error: BaseException) -> list:
    """An error as JSON."""
    raise NotImplementedError

  def unpack_error(self, packed: list) -> BaseException:
    """The error of JSON from `pack_error` of the other side."""
    raise NotImplementedError

  def printed(self) -> str:
    """Text printed since the last message."""
    return ''

  def print(self, text: str) -> None:
    """Print text that the other side has printed."""

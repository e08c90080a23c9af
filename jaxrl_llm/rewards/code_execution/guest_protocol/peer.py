"""One end of the two pipes: asks the other side to do something, and does what the other side asks meanwhile."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from typing import Any

from jaxrl_llm.rewards.code_execution.guest_protocol import wire

_LINE_BYTES = 1 << 26  # beyond it a message is cut, and what is cut is no message
_MOST_SHARED, _MOST_ITEMS = (
  64,
  2000,
)  # containers that are compared before every message, and their items


class Peer:
  """What both sides have in common. A subclass says how objects cross (export, find) and what it does (do).

  Messages: ['ask', [name, arguments, keywords], changed containers, printed text], and as an answer ['value', value, …]
  or ['raise', error, …].
  """

  sign = 1  # of the numbers of containers that this side numbers

  def __init__(self, read: Any, write: Any):
    self._read, self._write = read, write
    self._lock = threading.RLock()
    self._numbers: dict[int, int] = {}  # id → number, of own objects that crossed
    self.own: dict[int, Any] = {}  # number → object: they stay alive, so that an id stays their own
    self.stand_ins: dict[int, Any] = {}  # number → what stands for an object of the other side
    self.number_of: dict[int, int] = {}  # id of such a stand-in → number
    self._containers: dict[int, Any] = {}  # number → list, dict, …
    self._container_of: dict[int, int] = {}  # id → number
    self._last: dict[int, Any] = {}  # number → content when both sides had the same
    self._fresh: list[int] = []  # containers of the message that is being read
    self._depth, self._count, self._sharing = 0, 0, True

  def ask(self, name: str, /, *args: Any, **keywords: Any) -> Any:
    """Has the other side do something and returns its value, or raises its error."""
    with self._lock:
      self._depth += 1
      try:
        self._sharing = True
        packed = [name, [wire.pack(arg, self) for arg in args]]
        packed.append({key: wire.pack(value, self) for key, value in keywords.items()})
        self._send('ask', packed)
        return self._hear()
      finally:
        self._depth -= 1
        self._trim()

  def number(self, value: Any) -> int:
    """The number of an own object, by which the other side refers to it."""
    if id(value) not in self._numbers:
      self._numbers[id(value)] = len(self._numbers) + 1
      self.own[self._numbers[id(value)]] = value
    return self._numbers[id(value)]

  def stand_in(self, number: int, made: Any) -> Any:
    """Remembers what stands for an object of the other side."""
    self.stand_ins[number] = made
    self.number_of[id(made)] = number
    return made

  def share(self, value: Any) -> int:
    """The number of a container, or 0 for one whose changes need not reach the other side."""
    found = self._container_of.get(id(value), 0)
    if not found and self._sharing:
      self._count += 1
      found = self.sign * self._count
      self._containers[found], self._container_of[id(value)] = value, found
      self._last[found] = None  # filled after the message is made
    return found

  def shared(self, number: int, made: Any) -> Any:
    """The container of that number with the content of `made`; `made` itself where there is none yet."""
    if not number:
      return made
    mine = self._containers.get(number)
    if type(mine) is type(made):
      wire.become(mine, made)
    else:
      mine = self._containers[number] = made
      self._container_of[id(made)] = number
    self._fresh.append(number)
    return mine

  def serve(self, line: bytes) -> None:
    """Does what a message asks and sends its value or error."""
    with self._lock:
      self._depth += 1
      try:
        self._reply(json.loads(line))
      finally:
        self._depth -= 1
        self._trim()

  def _reply(self, message: list) -> None:
    try:
      name, args, keywords = self._taken(message)
      args = [wire.unpack(arg, self) for arg in args]
      keywords = {key: wire.unpack(value, self) for key, value in keywords.items()}
      self._settle()
      value = self.do(name, args, keywords)
      # What a function returns is new as a rule; what an object holds may be changed by either side.
      self._sharing = name in ('name', '__getattr__')
      reply = 'value', wire.pack(value, self)
    except BaseException as error:
      self._sharing = False
      reply = 'raise', self.pack_error(error)
    self._send(*reply)

  def _hear(self) -> Any:
    while True:
      line = self._read.readline(_LINE_BYTES)
      message = json.loads(line)
      if message[0] == 'ask':
        self._reply(message)
        continue
      packed = self._taken(message)
      value = wire.unpack(packed, self) if message[0] == 'value' else self.unpack_error(packed)
      self._settle()
      if message[0] == 'value':
        return value
      raise value

  def _send(self, kind: str, packed: Any) -> None:
    message = [kind, packed, self._changes(kind), self.printed()]
    self._write.write(json.dumps(message).encode() + b'\n')
    self._write.flush()

  def _taken(self, message: list) -> Any:
    """The payload of a message, after what was printed and changed on the other side."""
    _, packed, changed, text = message
    self.print(text)
    for container in changed:
      wire.unpack(container, self)
    return packed

  def _settle(self) -> None:
    """Notes the content of the containers that a message brought."""
    while self._fresh:
      number = self._fresh.pop()
      if number in self._containers:
        self._last[number] = self._content(number)

  def _changes(self, kind: str) -> list:
    """Containers that are not what they were in the last message."""
    if (kind == 'ask' or self._depth > 1) and self._items() > _MOST_ITEMS:
      return []  # else a callback would cost as much as the list that is being sorted by it
    found = []
    for number in [*self._containers]:
      before, now = self._last.get(number), self._content(number)
      if before is not None and now != before:
        found.append(now)
      self._last[number] = now
    return found

  def _content(self, number: int) -> Any:
    with self.unshared():
      return wire.pack(self._containers[number], self)

  @contextlib.contextmanager
  def unshared(self) -> Iterator[None]:
    """While containers get no numbers but those that they have."""
    sharing, self._sharing = self._sharing, False
    try:
      yield
    finally:
      self._sharing = sharing

  def _trim(self) -> None:
    """Between two calls only small containers, and not many, are watched."""
    if self._depth:
      return
    items = self._items()
    for number in [*self._containers]:
      if len(self._containers) <= _MOST_SHARED and items <= _MOST_ITEMS:
        break
      gone = self._containers.pop(number)
      items -= len(gone)
      self._container_of.pop(id(gone), None)
      self._last.pop(number, None)

  def _items(self) -> int:
    return sum(map(len, self._containers.values()))

  def export(self, value: Any) -> list:
    raise NotImplementedError

  def find(self, kind: str, *packed: Any) -> Any:
    raise NotImplementedError

  def do(self, name: str, args: list, keywords: dict) -> Any:
    raise NotImplementedError

  def pack_error(self, error: BaseException) -> list:
    raise NotImplementedError

  def unpack_error(self, packed: list) -> BaseException:
    raise NotImplementedError

  def printed(self) -> str:
    """Text printed since the last message."""
    return ''

  def print(self, text: str) -> None:
    """Prints what the other side has printed."""

"""Chat completions over HTTP, asked by several processes that share one file: cache, rate limit and budget.

The file is an SQLite data base: what a killed worker had begun to write is undone, and what others wrote stays.
"""

from __future__ import annotations

import contextlib
import dataclasses
import email.utils
import functools
import hashlib
import http.client
import io
import json
import os
import random
import socket
import sqlite3
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

_MOST_BYTES = 2**22  # of an answer
_BACK_OFF_S = (0.5, 30.0)  # the first, and the longest
_FAR_S = 3600.0  # a turn further away was booked by a clock that was wrong
_SCHEMA = (
  'PRAGMA journal_mode=WAL',
  'CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, reply TEXT NOT NULL)',
  'CREATE TABLE IF NOT EXISTS spent (id INTEGER PRIMARY KEY, requests INTEGER, tokens INTEGER, next_at REAL)',
  'INSERT OR IGNORE INTO spent VALUES (0, 0, 0, 0.0)',
)


class EndpointError(RuntimeError):
  """No answer was to be had; the message says why, and never holds the key."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Endpoint:
  """Where to ask, and how much: the settings that all graders have that ask a judge."""

  base_url: str
  model: str
  cache: str  # the file
  key_env: str = ''  # the environment variable with the key; '' = none is sent
  per_minute: int = 0  # requests, evenly spaced; 0 = no limit
  most_requests: int = 0  # in the life of the file, tries that failed included; 0 = no limit
  most_tokens: int = 0  # as the server counts them; 0 = no limit
  retries: int = 5
  request_s: float = 30.0  # from the connection to the last byte of the answer
  give_up_s: float = 60.0  # for all that one grading asks, with all retries and waits
  reply_tokens: int = 1024  # 0 = not told
  greedy: bool = True

  def cached(self, messages: list[dict[str, str]]) -> str | None:
    """The answer that was kept. Source: none."""
    with opened(self.cache) as db:
      found = db.execute(
        'SELECT reply FROM replies WHERE key = ?', (self._key(messages),)
      ).fetchone()
    return found[0] if found else None

  def keep(self, messages: list[dict[str, str]], reply: str) -> None:
    """Keeps an answer, for these messages and this model. Source: none."""
    with opened(self.cache) as db:
      db.execute('INSERT OR REPLACE INTO replies VALUES (?, ?)', (self._key(messages), reply))

  def until(self) -> float:
    """When what is begun now is given up, by time.monotonic. Source: none."""
    return time.monotonic() + self.give_up_s

  def ask(self, messages: list[dict[str, str]], end: float) -> str:
    """The answer of the server; 408, 429, 5xx, time-outs and garbage are tried again, later and later.

    Raises EndpointError when there is none by `end`, on any other status, and where the budget is spent. Source: none.
    """
    if time.monotonic() >= end:
      raise EndpointError(f'give_up_s={self.give_up_s} went by before all was asked')
    for attempt in range(self.retries + 1):
      _sleep(self._turn(end - time.monotonic()))
      reply, why, wait_s = self._once(messages, min(self.request_s, end - time.monotonic()))
      if reply is not None:
        return reply
      first_s, most_s = _BACK_OFF_S
      wait_s = max(wait_s, min(first_s * 2**attempt, most_s) * (0.5 + random.random() / 2))
      if attempt < self.retries and wait_s < end - time.monotonic():
        _sleep(wait_s)
      else:
        break
    raise EndpointError(f'the judge gave no answer in {attempt + 1} tries; the last: {why}')

  def _turn(self, left_s: float) -> float:
    """Books a request of the budget and its turn, and returns how long to wait for that."""
    with opened(self.cache) as db:
      db.execute('BEGIN IMMEDIATE')
      requests, tokens, next_at = db.execute(
        'SELECT requests, tokens, next_at FROM spent'
      ).fetchone()
      for spent, most, name in (
        (requests, self.most_requests, 'most_requests'),
        (tokens, self.most_tokens, 'most_tokens'),
      ):
        if most and spent >= most:
          raise EndpointError(f'the budget of the judge is spent: {name}={most} in {self.cache}')
      now = time.time()
      at = max(now, next_at) if self.per_minute and next_at < now + _FAR_S else now
      if at - now >= left_s:
        raise EndpointError(
          f'per_minute={self.per_minute} leaves no turn within give_up_s={self.give_up_s}'
        )
      at_next = at + 60 / self.per_minute if self.per_minute else 0.0
      db.execute('UPDATE spent SET requests = requests + 1, next_at = ?', (at_next,))
      db.execute('COMMIT')
    return at - now

  def _once(self, messages: list, timeout_s: float) -> tuple[str | None, str, float]:
    """(answer, or None and why not, and how long the server asks to wait)."""
    body: dict[str, Any] = dict(model=self.model, messages=messages)
    body |= dict(temperature=0) if self.greedy else {}
    body |= dict(max_tokens=self.reply_tokens) if self.reply_tokens else {}
    headers = {'Content-Type': 'application/json', 'User-Agent': 'jaxrl_llm'}
    if self.key_env:
      headers['Authorization'] = f'Bearer {os.environ.get(self.key_env, "")}'
    url = f'{self.base_url.rstrip("/")}/chat/completions'
    request = urllib.request.Request(url, json.dumps(body).encode(), headers, method='POST')
    try:
      with _OPENER.open(request, timeout=max(timeout_s, 0.01)) as response:
        told = json.loads(response.read(_MOST_BYTES))
      self._spend(told.get('usage') or {})
      reply = told['choices'][0]['message']['content']
      return (reply, '', 0.0) if isinstance(reply, str) else (None, 'an answer without text', 0.0)
    except urllib.error.HTTPError as error:
      error.close()
      if error.code not in (408, 429) and error.code < 500:
        raise EndpointError(f'the judge refuses with status {error.code}') from None
      return None, f'status {error.code}', _retry_after(error.headers.get('Retry-After'))
    except (OSError, http.client.HTTPException) as error:
      return None, f'{type(error).__name__}: {error}', 0.0
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
      return None, 'an answer that is no chat completion', 0.0

  def _spend(self, usage: dict[str, Any]) -> None:
    tokens = usage.get('total_tokens')
    if isinstance(tokens, int) and tokens > 0:
      with opened(self.cache) as db:
        db.execute('UPDATE spent SET tokens = tokens + ?', (tokens,))
    elif self.most_tokens:
      raise EndpointError(
        f'the judge does not tell its usage, which most_tokens={self.most_tokens} needs'
      )

  def _key(self, messages: list[dict[str, str]]) -> str:
    told = json.dumps([self.model, messages], sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(told.encode()).hexdigest()


@contextlib.contextmanager
def opened(path: str) -> Iterator[sqlite3.Connection]:
  """The file's data base, made where it is missing; every statement is written at once, but between BEGIN and COMMIT.

  Raises OSError and sqlite3.Error. Source: none.
  """
  os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
  with contextlib.closing(sqlite3.connect(path, timeout=30.0, isolation_level=None)) as db:
    if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'spent'").fetchone():
      for statement in _SCHEMA:
        db.execute(statement)
    yield db


class _NoRedirect(urllib.request.HTTPRedirectHandler):
  """The key goes to the server that the config names, and to none that this one names."""

  def redirect_request(self, *_: Any) -> None:
    return None


class _Bounded(io.RawIOBase):
  """What a socket receives until `end`, by time.monotonic; TimeoutError then.

  The time-out of a socket begins again with each byte, so that a slow enough server would hold a worker for ever.
  """

  def __init__(self, source: socket.socket, end: float):
    self._socket, self._end = source, end
    self._file = source.makefile('rb', buffering=0)

  def readable(self) -> bool:
    return True

  def readinto(self, buffer: Any) -> int | None:
    left_s = self._end - time.monotonic()
    if left_s <= 0:
      raise TimeoutError('timed out')
    self._socket.settimeout(left_s)
    return self._file.readinto(buffer)

  def close(self) -> None:
    self._file.close()
    super().close()


class _Response(http.client.HTTPResponse):
  def __init__(self, source: socket.socket, *args: Any, end: float, **keywords: Any):
    super().__init__(source, *args, **keywords)
    self.fp.close()
    self.fp = io.BufferedReader(_Bounded(source, end))


class _Deadline:
  """Makes the time-out of a connection one of the whole exchange: its responses end with it."""

  def __init__(self, *args: Any, **keywords: Any):
    super().__init__(*args, **keywords)
    self.response_class = functools.partial(_Response, end=time.monotonic() + self.timeout)


class _Http(_Deadline, http.client.HTTPConnection):
  pass


class _Https(_Deadline, http.client.HTTPSConnection):
  pass


class _HttpHandler(urllib.request.HTTPHandler):
  def http_open(self, request: urllib.request.Request) -> Any:
    return self.do_open(_Http, request)


class _HttpsHandler(urllib.request.HTTPSHandler):
  def https_open(self, request: urllib.request.Request) -> Any:
    return self.do_open(_Https, request)


_OPENER = urllib.request.build_opener(_NoRedirect, _HttpHandler, _HttpsHandler)


def _retry_after(told: str | None) -> float:
  """Seconds, from a number or a date; 0 where nothing readable is told."""
  try:
    return max(float(told), 0.0)
  except (TypeError, ValueError):
    pass
  try:
    return max(email.utils.parsedate_to_datetime(told).timestamp() - time.time(), 0.0)
  except (TypeError, ValueError, IndexError):
    return 0.0


def _sleep(seconds: float) -> None:
  if seconds > 0:
    time.sleep(seconds)

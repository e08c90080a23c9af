"""Chat completions over HTTP for several processes that share one file with cache, rate limit and budget.

The file is an SQLite database: an incomplete write of a killed worker is rolled back.
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

from jaxrl_llm.types import JsonObject

_MAX_BYTES = 2**22  # of an answer
_BACK_OFF_S = (0.5, 30.0)  # the first and the longest wait between attempts
_MAX_AHEAD_S = 3600.0  # a reserved time further ahead was written with a wrong clock
_SCHEMA = (
  'PRAGMA journal_mode=WAL',
  'CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, reply TEXT NOT NULL)',
  'CREATE TABLE IF NOT EXISTS spent (id INTEGER PRIMARY KEY, requests INTEGER, tokens INTEGER, next_at REAL)',
  'INSERT OR IGNORE INTO spent VALUES (0, 0, 0, 0.0)',
)


class EndpointError(RuntimeError):
  """The server gave no answer. The message has the reason and never the key."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Endpoint:
  """A server of chat completions and its limits: settings of all reward functions with a judge."""

  base_url: str
  model: str
  cache: str  # path of the SQLite file
  key_env: str = ''  # environment variable with the key; '' = no key
  per_minute: int = 0  # requests, evenly spaced; 0 = no limit
  most_requests: int = 0  # over the life of the file, including failed attempts; 0 = no limit
  most_tokens: int = 0  # as reported by the server; 0 = no limit
  retries: int = 5
  request_s: float = 30.0  # from the connection to the last byte of the answer
  give_up_s: float = 60.0  # for all requests of one grading, with retries and waits
  reply_tokens: int = 1024  # max_tokens of an answer; 0 = not sent
  greedy: bool = True

  def cached(self, messages: list[dict[str, str]]) -> str | None:
    """Returns the cached answer, or None."""
    with open_cache(self.cache) as db:
      entry = db.execute(
        'SELECT reply FROM replies WHERE key = ?', (self._key(messages),)
      ).fetchone()
    return entry[0] if entry else None

  def store(self, messages: list[dict[str, str]], reply: str) -> None:
    """Caches an answer for these messages and this model."""
    with open_cache(self.cache) as db:
      db.execute('INSERT OR REPLACE INTO replies VALUES (?, ?)', (self._key(messages), reply))

  def until(self) -> float:
    """Returns the time limit of a grading that begins now, by time.monotonic."""
    return time.monotonic() + self.give_up_s

  def ask(self, messages: list[dict[str, str]], end: float) -> str:
    """Returns the answer of the server. Status 408, 429, 5xx, time-outs and invalid answers are retried with back-off.

    Raises EndpointError without an answer by `end`, on any other status, and when the budget is spent.
    """
    if time.monotonic() >= end:
      raise EndpointError(f'give_up_s={self.give_up_s} passed before all requests were sent')
    for attempt in range(self.retries + 1):
      _sleep(self._reserve(end - time.monotonic()))
      reply, why, wait_s = self._attempt(messages, min(self.request_s, end - time.monotonic()))
      if reply is not None:
        return reply
      first_s, most_s = _BACK_OFF_S
      wait_s = max(wait_s, min(first_s * 2**attempt, most_s) * (0.5 + random.random() / 2))
      if attempt < self.retries and wait_s < end - time.monotonic():
        _sleep(wait_s)
      else:
        break
    raise EndpointError(f'the judge gave no answer in {attempt + 1} attempts; the last: {why}')

  def _reserve(self, left_s: float) -> float:
    """Reserves a request of the budget and a time for it. Returns the seconds to wait."""
    with open_cache(self.cache) as db:
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
      at = max(now, next_at) if self.per_minute and next_at < now + _MAX_AHEAD_S else now
      if at - now >= left_s:
        raise EndpointError(
          f'per_minute={self.per_minute} leaves no request within give_up_s={self.give_up_s}'
        )
      at_next = at + 60 / self.per_minute if self.per_minute else 0.0
      db.execute('UPDATE spent SET requests = requests + 1, next_at = ?', (at_next,))
      db.execute('COMMIT')
    return at - now

  def _attempt(
    self, messages: list[dict[str, str]], timeout_s: float
  ) -> tuple[str | None, str, float]:
    """Returns (answer or None, reason without an answer, seconds to wait as requested by the server)."""
    body: JsonObject = dict(model=self.model, messages=messages)
    body |= dict(temperature=0) if self.greedy else {}
    body |= dict(max_tokens=self.reply_tokens) if self.reply_tokens else {}
    headers = {'Content-Type': 'application/json', 'User-Agent': 'jaxrl_llm'}
    if self.key_env:
      headers['Authorization'] = f'Bearer {os.environ.get(self.key_env, "")}'
    url = f'{self.base_url.rstrip("/")}/chat/completions'
    request = urllib.request.Request(url, json.dumps(body).encode(), headers, method='POST')
    try:
      with _OPENER.open(request, timeout=max(timeout_s, 0.01)) as response:
        content = json.loads(response.read(_MAX_BYTES))
      self._spend(content.get('usage') or {})
      reply = content['choices'][0]['message']['content']
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

  def _spend(self, usage: JsonObject) -> None:
    tokens = usage.get('total_tokens')
    if isinstance(tokens, int) and tokens > 0:
      with open_cache(self.cache) as db:
        db.execute('UPDATE spent SET tokens = tokens + ?', (tokens,))
    elif self.most_tokens:
      raise EndpointError(
        f'the judge does not report its usage, which most_tokens={self.most_tokens} needs'
      )

  def _key(self, messages: list[dict[str, str]]) -> str:
    text = json.dumps([self.model, messages], sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


@contextlib.contextmanager
def open_cache(path: str) -> Iterator[sqlite3.Connection]:
  """Yields the database of the file, which is created if missing, in autocommit mode. Raises OSError, sqlite3.Error."""
  os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
  with contextlib.closing(sqlite3.connect(path, timeout=30.0, isolation_level=None)) as db:
    if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'spent'").fetchone():
      for statement in _SCHEMA:
        db.execute(statement)
    yield db


class _NoRedirect(urllib.request.HTTPRedirectHandler):
  """Follows no redirect, so that the key is only sent to the configured server."""

  def redirect_request(self, *_: Any) -> None:
    return None


class _Bounded(io.RawIOBase):
  """A stream of a socket that raises TimeoutError at `end`, a time of time.monotonic.

  The time-out of a socket restarts with each byte, so that a slow server could block a worker forever.
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
  """Applies the time-out of a connection to the whole exchange, including the response."""

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


def _retry_after(header: str | None) -> float:
  """Seconds of a Retry-After header, a number or a date; 0 without a readable one."""
  try:
    return max(float(header), 0.0)
  except (TypeError, ValueError):
    pass
  try:
    return max(email.utils.parsedate_to_datetime(header).timestamp() - time.time(), 0.0)
  except (TypeError, ValueError, IndexError):
    return 0.0


def _sleep(seconds: float) -> None:
  if seconds > 0:
    time.sleep(seconds)

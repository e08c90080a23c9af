"""A local server of chat completions as a judge, and the settings of a reward function that uses it."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
import time

import pytest

from jaxrl_llm import rewards
from jaxrl_llm.rewards.model_judge import http as http_lib
from jaxrl_llm.types import Row

ROW = Row('id', 'What is 3 + 4?', (), '7', 'sums', {})


class Server(http.server.ThreadingHTTPServer):
  """Answers by `answer(number of the request, its body)` → (status, headers, body), or the text of the judge."""

  daemon_threads = True

  def __init__(self):
    super().__init__(('127.0.0.1', 0), Handler)
    self.requests, self.answer, self.lock, self.free = [], None, threading.Lock(), threading.Event()
    # (number of the request) → parts that are sent at once, then byte by byte, then at once
    self.raw = None
    threading.Thread(target=self.serve_forever, daemon=True).start()

  @property
  def url(self) -> str:
    return f'http://127.0.0.1:{self.server_port}/v1'


class Handler(http.server.BaseHTTPRequestHandler):
  def do_POST(self):
    body = json.loads(self.rfile.read(int(self.headers['Content-Length'])))
    with self.server.lock:
      number = len(self.server.requests)
      self.server.requests.append((self.path, dict(self.headers), body))
    if self.server.raw is not None:
      return self._drip(*self.server.raw(number))
    answer = self.server.answer(number, body)
    is_text = isinstance(answer, str)
    status, headers, body = (200, {}, completion(answer)) if is_text else answer
    self.send_response(status)
    for name, value in headers.items():
      self.send_header(name, value)
    self.end_headers()
    self.wfile.write(body)

  def _drip(self, head: bytes, slow: bytes, end: bytes) -> None:
    with contextlib.suppress(OSError):  # the client may have left
      self.wfile.write(head)
      for at in range(len(slow)):
        time.sleep(0.02)
        self.wfile.write(slow[at : at + 1])
      self.wfile.write(end)

  do_GET = do_POST

  def log_message(self, *_):
    pass


def completion(words: str | None, **more) -> bytes:
  return json.dumps(dict(choices=[dict(message=dict(content=words))], **more)).encode()


@pytest.fixture
def server(monkeypatch):
  monkeypatch.setenv('NO_PROXY', '*')
  with Server() as server:
    server.answer = lambda number, body: '{"score": 5}'
    yield server
    server.free.set()
    server.shutdown()


@pytest.fixture
def slept(monkeypatch):
  """Waits are noted and not waited for."""
  waits = []
  monkeypatch.setattr(
    http_lib, '_sleep', lambda seconds: waits.append(seconds) if seconds > 0 else None
  )
  return waits


def settings(server, folder) -> dict:
  own = dict(base_url=server.url, model='m', cache=str(folder / 'deep' / 'judge.sqlite'))
  return dict(fn='judge', deadline_s=100.0, workers=2) | own


@pytest.fixture
def spec(server, tmp_path):
  return settings(server, tmp_path)


def judged(spec, text='seven', row=ROW, **settings) -> float:
  return rewards.resolve(spec | settings)(text, row)

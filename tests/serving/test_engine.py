"""Slots and windows without HTTP; and the name that a request without a token must use."""

from __future__ import annotations

import asyncio
import threading
import types

import jax
import pytest
import scripted_model

from jaxrl_llm import models
from jaxrl_llm.serving import api, server
from jaxrl_llm.serving.call import Call, Limits, Load, Served
from jaxrl_llm.serving.completion import TokenTexts
from jaxrl_llm.serving.engine import ABORTED, LENGTH, STOP, Engine, Prompt, Row, Sampling
from jaxrl_llm.serving.programs import EngineSettings
from jaxrl_llm.types import UserError


@pytest.fixture(scope='module')
def model(tmp_path_factory):
  folder = tmp_path_factory.mktemp('engine') / 'scripted'
  scripted_model.write(folder)
  return models.load(str(folder))


@pytest.fixture(scope='module')
def engine(model):
  settings = EngineSettings(2, 128, 4, model.tokenizer.end_ids, 'float32', 'float32')
  return Engine(model.config, model.params, settings)


def run(engine, model, requests, stop_after=None):
  """(name, tokens or None, end) of each delivery, in order, for (name, prompt, max_tokens)."""
  log, left = [], len(requests)

  def row(name, prompt, max_tokens):
    def deliver(delivery):
      nonlocal left
      log.append((name, delivery.tokens, delivery.end))
      left -= bool(delivery.end)
      if len(log) == stop_after or not (left or stop_after):
        engine.stop()

    prompt = Prompt(model.tokenizer.encode(prompt))
    return Row(prompt, Sampling(max_tokens, 0.0), 0, False, deliver)

  rows = [row(*request) for request in requests]
  engine.submit(rows)
  engine.run()
  return log, rows


def test_short_rows_pass_a_long_one_and_nothing_is_compiled(engine, model):
  events = []
  jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: events.append(name))
  short = [(f'short {i}', 'LONG' + 'a' * 30 * i + 'LONG', 5) for i in range(4)]
  log, _ = run(engine, model, [('long', 'LONG', 90), *short, ('end', 'STORY', 20)])
  ends = [(name, end) for name, _, end in log if end]
  assert [name for name, _ in ends] == [*(name for name, *_ in short), 'end', 'long']
  assert dict(ends) == {name: LENGTH for name, *_ in short} | {'end': STOP, 'long': LENGTH}
  counts = {name: sum(len(tokens) for n, tokens, _ in log if n == name) for name, _ in ends}
  assert counts == {name: n for name, _, n in short} | {'end': 5, 'long': 90}
  # Every delivery has at most the first token, or the tokens of a window.
  assert max(len(tokens) for _, tokens, _ in log) == engine.settings.window
  assert not [name for name in events if 'compile' in name]


def test_a_stop_aborts_the_rows_that_are_left(engine, model):
  log, _ = run(engine, model, [(name, 'LONG', 90) for name in 'abc'], stop_after=4)
  assert [(name, end) for name, _, end in log if end] == [(name, ABORTED) for name in 'abc']
  assert not engine.busy and not engine.waiting


def answer(application, host: bytes) -> int:
  """The status of GET /v1/models with the header Host."""
  sent = []

  async def send(message):
    sent.append(message)

  async def receive():
    return dict(type='http.request', body=b'')

  scope = dict(type='http', method='GET', path='/v1/models', query_string=b'', scheme='http')
  scope |= dict(headers=[(b'host', host)], server=('127.0.0.1', 8000), root_path='')
  asyncio.run(application(scope, receive, send))
  return sent[0]['status']


def test_without_a_token_only_names_of_loopback_are_answered(model):
  pytest.importorskip('starlette')
  engine = types.SimpleNamespace(settings=types.SimpleNamespace(context=128))
  endpoint = server.Endpoint(engine, model.tokenizer, model.config.vocab, 'm', '', Limits(1, 1.0))
  hosts = {b'127.0.0.1:8000': 200, b'localhost': 200, b'[::1]:80': 200, b'evil.example': 403}
  assert {host: answer(endpoint.application(), host) for host in hosts} == hosts
  with pytest.raises(UserError, match='--token'):
    server.check_address('0.0.0.0', '')
  server.check_address('0.0.0.0', 'secret')
  with server.bind('127.0.0.1', 0) as taken, pytest.raises(UserError, match='free port'):
    server.bind('127.0.0.1', taken.getsockname()[1])


def test_a_request_ends_at_its_time_limit(model):
  """The engine answers nothing here."""
  engine = types.SimpleNamespace(settings=types.SimpleNamespace(context=128), submit=list)
  shared = model.tokenizer, TokenTexts(model.tokenizer), 'no tools', model.config.vocab, 'm'
  served = Served(engine, *shared, Limits(1, 0.01), Load())

  async def ask():
    request = api.parse(b'{"model": "m", "prompt": "a"}', api.TEXT)
    call = Call(served, request, [Prompt([1])])
    call.start()
    try:
      await call.response(types.SimpleNamespace(receive=asyncio.Event().wait))
    finally:
      call.close()

  with pytest.raises(api.ApiError, match=r'longer than 0\.01 s') as error:
    asyncio.run(ask())
  assert error.value.status == 504 and served.load.rows == 0


def test_rows_of_other_threads_are_taken_while_the_engine_runs(engine, model):
  done, log = threading.Event(), []
  thread = threading.Thread(target=engine.run)
  thread.start()

  def deliver(delivery):
    log.append(delivery)
    if delivery.end:
      done.set()

  prompt = Prompt(model.tokenizer.encode('STORY'))
  engine.submit([Row(prompt, Sampling(20, 0.0), 0, True, deliver)])
  assert done.wait(60)
  engine.stop()
  thread.join()
  tokens = [token for delivery in log for token in delivery.tokens]
  assert model.tokenizer.decode([token.id for token in tokens]) == 'one two three four'
  assert all(token.top[0][0] == token.id and token.logp > -1e-3 for token in tokens)

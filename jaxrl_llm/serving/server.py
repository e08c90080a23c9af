"""The HTTP server: routes, limits, streams and errors. starlette and uvicorn are imported when it starts."""

from __future__ import annotations

import asyncio
import functools
import hmac
import importlib
import json
import socket
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from jaxrl_llm.config import extras
from jaxrl_llm.environments import tool_format
from jaxrl_llm.models.tokenizer import Tokenizer
from jaxrl_llm.serving import api
from jaxrl_llm.serving.api import ApiError, ApiRequest
from jaxrl_llm.serving.call import Call, Limits, Load, Served
from jaxrl_llm.serving.completion import TokenTexts
from jaxrl_llm.serving.engine import Engine, Prompt
from jaxrl_llm.serving.episodes import Episode, Episodes
from jaxrl_llm.types import JsonObject, UserError

if TYPE_CHECKING:
  import uvicorn
  from starlette.applications import Starlette
  from starlette.requests import Request
  from starlette.responses import Response
  from starlette.types import ASGIApp, Receive, Scope, Send

TOKEN_VARIABLE = 'JAXRL_LLM_SERVE_TOKEN'
_LOOPBACK = ('127.0.0.1', 'localhost', '::1')
_BODY_S = 30.0  # to receive the body of a request
_GRACE_S = 5  # for the last responses when the server stops
_SPARE_CONNECTIONS = 64  # beyond those whose requests may wait


class Endpoint:
  """The state that all requests share."""

  def __init__(
    self,
    engine: Engine,
    tokenizer: Tokenizer,
    vocab: int,
    name: str,
    token: str,
    limits: Limits,
    episodes: Episodes | None = None,
  ):
    """`name` of the model in requests and responses. `token` that requests must bear; '' for none.

    With `episodes`, their keys are the tokens instead, and their requests are recorded.
    """
    self._episodes = episodes
    texts, tools = TokenTexts(tokenizer), tool_format.find(tokenizer)
    self._served = Served(engine, tokenizer, texts, tools, vocab, name, limits, Load())
    self._token, self._created = token, int(time.time())

  def application(self) -> Starlette:
    """The ASGI application."""
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.routing import Route

    return Starlette(
      routes=[
        Route('/health', self._health),
        Route('/v1/models', self._models),
        Route('/v1/models/{name:path}', self._model),
        Route(
          '/v1/chat/completions', functools.partial(self._complete, kind=api.CHAT), methods=['POST']
        ),
        Route(
          '/v1/completions', functools.partial(self._complete, kind=api.TEXT), methods=['POST']
        ),
        Route('/v1/episodes/reward', self._reward, methods=['POST']),
      ],
      exception_handlers={ApiError: _error, HTTPException: _http_error, Exception: _failure},
    )

  async def _health(self, request: Request) -> Response:
    engine = self._served.engine
    counts = dict(slots=engine.settings.slots, busy=engine.busy, waiting=engine.waiting)
    counts |= dict(completions=self._served.load.rows, tokens=engine.sampled)
    return _json(dict(status='ok', **counts))

  async def _models(self, request: Request) -> Response:
    self._authorize(request)
    return _json(dict(object='list', data=[self._description()]))

  async def _model(self, request: Request) -> Response:
    self._authorize(request)
    self._check_model(request.path_params['name'])
    return _json(self._description())

  def _description(self) -> JsonObject:
    entry = dict(id=self._served.name, object='model', created=self._created, owned_by='jaxrl_llm')
    return entry | dict(max_model_len=self._served.engine.settings.context)

  def _authorize(self, request: Request) -> Episode | None:
    """The episode of the request, if there are any. Raises ApiError without the token.

    Without one, the name in the request must be of loopback: a web page may resolve its own to it.
    """
    kind, _, token = request.headers.get('authorization', '').partition(' ')
    if self._episodes is not None:
      return self._episodes.find(token.strip() if kind.lower() == 'bearer' else '')
    if not self._token:
      if request.url.hostname not in _LOOPBACK:
        raise ApiError('without a token, only loopback addresses are answered.', status=403)
      return None
    right = hmac.compare_digest(token.strip().encode(), self._token.encode())
    if kind.lower() != 'bearer' or not right:
      raise ApiError(
        'the header Authorization: Bearer TOKEN is missing or wrong.',
        status=401,
        code='invalid_api_key',
      )
    return None

  async def _reward(self, request: Request) -> Response:
    """The reward of an episode, as {"reward": number}."""
    episode = self._authorize(request)
    if episode is None:
      raise ApiError('this server has no episodes: it serves a model, and trains none.', status=404)
    try:
      body = json.loads(await self._read(request))
    except (ValueError, RecursionError) as error:
      raise ApiError(f'the body is no JSON ({error}).') from error
    if not isinstance(body, dict) or set(body) != {'reward'}:
      raise ApiError('the body must be {"reward": number}.', 'reward')
    episode.set_reward(body['reward'])
    return _json(dict(status='ok'))

  def _check_model(self, name: str) -> None:
    if name != self._served.name:
      raise ApiError(
        f'the model {name[:100]!r} does not exist; this server has {self._served.name!r}.',
        'model',
        404,
        'model_not_found',
      )

  async def _complete(self, request: Request, kind: str) -> Response | ASGIApp:
    episode = self._authorize(request)
    body = await self._read(request)
    prepared, prompts = await asyncio.to_thread(self._prepare, body, kind, episode)
    self._check_load(prepared.n * len(prompts))
    on_end = None
    if episode is not None:
      prepared = episode.begin(prepared)
      on_end = functools.partial(episode.record, tokenizer=self._served.tokenizer)
    call = Call(self._served, prepared, prompts, on_end)
    call.start()  # nothing is awaited since the load was checked
    if call.request.stream:
      return _stream(call)
    try:
      return _json(await call.response(request))
    finally:
      call.close()

  async def _read(self, request: Request) -> bytes:
    """The body. Raises ApiError where it is too large, too slow, incomplete or declared as something else."""
    from starlette.requests import ClientDisconnect

    if request.headers.get('content-type', '').partition(';')[0].strip() != 'application/json':
      raise ApiError('the header Content-Type must be application/json.', status=415)
    body = bytearray()
    try:
      async with asyncio.timeout(_BODY_S):
        async for part in request.stream():
          body += part
          if len(body) > self._served.limits.body_bytes:
            raise ApiError(
              f'the body is larger than {self._served.limits.body_bytes} bytes.', status=413
            )
    except ClientDisconnect:
      raise ApiError('the client closed the connection.', status=499) from None
    except TimeoutError:
      raise ApiError(f'the body did not arrive within {_BODY_S:g} s.', status=408) from None
    return bytes(body)

  def _prepare(
    self, body: bytes, kind: str, episode: Episode | None
  ) -> tuple[ApiRequest, list[Prompt]]:
    """The request and its encoded prompts. Raises ApiError."""
    request = api.parse(body, kind)
    if episode is None:  # a harness names the model that it was written for
      self._check_model(request.model)
    if request.tools and isinstance(self._served.tools, str):
      raise ApiError(
        f'{self._served.tools}: leave tools out.', 'tools', code='unsupported_parameter'
      )
    try:
      prompts = self._prompts(request, episode)
    except UserError as error:
      raise ApiError(f'the prompt cannot be encoded: {error}') from error
    context = self._served.engine.settings.context
    longest = max(len(prompt.ids) for prompt in prompts)
    wanted = request.max_tokens
    if longest + (1 if wanted is None else wanted) > context:
      more = '' if wanted is None else f' and max_tokens={wanted}'
      raise ApiError(
        f'the prompt has {longest} tokens{more}; together they must not exceed {context}.',
        'max_tokens' if longest < context and wanted else 'prompt',
        code='context_length_exceeded',
      )
    rows, most = (
      request.n * len(prompts),
      self._served.engine.settings.slots + self._served.limits.queue,
    )
    if rows > most:
      raise ApiError(f'the request asks for {rows} completions; this server takes {most}.', 'n')
    return request, prompts

  def _prompts(self, request: ApiRequest, episode: Episode | None) -> list[Prompt]:
    tokenizer, scored = self._served.tokenizer, request.echo and request.top is not None
    encode: Callable[[str], Sequence[int]] = tokenizer.encode
    if episode is not None:
      encode = functools.partial(episode.encode, tokenizer=tokenizer)
    if request.kind == api.CHAT:
      listed = [encode(self._rendered(request))]
    else:
      listed = [encode(p) if isinstance(p, str) else p for p in request.prompts]
    for ids in listed:
      if not ids or not all(0 <= token < self._served.vocab for token in ids):
        raise ApiError(
          f'a prompt needs at least one token, and token ids below {self._served.vocab}.', 'prompt'
        )
    return [Prompt(ids, number, scored) for number, ids in enumerate(listed)]

  def _rendered(self, request: ApiRequest) -> str:
    try:
      return self._served.tokenizer.chat(request.messages, tools=request.tools)
    except UserError as error:  # its sentence names fields of the configuration, and the cause is the template's own
      raise ApiError(
        f'the chat template of this model refuses the messages ({error.__cause__}).', 'messages'
      ) from error

  def _check_load(self, rows: int) -> None:
    """Raises ApiError where the queue has no room for `rows` completions."""
    most = self._served.engine.settings.slots + self._served.limits.queue
    if self._served.load.rows + rows > most:
      raise ApiError(
        f'{self._served.load.rows} completions are in progress, and at most {most} may be; try again.',
        status=429,
        code='rate_limit_exceeded',
      )


def _stream(call: Call) -> ASGIApp:
  """A response with the events of a call, which it closes: also where the client is gone before the first event."""
  from starlette.responses import StreamingResponse

  headers = {'cache-control': 'no-cache', 'x-accel-buffering': 'no'}
  response = StreamingResponse(call.events(), media_type='text/event-stream', headers=headers)

  async def respond(scope: Scope, receive: Receive, send: Send) -> None:
    try:
      await response(scope, receive, send)
    finally:
      call.close()

  return respond


def _json(value: JsonObject, status: int = 200, headers: dict[str, str] | None = None) -> Response:
  from starlette.responses import JSONResponse

  return JSONResponse(value, status, headers)


async def _error(request: Request, error: Exception) -> Response:
  assert isinstance(error, ApiError)
  headers = {429: {'retry-after': '1'}, 401: {'www-authenticate': 'Bearer'}}.get(error.status)
  return _json(error.body(), error.status, headers)


async def _http_error(request: Request, error: Exception) -> Response:
  """Errors of the routing in OpenAI's shape."""
  status = getattr(error, 'status_code', 500)
  reason = f'{request.method} {request.url.path[:100]} is not a route of this server.'
  return _json(ApiError(reason, status=status).body(), status, getattr(error, 'headers', None))


async def _failure(request: Request, error: Exception) -> Response:
  """Of an unexpected error, whose traceback is logged."""
  return _json(ApiError('the server failed.', status=500).body(), 500)


def check_address(host: str, token: str) -> None:
  """Raises UserError for an address beyond loopback without a token, and without the libraries."""
  if host not in _LOOPBACK and not token:
    raise UserError(
      f'--host={host} is reached by other machines; set the environment variable {TOKEN_VARIABLE}, '
      f'or give --token=SECRET; or serve this machine alone with --host={_LOOPBACK[0]}.'
    )
  check_libraries('--mode=serve')


def check_libraries(where: str) -> None:
  """Raises UserError without the libraries of the server; `where` names the setting that needs them."""
  for name in ('starlette', 'uvicorn'):
    try:
      importlib.import_module(name)
    except ImportError as error:
      raise UserError(f'{where} needs {name}: {extras.install("serve")}.') from error


def bind(host: str, port: int) -> socket.socket:
  """A listening socket. Raises UserError where the address cannot be had."""
  try:
    family = socket.AF_INET6 if ':' in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=1024)
  except (OSError, OverflowError) as error:
    raise UserError(
      f'--host={host} --port={port} cannot be opened ({error}); name a free port, or --port=0 for any.'
    ) from error


def http_server(endpoint: Endpoint, connections: int) -> uvicorn.Server:
  """The server of an endpoint: its `run(sockets=…)` returns once `should_exit` is set."""
  import uvicorn

  config = uvicorn.Config(
    endpoint.application(),
    loop='asyncio',
    http='h11',
    ws='none',
    lifespan='off',
    log_config=None,  # requests and prompts are not logged
    access_log=False,
    server_header=False,
    limit_concurrency=connections + _SPARE_CONNECTIONS,
    timeout_graceful_shutdown=_GRACE_S,
  )
  return uvicorn.Server(config)

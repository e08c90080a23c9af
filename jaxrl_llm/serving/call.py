"""One request in progress: its rows, its completions, and the response or the events of its stream."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from jaxrl_llm.environments.tool_format import ToolFormat
from jaxrl_llm.models.tokenizer import Tokenizer
from jaxrl_llm.serving import api
from jaxrl_llm.serving.api import ApiError, ApiRequest
from jaxrl_llm.serving.completion import Completion, TokenTexts
from jaxrl_llm.serving.engine import ABORTED, Delivery, Engine, Prompt, Row
from jaxrl_llm.types import JsonObject

if TYPE_CHECKING:
  from starlette.requests import Request


class Limits(NamedTuple):
  """Limits on the requests of all clients together."""

  queue: int  # completions that may wait for a slot
  seconds: float  # for a request, with its time in the queue
  body_bytes: int = 2**22


@dataclasses.dataclass
class Load:
  """Completions of all requests in progress; the thread of the HTTP server alone changes it."""

  rows: int = 0


class Served(NamedTuple):
  """The model and the limits that all requests share."""

  engine: Engine
  tokenizer: Tokenizer
  texts: TokenTexts
  tools: ToolFormat | str  # or the reason for which tools cannot be offered
  vocab: int
  name: str  # of the model, in requests and responses
  limits: Limits
  load: Load


class Call:
  """One request in progress."""

  def __init__(
    self,
    served: Served,
    request: ApiRequest,
    prompts: Sequence[Prompt],
    on_end: Callable[[Sequence[Completion]], None] | None = None,
  ):
    """`on_end` gets the completions once all have ended, before the client has the last of them."""
    self.request = request
    self._served, self._prompts, self._on_end = served, prompts, on_end
    self._deliveries: asyncio.Queue[tuple[int, Delivery]] = asyncio.Queue()
    self._loop = asyncio.get_running_loop()
    tools = served.tools if request.tools and not isinstance(served.tools, str) else None
    pairs = [(prompt, member) for prompt in prompts for member in range(request.n)]
    self.rows = [self._row(i, *pair) for i, pair in enumerate(pairs)]
    self._completions = [
      Completion(request, served.tokenizer, served.texts, i, prompt.ids, tools)
      for i, (prompt, _) in enumerate(pairs)
    ]
    kind = 'chatcmpl' if request.kind == api.CHAT else 'cmpl'
    self._head: JsonObject = dict(
      id=f'{kind}-{secrets.token_hex(12)}', created=int(time.time()), model=served.name
    )
    self._end = time.monotonic() + served.limits.seconds

  def _row(self, index: int, prompt: Prompt, member: int) -> Row:
    def deliver(delivery: Delivery) -> None:
      with contextlib.suppress(RuntimeError):  # the loop is closed when the server stops
        self._loop.call_soon_threadsafe(self._deliveries.put_nowait, (index, delivery))

    request = self.request
    room = self._served.engine.settings.context - len(prompt.ids)
    tokens = room if request.max_tokens is None else request.max_tokens
    sampling = request.sampling._replace(max_tokens=tokens)
    return Row(prompt, sampling, member, request.top is not None, deliver)

  def start(self) -> None:
    """Queue the rows; `close` must follow."""
    self._served.load.rows += len(self.rows)
    self._served.engine.submit(self.rows)

  def close(self) -> None:
    """Free the slots of rows that still run, and their places in the load."""
    self._served.load.rows -= len(self.rows)
    for row in self.rows:
      row.cancelled = True

  async def _pieces(self) -> AsyncIterator[tuple[Completion, str]]:
    """Each completion that got longer, with its new text, until all have ended. Raises ApiError."""
    while not all(completion.ended for completion in self._completions):
      try:
        async with asyncio.timeout(self._end - time.monotonic()):
          index, delivery = await self._deliveries.get()
      except TimeoutError:
        limit = self._served.limits.seconds
        raise ApiError(f'the request took longer than {limit:g} s.', status=504) from None
      if delivery.end == ABORTED:
        raise ApiError('the server is stopping.', status=503)
      completion = self._completions[index]
      if not completion.ended:
        text = completion.add(delivery)
        self.rows[index].cancelled = completion.ended  # also where a stop string ended it
        if self._on_end is not None and all(x.ended for x in self._completions):
          self._on_end(self._completions)
        yield completion, text

  async def response(self, request: Request) -> JsonObject:
    """The whole response; a client that disconnects ends it."""
    work = asyncio.ensure_future(self._whole())
    gone = asyncio.ensure_future(_disconnected(request))
    try:
      await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
      if not work.done():
        raise ApiError('the client closed the connection.', status=499)
      return work.result()
    finally:
      work.cancel()
      gone.cancel()

  async def _whole(self) -> JsonObject:
    async for _ in self._pieces():
      pass
    kind = 'chat.completion' if self.request.kind == api.CHAT else 'text_completion'
    choices = [completion.choice() for completion in self._completions]
    return self._head | dict(object=kind, choices=choices, usage=self._usage())

  async def events(self) -> AsyncIterator[str]:
    """The server-sent events of a stream; a client that disconnects cancels it."""
    kind = 'chat.completion.chunk' if self.request.kind == api.CHAT else 'text_completion'
    head = self._head | dict(object=kind)
    head |= dict(usage=None) if self.request.include_usage else {}
    every = self.request.top is not None or self.request.return_token_ids
    try:
      async for completion, text in self._pieces():
        if text or completion.ended or every:
          yield _event(head | dict(choices=[completion.delta(text)]))
      if self.request.include_usage:
        yield _event(head | dict(choices=[], usage=self._usage()))
      yield 'data: [DONE]\n\n'
    except ApiError as error:
      yield _event(error.body())

  def _usage(self) -> JsonObject:
    prompt = sum(len(prompt.ids) for prompt in self._prompts)
    sampled = sum(len(completion.tokens) for completion in self._completions)
    return dict(prompt_tokens=prompt, completion_tokens=sampled, total_tokens=prompt + sampled)


async def _disconnected(request: Request) -> None:
  """Returns when the client is gone."""
  while (await request.receive())['type'] != 'http.disconnect':
    pass


def _event(value: JsonObject) -> str:
  return f'data: {json.dumps(value)}\n\n'

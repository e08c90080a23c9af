"""The endpoint inside a training run: HTTP on a free port of loopback, weights that change between steps."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from jaxrl_llm.serving import server
from jaxrl_llm.serving.call import Limits
from jaxrl_llm.serving.engine import Engine
from jaxrl_llm.serving.episodes import Episodes
from jaxrl_llm.serving.programs import EngineSettings
from jaxrl_llm.types import Model, Params

_HOST = '127.0.0.1'


class LoopbackServer:
  """An endpoint for the keys of `episodes`; it samples inside `serving` alone."""

  def __init__(self, model: Model, params: Params, settings: EngineSettings, limits: Limits):
    """Compiles all programs, and listens."""
    self.episodes = Episodes()
    self._engine = Engine(model.config, params, settings)
    self._socket = server.bind(_HOST, 0)
    endpoint = server.Endpoint(
      self._engine, model.tokenizer, model.config.vocab, model.name, '', limits, self.episodes
    )
    self._http = server.http_server(endpoint, settings.slots + limits.queue)
    sockets = dict(sockets=[self._socket])
    self._thread = threading.Thread(target=self._http.run, kwargs=sockets, name='http', daemon=True)
    self._thread.start()

  @property
  def base_url(self) -> str:
    """The OPENAI_BASE_URL of clients."""
    return f'http://{_HOST}:{self._socket.getsockname()[1]}/v1'

  @contextlib.contextmanager
  def serving(self, params: Params) -> Iterator[None]:
    """Sample with `params` until the end of the block, which closes all episodes. Raises what the engine raised."""
    failures: list[BaseException] = []

    def run() -> None:
      try:
        self._engine.run()
      except BaseException as error:  # raised in the caller's thread
        failures.append(error)

    self._engine.replace_params(params)
    thread = threading.Thread(target=run, name='engine', daemon=True)
    thread.start()
    try:
      yield
    finally:
      self.episodes.close()
      self._engine.stop()
      thread.join()
    if failures:
      raise failures[0]

  def close(self) -> None:
    """Stop listening."""
    self._http.should_exit = True
    self._thread.join()
    self._socket.close()

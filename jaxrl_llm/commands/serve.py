"""--mode=serve: an OpenAI-compatible endpoint of the newest checkpoint, or of the model as loaded."""

from __future__ import annotations

import argparse
import math
import os
import signal
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxrl_llm.commands import run_config
from jaxrl_llm.commands.processes import Processes
from jaxrl_llm.config import validation
from jaxrl_llm.config.schema import Config
from jaxrl_llm.types import Model, UserError

if TYPE_CHECKING:
  from jaxrl_llm.serving.call import Limits
  from jaxrl_llm.serving.engine import Engine

_SERVING = (*run_config.GENERATION, 'dtype')
_CONTEXT = 1024  # tokens, unless the model has fewer
_SLOTS_ON_CPU, _SLOTS = 8, 64  # an accelerator decodes 64 rows in hardly more time than 8


def add_flags(parser: argparse.ArgumentParser) -> None:
  """Add --host, --port, --token, --slots, --context, --window, --queue and --seconds."""
  parser.add_argument(
    '--host',
    default='127.0.0.1',
    help='with --mode=serve: an address of this machine; beyond loopback a token is required',
  )
  parser.add_argument(
    '--port', type=int, default=8000, help='with --mode=serve: its port; 0: a free one'
  )
  parser.add_argument(
    '--token',
    default='',
    help='with --mode=serve: the API key of clients; default: $JAXRL_LLM_SERVE_TOKEN, which other users cannot read',
  )
  parser.add_argument(
    '--slots',
    type=int,
    default=0,
    help='with --mode=serve: completions decoded at once; 0: 8 on a CPU, else 64',
  )
  parser.add_argument(
    '--context',
    type=int,
    default=0,
    help='with --mode=serve: tokens of a prompt and its completion; 0: 1024, or those of the model',
  )
  parser.add_argument(
    '--window',
    type=int,
    default=8,
    help='with --mode=serve: tokens of each slot between two admissions of requests',
  )
  parser.add_argument(
    '--queue',
    type=int,
    default=256,
    help='with --mode=serve: completions that may wait for a slot; more are refused with status 429',
  )
  parser.add_argument(
    '--seconds', type=float, default=600.0, help='with --mode=serve: the longest time of a request'
  )


def run(arguments: argparse.Namespace, overrides: Sequence[str], processes: Processes) -> int:
  """Serve until SIGINT or SIGTERM."""
  from jaxrl_llm.serving import call, server

  token = arguments.token or os.environ.get(server.TOKEN_VARIABLE, '')
  _check_numbers(arguments)
  server.check_address(arguments.host, token)
  config = run_config.load(arguments, overrides, _SERVING)
  validation.check(config.requested)
  processes.join(arguments, config.trained)
  # Imported late: --help and a misspelled flag do not wait for jax.
  import jax

  devices = jax.devices()
  trained, requested = (validation.sized(c, devices) for c in (config.trained, config.requested))
  with server.bind(arguments.host, arguments.port) as socket:
    model, source = _load(trained, arguments.workdir, arguments.base)
    engine = _engine(model, requested, arguments)
    limits = call.Limits(arguments.queue, arguments.seconds)
    name = _name(trained.model)
    endpoint = server.Endpoint(engine, model.tokenizer, model.config.vocab, name, token, limits)
    http = server.http_server(endpoint, engine.settings.slots + limits.queue)
    address = f'http://{arguments.host}:{socket.getsockname()[1]}/v1'
    print(_banner(engine, limits, name, source, address), flush=True)
    thread = threading.Thread(target=http.run, kwargs=dict(sockets=[socket]), name='http')
    for number in (signal.SIGINT, signal.SIGTERM):
      signal.signal(number, lambda *_: engine.stop())
    thread.start()
    try:
      engine.run()
    finally:
      http.should_exit = True
      thread.join()
  return 0


def _check_numbers(arguments: argparse.Namespace) -> None:
  """Raises UserError for numbers out of range."""
  for name, least in (('slots', 0), ('context', 0), ('window', 1), ('queue', 0)):
    value = getattr(arguments, name)
    if value < least:
      raise UserError(f'--{name}={value} must be a whole number of at least {least}.')
  if not 0 < arguments.seconds < math.inf:
    raise UserError(f'--seconds={arguments.seconds} must be a finite number above 0.')
  if not 0 <= arguments.port < 2**16:
    raise UserError(f'--port={arguments.port} must be between 0 and {2**16 - 1}.')


def _load(config: Config, workdir: str, base: bool) -> tuple[Model, str]:
  """The model with merged weights, and which weights they are."""
  from jaxrl_llm.checkpointing import run_dir
  from jaxrl_llm.runner import resume, weights

  if not base:
    resume.check_trained(config, workdir)
  restored = weights.load(config, run_dir.view(workdir), base=base)
  source = 'as loaded' if base else f'after {restored.done} steps'
  return restored.model._replace(params=restored.merged()), source


def _engine(model: Model, config: Config, arguments: argparse.Namespace) -> Engine:
  import jax

  from jaxrl_llm.learner import precision
  from jaxrl_llm.serving.engine import Engine
  from jaxrl_llm.serving.programs import EngineSettings

  on_cpu = jax.devices()[0].platform == 'cpu'
  dtype = precision.compute_dtype(config, on_cpu)
  longest = model.config.max_tokens
  if arguments.context > longest:
    raise UserError(
      f'--context={arguments.context} is more than the {longest} tokens of this model; lower it.'
    )
  settings = EngineSettings(
    slots=arguments.slots or (_SLOTS_ON_CPU if on_cpu else _SLOTS),
    context=arguments.context or min(_CONTEXT, longest),
    window=arguments.window,
    end_ids=tuple(model.tokenizer.end_ids),
    dtype=dtype,
    cache_dtype=dtype if config.rollout.cache_dtype == 'auto' else config.rollout.cache_dtype,
  )
  return Engine(model.config, model.params, settings)


def _name(model: str) -> str:
  """The model's name in requests: that of config.model, of a path its last part."""
  return os.path.basename(os.path.normpath(model)) if os.path.exists(model) else model


def _banner(engine: Engine, limits: Limits, name: str, source: str, address: str) -> str:
  settings = engine.settings
  return (
    f'compiled {engine.program_count} programs in {engine.compile_s:.0f} s: no request compiles another\n'
    f'{settings.slots} slots of {settings.context} tokens ({engine.cache_bytes / 1e6:.1f} MB of keys and values, '
    f'{settings.dtype}); {limits.queue} more completions may wait\n'
    f'serving {name} {source} at {address}; Ctrl-C ends'
  )

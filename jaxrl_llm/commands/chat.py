"""A conversation with a model in a terminal; completions are printed while they are sampled."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

from jaxrl_llm import data
from jaxrl_llm.rollout import CompletionStreamer
from jaxrl_llm.types import JsonObject, Model, Row, UserError

if TYPE_CHECKING:
  from jaxrl_llm.config.schema import DataConfig

_HELP = 'An empty line begins anew; Ctrl-D or /quit ends.'
_Message = dict[str, str]


def run(
  model: Model,
  settings: JsonObject,
  rendering: DataConfig | None,
  read: Callable[[str], str] = input,
  out: TextIO | None = None,
) -> None:
  """Complete the lines from `read` until it raises EOFError. `settings` are those of `rollout.stream`.

  `rendering` is config.data: its template is put around each line. With its chat template a line continues the
  conversation, whose oldest turns are dropped where it does not fit; without, each line is completed by itself. None:
  lines are completed as they are.
  """
  stream = sys.stdout if out is None else out
  seed, options = settings.get('seed', 0), {k: settings[k] for k in settings.keys() - {'n', 'seed'}}
  streamer = CompletionStreamer(model, chat=False, **options)
  room = model.config.max_tokens - settings['max_tokens']
  print(_HELP, file=stream, flush=True)
  turns: list[_Message] = []
  for number in range(sys.maxsize):
    try:
      line = read('> ').strip()
    except (EOFError, KeyboardInterrupt):
      return
    if line == '/quit':
      return
    if not line:
      turns = []
      continue
    prompt = line if rendering is None else data.render(Row('', line, (), '', '', {}), rendering)
    if isinstance(prompt, str):
      _print_completion(streamer, prompt, seed + number, stream)
      continue
    *system, message = prompt
    turns = _trimmed(system, [*turns, message], streamer, room, stream)
    completion = _print_completion(streamer, [*system, *turns], seed + number, stream)
    turns.append(dict(role='assistant', content=completion))


def _trimmed(
  system: list[_Message],
  turns: list[_Message],
  streamer: CompletionStreamer,
  room: int,
  out: TextIO,
) -> list[_Message]:
  """Drops the oldest turns that do not fit, and prints their number."""
  dropped = 0
  while len(turns) > 2 and streamer.prompt_tokens([*system, *turns]) > room:
    turns, dropped = turns[2:], dropped + 2
  if dropped:
    print(f'({dropped} older messages do not fit any more)', file=out, flush=True)
  return turns


def _print_completion(
  streamer: CompletionStreamer, prompt: str | list[_Message], seed: int, out: TextIO
) -> str:
  """Prints a completion piece by piece and returns it; Ctrl-C ends it."""
  pieces: list[str] = []
  try:
    for piece in streamer.stream(prompt, seed):
      print(piece, end='', file=out, flush=True)
      pieces.append(piece)
  except KeyboardInterrupt:
    print(' ...', end='', file=out)
  except UserError as error:
    print(f'({error})', end='', file=out)
  print(file=out, flush=True)
  return ''.join(pieces)

"""A conversation with a model in a terminal; completions are printed while they are sampled."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TextIO

from jaxrl_llm.rollout import CompletionStreamer
from jaxrl_llm.types import JsonObject, Model, UserError

_HELP = 'An empty line begins anew; Ctrl-D or /quit ends.'
_Message = dict[str, str]


def run(
  model: Model,
  settings: JsonObject,
  seed: int = 0,
  read: Callable[[str], str] = input,
  out: TextIO | None = None,
) -> None:
  """Complete the lines from `read` until it raises EOFError. `settings` are those of `rollout.CompletionStreamer`.

  With a chat template a line continues the conversation, whose oldest turns are dropped where it does not fit; without,
  each line is completed by itself.
  """
  stream = sys.stdout if out is None else out
  streamer = CompletionStreamer(model, **settings)
  room = model.config.max_tokens - settings['max_tokens']
  print(_HELP, file=stream, flush=True)
  messages: list[_Message] = []
  for turn in range(sys.maxsize):
    try:
      line = read('> ').strip()
    except (EOFError, KeyboardInterrupt):
      return
    if line == '/quit':
      return
    if not line:
      messages = []
      continue
    if settings['chat']:
      messages = _trimmed([*messages, dict(role='user', content=line)], streamer, room, stream)
    completion = _print_completion(streamer, messages or line, seed + turn, stream)
    if messages:
      messages = [*messages, dict(role='assistant', content=completion)]


def _trimmed(
  messages: list[_Message], streamer: CompletionStreamer, room: int, out: TextIO
) -> list[_Message]:
  """Drops the oldest turns that do not fit, and prints their number."""
  dropped = 0
  while len(messages) > 2 and streamer.prompt_tokens(messages) > room:
    messages, dropped = messages[2:], dropped + 2
  if dropped:
    print(f'({dropped} older messages do not fit any more)', file=out, flush=True)
  return messages


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

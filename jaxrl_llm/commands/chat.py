"""A conversation with a model in a terminal, told while it is made."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from jaxrl_llm.rollout import CompletionStreamer
from jaxrl_llm.types import Model, UserError

_HELP = 'An empty line begins anew; Ctrl-D or /quit ends.'


def run(
  model: Model,
  settings: dict[str, Any],
  seed: int = 0,
  read: Callable[[str], str] = input,
  out: Any = None,
) -> None:
  """Answers what `read` brings until it raises EOFError. `settings` are those of `rollout.CompletionStreamer`.

  With a chat template a line goes on from what was said before, and the oldest turns are left out once all of it does
  not fit; without, each line is continued by itself. Source: none.
  """
  out, streamer = out or sys.stdout, CompletionStreamer(model, **settings)
  room = model.config.max_tokens - settings['max_tokens']
  print(_HELP, file=out, flush=True)
  said: list[dict[str, str]] = []
  for turn in range(sys.maxsize):
    try:
      line = read('> ').strip()
    except (EOFError, KeyboardInterrupt):
      return
    if line == '/quit':
      return
    if not line:
      said = []
      continue
    said = [*said, dict(role='user', content=line)] if settings['chat'] else []
    dropped = 0
    while len(said) > 2 and streamer.prompt_tokens(said) > room:
      said, dropped = said[2:], dropped + 2
    if dropped:
      print(f'({dropped} older messages do not fit any more)', file=out, flush=True)
    answer = _told(streamer, said or line, seed + turn, out)
    said = [*said, dict(role='assistant', content=answer)] if said else []


def _told(streamer: CompletionStreamer, prompt: str | list[dict], seed: int, out: Any) -> str:
  """Prints the answer piece by piece; Ctrl-C ends it."""
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

"""How the turns of a step's episodes are batched: the functions of `config.environment.batching`."""

from __future__ import annotations

from typing import NamedTuple

from jaxrl_llm.types import UserError


class TurnBatching(NamedTuple):
  """Settings of `turns`."""

  ready: (
    int  # turns that end before a call of the decoding program returns; 0: a quarter of the slots
  )
  iterations: int  # of a call, at most


def lockstep() -> None:
  """All rows sample a turn, then all environments step, and every row is encoded anew for its next turn."""


def turns(*, ready: int = 0, iterations: int = 8) -> TurnBatching:
  """Rows decode while others wait for their environments, and keep their keys and values on the device meanwhile.

  `config.rollout.slots` bounds these to so many rows: one that waits is encoded again if another took its slot.

  A call ends once `ready` turns have ended, as EnvPool's `recv` returns the first results (arXiv:2206.10558), or after
  `iterations` tokens of each row, so that rows whose observation has arrived join. Raises UserError for bad settings.
  """
  for name, value, least in (('ready', ready, 0), ('iterations', iterations, 1)):
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
      raise UserError(
        f'config.environment.batching.{name}={value!r} must be a whole number of at least {least}.'
      )
  return TurnBatching(ready, iterations)

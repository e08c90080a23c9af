"""Length schedules: the most tokens of a rollout in a step, as host functions of the step.

The functions are named in `config.rollout.length_schedule.fn`. The compiled program takes the result as a traced
number, so a schedule compiles once. The result lies between 1 and `config.completion_tokens`, which sizes caches and
batches.
"""

from __future__ import annotations

import bisect
import math

from jaxrl_llm.types import UserError


def constant() -> None:
  """`config.completion_tokens` in every step."""


def cosine(step: int, max_tokens: int, *, low: int, period: int) -> int:
  """From the full cap down to `low` and back once every `period` steps, along a cosine.

  cap(s) = low + (T − low)·(1 + cos 2πs/period)/2. arXiv:2509.25176 (SIRI: cycles of compression and expansion; the
  shape is reconstructed from its abstract and notes on it).
  """
  phase = (1 + math.cos(2 * math.pi * step / period)) / 2
  return max(1, min(max_tokens, round(low + (max_tokens - low) * phase)))


def stairs(step: int, max_tokens: int, *, starts: tuple[int, ...], caps: tuple[int, ...]) -> int:
  """`caps[i]` from step `starts[i]` on; before the first of them, `caps[0]`.

  Raises UserError unless there is one cap per start. arXiv:2506.07976 (TTI: a horizon that grows by iteration, 10, 20,
  30 in its script).
  """
  if not caps or len(caps) != len(starts) or list(starts) != sorted(starts) or min(caps) < 1:
    raise UserError(
      f'stairs: starts={starts!r} must rise, with one of caps={caps!r} for each of them, each at least 1 (config.'
      'rollout.length_schedule, or config.environment.horizon).'
    )
  return max(1, min(max_tokens, caps[max(bisect.bisect_right(starts, step) - 1, 0)]))

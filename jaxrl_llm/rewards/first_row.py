"""A trial of the user's reward functions on one row, before anything large is loaded."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from absl import logging

from jaxrl_llm.rewards.outcomes import CRASH, ERROR, FAILURES, OUTCOMES, Spec
from jaxrl_llm.rewards.pool import Pool
from jaxrl_llm.types import Row, Settings, UserError

_LIMITS = ('deadline_s', 'cpu_s', 'memory_mb')


def check_first_row(spec: Spec, row: Row) -> None:
  """Grade two completions of `row`, its answer and an empty one, with each of the user's reward functions.

  Raises UserError with the line of the user's file where a function fails on both. One that fails on a single
  completion, or is slow, may be meant so: see config.rewards.failed.
  """
  for where, settings in _user_functions(spec):
    texts = [row.answer, '']
    with Pool(settings) as pool:
      previous = logging.get_verbosity()
      logging.set_verbosity(logging.ERROR)  # the pool's warning would precede the same sentence
      try:
        scores = pool.score([row] * len(texts), texts)
      finally:
        logging.set_verbosity(previous)
    if np.isin(scores.outcome_B, (ERROR, CRASH)).all():
      kind = OUTCOMES[int(scores.outcome_B[0])]
      raise UserError(
        f'config.{where}.fn={settings["fn"]!r} fails on the first row of the data, for the completion {row.answer!r} '
        f'and for an empty one ({kind}: {scores.message}); correct the function.'
      )
    if np.isin(scores.outcome_B, FAILURES).any():
      logging.warning(
        'config.%s.fn=%r failed on a completion of the first row: %s', where, settings['fn'], scores.message
      )  # fmt: skip


def _user_functions(spec: Spec) -> Iterator[tuple[str, Settings]]:
  """(field, a config.rewards with that function alone) of the functions that are the user's."""
  parts = enumerate(spec.get('parts', ()))
  named = [('rewards', spec), *((f'rewards.parts[{index}]', part) for index, part in parts)]
  dropped = ('parts', 'weight', 'name', 'failed', 'vote', 'truncate')
  limits = {key: spec[key] for key in _LIMITS if key in spec}
  for where, part in named:
    if ':' in str(part.get('fn')):
      settings = {key: value for key, value in dict(part).items() if key not in dropped}
      yield where, settings | limits | dict(workers=1)

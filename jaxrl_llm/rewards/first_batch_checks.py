"""Checks of the reward functions on the first batch, for alarms that come before a long run is wasted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxrl_llm.config import stages
from jaxrl_llm.rewards.outcomes import OK, Spec
from jaxrl_llm.rewards.parsing import extract
from jaxrl_llm.rewards.resolve import batch_modes
from jaxrl_llm.types import Row

if TYPE_CHECKING:
  from jaxrl_llm.rewards.pool import ScorePool


def check_first_batch(
  spec: Spec,
  pool: ScorePool,
  rows: Sequence[Row],
  texts: Sequence[str],
  prompts: Sequence[str],
  parts_BxK: np.ndarray,
) -> dict[str, float]:
  """Returns metrics of the completions texts[b] to rows[b], and of their prompts graded as completions.

  grade/unread: share of completions without an answer that config.rewards.fn can read, if that can be determined.
  grade/unrewarded: share of completions with reward 0 by every reward function. grade/prompts_paid: share of prompts
  that get `right` or more when graded as completions, the largest of all reward functions; those that compare
  completions are left out.
  """
  metrics = {'grade/unrewarded': float((np.asarray(parts_BxK) == 0).all(1).mean())}
  unread = [_unread(spec, text) for text in texts]
  if None not in unread:
    metrics['grade/unread'] = float(np.mean(unread))
  unique = {row.id: b for b, row in enumerate(rows)}.values()
  scores = pool.score([rows[b] for b in unique], [prompts[b] for b in unique])
  single = [k for k, kind in enumerate(batch_modes(spec)) if not kind]
  graded = scores.parts_BxK[scores.outcome_B == OK][:, single]
  if graded.size:
    metrics['grade/prompts_paid'] = float((graded >= spec.get('right', 1.0)).mean(0).max())
  return metrics


def _unread(spec: Spec, text: str) -> bool | None:
  """Whether a text has no answer that config.rewards.fn can compare; None if that cannot be determined."""
  if spec.get('tag', ''):
    return f'</{spec["tag"]}>' not in text
  read = stages.choices(extract).get(spec['fn'])
  return None if read is None else read(text) is None

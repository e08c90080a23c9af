"""What the first batch tells of the grader, for alarms: it is cheaper to hear of it now than after a night."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl_llm.config import stages
from jaxrl_llm.rewards.parsing import extract
from jaxrl_llm.rewards.resolve import batch_modes
from jaxrl_llm.rewards.worker import OK
from jaxrl_llm.types import Row


def check_first_batch(
  spec: Any, pool: Any, rows: Sequence[Row], texts: Sequence[str], prompts: Sequence[str], parts_BxK
) -> dict[str, float]:
  """Shares, of the graded replies texts[b] to rows[b] and of their prompts, which are graded as if they were replies.

  grade/unread: replies without what config.rewards.fn looks for, where it tells. grade/unrewarded: replies that no grader
  gives anything. grade/prompts_paid: prompts that one grader gives `right` or more, the largest share of any: a reward
  for what the prompt says is none for the reply. Graders that compare replies are left out there. Source: none.
  """
  told = {'grade/unrewarded': float((np.asarray(parts_BxK) == 0).all(1).mean())}
  unread = [_unread(spec, text) for text in texts]
  if None not in unread:
    told['grade/unread'] = float(np.mean(unread))
  once = {row.id: b for b, row in enumerate(rows)}
  scores = pool.score([rows[b] for b in once.values()], [prompts[b] for b in once.values()])
  alone = [k for k, kind in enumerate(batch_modes(spec)) if not kind]
  graded = scores.parts_BxK[scores.outcome_B == OK][:, alone]
  if graded.size:
    told['grade/prompts_paid'] = float((graded >= spec.get('right', 1.0)).mean(0).max())
  return told


def _unread(spec: Any, text: str) -> bool | None:
  """Whether a text has nothing that config.rewards.fn could compare; None where that cannot be told."""
  if spec.get('tag', ''):
    return f'</{spec["tag"]}>' not in text
  read = stages.choices(extract).get(spec['fn'])
  return None if read is None else read(text) is None

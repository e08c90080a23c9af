"""Metrics of the rollouts by the source of their rows. arXiv:2505.18129 (V-Triune: source-level metric monitoring)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxrl_llm.types import TRUNCATED

if TYPE_CHECKING:
  from jaxrl_llm.runner.grading import GradedStep

_MAX_SOURCES = 32  # with more, those with the most rows
# A text with one of these, also within a word, reflects: the words of the paper's code.
_REFLECTION = (
  *('re-check', 're-evaluate', 're-examine', 're-think', 'recheck', 'reevaluate', 'reexamine'),
  *('reevaluation', 'rethink', 'check again', 'think again', 'try again', 'verify', 'wait', 'yet'),
)


def metrics(graded: GradedStep, sources: Sequence[str]) -> dict[str, float]:
  """Metrics source/<source>/<name> of the completions that are learned from.

  `sources` are those of the training set, most rows first. Of each with a completion: rollouts, score (mean reward),
  right (share), length (tokens; also of right and of wrong ones), clip_ratio (truncated share), reflection (share with
  a word such as 'wait'), right_reflecting and right_direct (share of right ones with and without such a word), and
  score/<reward> where there are several rewards.
  """
  batch = graded.batch
  source_B = np.array([row.source for row in graded.rows])
  source_B[np.asarray(batch.rollout.length_B) == 0] = ''  # nothing to learn from
  found: dict[str, float] = {}
  for source in sources[:_MAX_SOURCES]:
    at = np.flatnonzero(source_B == source)
    if len(at):
      own = _of_rows(graded, at) | _rewards(graded, at)
      found |= {f'source/{source}/{name}': value for name, value in own.items()}
  return found


def _of_rows(graded: GradedStep, at_N: np.ndarray) -> dict[str, float]:
  """Metrics of some completions."""
  batch, texts = graded.batch, graded.scores.logged_texts
  length_N = np.asarray(batch.rollout.length_B)[at_N]
  if batch.rollout.turns is not None:  # sampled tokens alone
    length_N = (batch.rollout.turns.number_BxT[at_N] >= 0).sum(1)
  right_N = np.asarray(batch.correct_B)[at_N] > 0
  reflects_N = np.array([any(word in texts[b].lower() for word in _REFLECTION) for b in at_N])
  values = dict(
    score=np.asarray(batch.reward_B)[at_N],
    right=right_N,
    length=length_N,
    length_right=length_N[right_N],
    length_wrong=length_N[~right_N],
    clip_ratio=np.asarray(batch.rollout.reason_B)[at_N] == TRUNCATED,
    reflection=reflects_N,
    right_reflecting=right_N[reflects_N],
    right_direct=right_N[~reflects_N],
  )
  means = {name: float(x.mean()) for name, x in values.items() if len(x)}
  return dict(rollouts=len(at_N)) | means


def _rewards(graded: GradedStep, at_N: np.ndarray) -> dict[str, float]:
  """The mean of each reward before its weight, where there are several."""
  parts = graded.scores.context.grading.rewards
  if len(parts) < 2:
    return {}
  means = zip(parts, graded.scores.part_BxK[at_N].mean(0), strict=True)
  return {f'score/{part.name}': float(mean) for part, mean in means}

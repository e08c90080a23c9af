"""Reward functions: (text, row) → number. Nothing here imports jax, so that workers start fast and use no device."""

from __future__ import annotations

from collections.abc import Sequence

from jaxrl_llm.rewards import length_truncation, majority_vote
from jaxrl_llm.rewards.adapters import check_columns
from jaxrl_llm.rewards.first_batch_checks import check_first_batch
from jaxrl_llm.rewards.first_row import check_first_row
from jaxrl_llm.rewards.outcomes import (
  CRASH,
  ERROR,
  FAILURES,
  OK,
  OUTCOMES,
  SKIP,
  TIMEOUT,
  FailurePolicy,
  Spec,
)
from jaxrl_llm.rewards.pool import Pool, Scores
from jaxrl_llm.rewards.resolve import (
  Part,
  batch_modes,
  check_rows,
  check_tasks,
  names,
  resolve,
  resolve_extract,
  resolve_parts,
  resolve_vote,
  weights,
  with_function,
)
from jaxrl_llm.types import Row

__all__ = [
  'CRASH',
  'ERROR',
  'FAILURES',
  'OK',
  'OUTCOMES',
  'SKIP',
  'TIMEOUT',
  'FailurePolicy',
  'Part',
  'Pool',
  'Scores',
  'batch_modes',
  'check_columns',
  'check_rows',
  'check_tasks',
  'check_first_batch',
  'check_first_row',
  'names',
  'resolve',
  'resolve_extract',
  'resolve_parts',
  'resolve_vote',
  'score',
  'length_truncation',
  'majority_vote',
  'weights',
  'with_function',
]


def score(
  rows: Sequence[Row],
  texts: Sequence[str],
  spec: Spec,
  pool: Pool | None = None,
) -> Scores:
  """Scores texts[b] of rows[b] with the reward functions and limits of `spec`, a config.rewards.

  `pool` holds workers made from the same spec, to reuse them over many calls; without it new ones serve this call.
  Raises UserError for an invalid spec.
  """
  if pool is None:
    with Pool(spec) as temporary_pool:
      return temporary_pool.score(rows, texts)
  if pool.spec != dict(spec):
    raise ValueError(f'the pool was made for {pool.spec}, not for {dict(spec)}')
  return pool.score(rows, texts)

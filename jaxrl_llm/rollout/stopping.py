"""Stop rules: they end the decode loop while rows still run. Each function returns a bool scalar.

The functions are named in `config.rollout.stop.fn`. The loop also ends when every row has ended. Rows that a rule
leaves unfinished are continued in the next step. With several data shards each shard applies the rule to its own rows.
"""

from __future__ import annotations

import jax

from jaxrl_llm.rollout.queue_order import Progress


def none() -> None:
  """Every row runs to its end or its cap."""


def groups(progress: Progress, *, fraction: float = 0.5) -> jax.Array:
  """Stop when `fraction` of the groups are complete. arXiv:2509.18521 (APRIL)."""
  P = len(progress.expected_P)
  complete = progress.finished_B.reshape(P, -1).all(1).sum()
  return complete >= max(1, round(fraction * P))


def tokens(progress: Progress, *, per_row: float) -> jax.Array:
  """Stop when `per_row` × rows tokens were sampled in this call, over all rows.

  arXiv:2510.18855 (C3PO++, Ring-1T), reconstructed from its abstract.
  """
  B = len(progress.length_B)
  return progress.length_B.sum() - progress.started_tokens >= per_row * B


def rounds(progress: Progress, *, count: int) -> jax.Array:
  """Stop after `count` decode iterations, one segment of a long rollout. arXiv:2507.19766 (UloRL)."""
  return progress.iterations >= count

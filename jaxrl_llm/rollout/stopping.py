"""When generation ends although rows still run: each function here looks at the loop and answers yes or no.

Named in `config.rollout.stop.fn`. The loop also ends when every row has. What a rule leaves unfinished is
continued in the next step. On several data shards each one applies the rule to its own share.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.rollout.queue_order import Progress


def none(progress: Progress) -> jax.Array:
  """Never: every row runs to its end or its cap. Source: none."""
  return jnp.bool_(False)


def groups(progress: Progress, *, fraction: float = 0.5) -> jax.Array:
  """When `fraction` of the groups are whole. Source: arXiv:2509.18521 (APRIL)."""
  P = len(progress.expected_P)
  whole = progress.finished_B.reshape(P, -1).all(1).sum()
  return whole >= max(1, round(fraction * P))


def tokens(progress: Progress, *, per_row: float) -> jax.Array:
  """When `per_row` × rows tokens were sampled in this call, whoever sampled them.

  Source: arXiv:2510.18855 (C3PO++, Ring-1T), reconstructed from its abstract.
  """
  B = len(progress.length_B)
  return progress.length_B.sum() - progress.started_tokens >= per_row * B


def rounds(progress: Progress, *, count: int) -> jax.Array:
  """After `count` runs of the loop's body, one segment of a long rollout. Source: arXiv:2507.19766 (UloRL)."""
  return progress.iterations >= count

"""Queue orders: scores that decide which waiting row takes a free slot. The largest score goes first.

The functions are named in `config.rollout.queue_order.fn`. Scores read one record of the loop and must not depend on
slots, so the order changes when a row runs and not its tokens. Ties go to the lower row.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.types import Array


class Progress(NamedTuple):
  """Progress of the decode loop, as queue orders and stop rules read it."""

  iterations: jax.Array  # completed
  started_tokens: jax.Array  # tokens of all rows before the loop
  length_B: Array  # tokens so far
  finished_B: Array
  cap_B: Array  # tokens at most
  expected_P: Array  # expected tokens of a rollout of the prompt; 0: unknown


def fifo(progress: Progress) -> jax.Array:
  """Rows in their order."""
  return -jnp.arange(len(progress.length_B), dtype=jnp.float32)


def longest_first(progress: Progress) -> jax.Array:
  """The prompt with the longest expected rollouts first; an unknown length counts as the cap.

  arXiv:2511.14617 (Seer), with an estimate from earlier visits in place of the probe.
  """
  B, P = len(progress.length_B), len(progress.expected_P)
  expected_B = jnp.repeat(progress.expected_P, B // P).astype(jnp.float32)
  return jnp.where(expected_B > 0, expected_B, progress.cap_B)


def probe_then_longest(progress: Progress) -> jax.Array:
  """Rollout 0 of every group first, then the group whose longest finished rollout is longest.

  A group without a finished rollout counts as its cap. arXiv:2511.14617 (Seer).
  """
  B, P = len(progress.length_B), len(progress.expected_P)
  group = lambda x: x.reshape(P, B // P)  # noqa: E731
  longest_P = jnp.where(group(progress.finished_B), group(progress.length_B), 0).max(1)
  bound_P = jnp.where(longest_P > 0, longest_P, group(progress.cap_B).max(1))
  probe_B = jnp.arange(B) % (B // P) == 0
  return jnp.where(probe_B, jnp.inf, jnp.repeat(bound_P, B // P).astype(jnp.float32))

"""Which rows answer the same prompt: G to a slot, and a prompt may fill several slots of a batch."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.types import Prompts


class Groups(NamedTuple):
  """How rows [B] and groups [P, parts·G] belong together. Groups stand where their prompt's first slot does."""

  rollouts: int  # G, rows of a slot
  first_P: jax.Array | None  # int32, the slot in which a slot's prompt stands first; None: its own
  part_P: jax.Array | None  # int32, which of its prompt's slots it is
  parts: int = 1  # most slots of one prompt

  def gather(self, x_B: jax.Array) -> jax.Array:
    """Rows as groups [P, parts·G], zeros where a prompt has fewer slots, or stands first elsewhere. Source: none."""
    x_PxG = x_B.reshape(-1, self.rollouts)
    if self.first_P is None:
      return x_PxG
    P = x_PxG.shape[0]
    blank = jnp.zeros((P, self.parts, self.rollouts), x_PxG.dtype)
    return blank.at[self.first_P, self.part_P].set(x_PxG).reshape(P, -1)

  def scatter(self, x_PxN: jax.Array) -> jax.Array:
    """Back from `gather`: what a group has for each of its rows, [B]; N = 1 gives it to all. Source: none."""
    if x_PxN.shape[1] == 1:
      x_P = x_PxN[:, 0] if self.first_P is None else x_PxN[self.first_P, 0]
      return jnp.repeat(x_P, self.rollouts)
    if self.first_P is None:
      return x_PxN.reshape(-1)
    x = x_PxN.reshape(-1, self.parts, self.rollouts)
    return x[self.first_P, self.part_P].reshape(-1)

  def numbers(self, rows: int) -> jax.Array:
    """The number of each row's group, int32 [B], below P. Source: none."""
    slot_B = jnp.arange(rows, dtype=jnp.int32) // self.rollouts
    return slot_B if self.first_P is None else self.first_P[slot_B]


def groups(prompts: Prompts, rollouts: int, parts: int = 1) -> Groups:
  """Slots of one prompt have one `index_P`, and `part_P` from 0 up to parts − 1 tells them apart. Source: none."""
  if parts == 1:
    return Groups(rollouts, None, None)
  same_PxP = prompts.index_P[:, None] == prompts.index_P[None]
  return Groups(rollouts, jnp.argmax(same_PxP, axis=1).astype(jnp.int32), prompts.part_P, parts)

"""Groups of rows that answer the same prompt: G rows per slot, and one or more slots per prompt."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.types import Array, Prompts


class Groups(NamedTuple):
  """Indices between rows [B] and groups [P, parts·G]. A group is at the index of its prompt's first slot."""

  rollouts: int  # G, rows of a slot
  first_P: Array | None  # int32, the first slot of a slot's prompt; None: the slot itself
  part_P: Array | None  # int32, the number of a slot among those of its prompt
  parts: int = 1  # largest number of slots of one prompt

  def gather(self, x_B: Array) -> Array:
    """Rows as groups [P, parts·G]; 0 for absent slots and for slots that belong to an earlier group."""
    x_PxG = x_B.reshape(-1, self.rollouts)
    if self.first_P is None:
      return x_PxG
    P = x_PxG.shape[0]
    blank = jnp.zeros((P, self.parts, self.rollouts), x_PxG.dtype)
    return blank.at[self.first_P, self.part_P].set(x_PxG).reshape(P, -1)

  def scatter(self, x_PxN: jax.Array) -> jax.Array:
    """The inverse of `gather`: values of groups as rows [B]; N = 1 repeats a value for all rows."""
    if x_PxN.shape[1] == 1:
      x_P = x_PxN[:, 0] if self.first_P is None else x_PxN[self.first_P, 0]
      return jnp.repeat(x_P, self.rollouts)
    if self.first_P is None:
      return x_PxN.reshape(-1)
    x = x_PxN.reshape(-1, self.parts, self.rollouts)
    return x[self.first_P, self.part_P].reshape(-1)

  def numbers(self, rows: int) -> jax.Array:
    """The number of each row's group, int32 [B], below P."""
    slot_B = jnp.arange(rows, dtype=jnp.int32) // self.rollouts
    return slot_B if self.first_P is None else self.first_P[slot_B]


def group_rows(prompts: Prompts, rollouts: int, parts: int = 1) -> Groups:
  """Groups of slots with equal `index_P`; `part_P` numbers the slots of a prompt from 0 to parts − 1."""
  if parts == 1:
    return Groups(rollouts, None, None)
  same_PxP = prompts.index_P[:, None] == prompts.index_P[None]
  return Groups(rollouts, jnp.argmax(same_PxP, axis=1).astype(jnp.int32), prompts.part_P, parts)

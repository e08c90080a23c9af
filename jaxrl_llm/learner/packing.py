"""Which tokens the update computes: the rows that are learned, packed into bins of a fixed number of tokens.

A plan leaves out rows without a coefficient. The other rows of a prompt stand behind one copy of it, in as few bins as
first-fit finds. The number of microbatches is data, so one compiled loop serves every batch, and its time follows the
learned tokens. Suffixes: Z shards of rows, K bins of a shard, N bins of a microbatch, J rows of a bin, S tokens of a
bin, U predicted tokens of a microbatch, F = N·J rows of a microbatch.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

Tokens = TypeVar('Tokens', int, float, jax.Array)


class PackingSpec(NamedTuple):
  """The size of a microbatch on one shard of rows."""

  bins: int  # N
  tokens: int  # S, at least those of the longest prompt and completion
  predicted: int  # tokens of completions in a bin, at most
  rows: int  # J, at most
  shares_prompt: bool  # rows of a bin share a copy of their prompt; False: each has its own
  align: int = 1  # prompts and completions begin at multiples of it


class Rows(NamedTuple):
  """Sizes of the rows of a shard: row b belongs to prompt b // (B / P)."""

  prompt_P: jax.Array  # int32, tokens
  length_B: jax.Array  # int32, tokens of completions
  learned_B: jax.Array  # bool

  @property
  def group(self) -> int:
    """Rows of a prompt."""
    return self.length_B.shape[0] // self.prompt_P.shape[0]

  @property
  def encoded_B(self) -> jax.Array:
    """Tokens of a completion that the model reads: all but the last, which predicts nothing."""
    return jnp.maximum(self.length_B - 1, 0)


class Plan(NamedTuple):
  """Where the rows of a shard stand."""

  row_KxJ: jax.Array  # int32, the row in each place of a bin; B where there is none
  start_B: jax.Array  # int32, the first column of a row, its copy of the prompt included
  copies_B: jax.Array  # bool: a copy of the prompt stands before the row
  bins: jax.Array  # int32 [], bins in use


class Layout(NamedTuple):
  """The tokens of one microbatch of a shard: in bins [N, S], as predicted tokens [U], and as rows [F, T]."""

  row_F: jax.Array  # int32, rows of the shard; B where there is none
  column_prompt_NxS: jax.Array  # int32, the prompt of a token
  column_row_NxS: jax.Array  # int32, the row of a completion's token
  place_NxS: jax.Array  # int32, the place of a token in its prompt or completion
  is_prompt_NxS: jax.Array  # bool
  position_NxS: jax.Array  # int32, for rotary embeddings
  copy_NxS: jax.Array  # int32 from 1, the copy of a prompt that a token stands behind; 0 = padding
  part_NxS: jax.Array  # int32, 0 in a prompt, else the row's place in the bin from 1
  predicted_row_U: jax.Array  # int32, the place in `row_F` of a predicted token
  predicted_place_U: jax.Array  # int32, its place in the completion
  source_U: jax.Array  # int32, the token in [N·S] whose hidden state predicts it
  used: jax.Array  # int32 [], predicted tokens
  index_FxT: jax.Array  # int32, the place of a row's token in [U]
  is_real_FxT: jax.Array  # bool


def aligned(align: int, tokens: Tokens) -> Tokens:
  """The next multiple of `align`."""
  return tokens if align == 1 else -(-tokens // align) * align


def make_plan(spec: PackingSpec, rows: Rows) -> Plan:
  """Places learned rows into the first bins that have room, groups with many tokens first; O(rows²) steps."""
  B, J = rows.length_B.shape[0], spec.rows
  bins = -(-B // spec.bins) * spec.bins
  learned_B = rows.learned_B & (rows.length_B > 0)
  prompt_B = jnp.arange(B) // rows.group
  cost_P = jnp.where(learned_B, rows.encoded_B, 0).reshape(-1, rows.group).sum(1)
  cost_P += jnp.where(learned_B.reshape(-1, rows.group).any(1), rows.prompt_P, 0)
  order_B = jnp.lexsort((-rows.encoded_B, prompt_B, -cost_P[prompt_B]))

  def place(carry, row):
    free_K, predicted_K, count_K, last_bin, last_prompt = carry
    prompt, tokens, length = prompt_B[row], rows.encoded_B[row], rows.length_B[row]
    tokens = aligned(spec.align, tokens)
    whole = aligned(spec.align, rows.prompt_P[prompt]) + tokens
    has_copy = (prompt == last_prompt) & spec.shares_prompt
    room_K = (count_K < J) & (predicted_K + length <= spec.predicted)
    joins = has_copy & (free_K[last_bin] >= tokens) & room_K[last_bin]
    bin_ = jnp.where(joins, last_bin, jnp.argmax((free_K >= whole) & room_K))
    start, seat = spec.tokens - free_K[bin_], count_K[bin_]
    taken = jnp.where(learned_B[row], jnp.where(joins, tokens, whole), 0)
    carry = (
      free_K.at[bin_].add(-taken),
      predicted_K.at[bin_].add(jnp.where(learned_B[row], length, 0)),
      count_K.at[bin_].add(learned_B[row]),
      jnp.where(learned_B[row], bin_, last_bin),
      jnp.where(learned_B[row], prompt, last_prompt),
    )
    return carry, (jnp.where(learned_B[row], bin_, bins), seat, start, ~joins)

  zeros_K = jnp.zeros(B, jnp.int32)
  empty = jnp.full(B, spec.tokens, jnp.int32), zeros_K, zeros_K, 0, -1
  empty = jax.tree.map(jnp.asarray, empty)
  (*_, count_K, _, _), (bin_B, seat_B, start_B, copies_B) = jax.lax.scan(place, empty, order_B)
  row_KxJ = jnp.full((bins, J), B, jnp.int32)
  row_KxJ = row_KxJ.at[bin_B, seat_B].set(order_B.astype(jnp.int32), mode='drop')
  start_B, copies_B = (jnp.zeros_like(x).at[order_B].set(x) for x in (start_B, copies_B))
  return Plan(row_KxJ, start_B, copies_B, (count_K > 0).sum())


def deal(shards: int, rows: Rows) -> jax.Array:
  """An order [P] of prompts that gives each shard P / shards of them with about equally many learned tokens."""
  learned_B = rows.learned_B & (rows.length_B > 0)
  cost_PxG = jnp.where(learned_B, rows.encoded_B, 0).reshape(-1, rows.group)
  cost_P = cost_PxG.sum(1) + jnp.where(learned_B.reshape(cost_PxG.shape).any(1), rows.prompt_P, 0)
  order_P = jnp.argsort(-cost_P)
  rank_P = jnp.arange(len(order_P))
  turn_P, seat_P = rank_P // shards, rank_P % shards
  # There and back again: the shard that gets the largest of one turn gets the smallest of the next.
  shard_P = jnp.where(turn_P % 2 == 0, seat_P, shards - 1 - seat_P)
  return jnp.zeros_like(order_P).at[shard_P * (len(order_P) // shards) + turn_P].set(order_P)


def lay_out(spec: PackingSpec, rows: Rows, plan: Plan, number: jax.Array, width: int) -> Layout:
  """Microbatch `number` of a plan; completions are at most `width` tokens long."""
  N, J, S, B = spec.bins, spec.rows, spec.tokens, rows.length_B.shape[0]
  row_NxJ = jax.lax.dynamic_slice_in_dim(plan.row_KxJ, number * N, N)
  exists_NxJ = row_NxJ < B
  row_NxJ = jnp.minimum(row_NxJ, B - 1)
  prompt_NxJ = row_NxJ // rows.group
  tokens_NxJ = rows.prompt_P[prompt_NxJ]
  start_NxJ = jnp.where(exists_NxJ, plan.start_B[row_NxJ], S)
  copies_NxJ = exists_NxJ & plan.copies_B[row_NxJ]
  # A row stands behind the last copy before it.
  copy_NxJ = jax.lax.cummax(jnp.where(copies_NxJ, jnp.arange(J)[None], 0), axis=1)
  copy_start_NxJ = jnp.take_along_axis(start_NxJ, copy_NxJ, axis=1)
  copied_NxJ = aligned(spec.align, tokens_NxJ)
  own_NxJ = start_NxJ + jnp.where(copies_NxJ, copied_NxJ, 0)  # where the completion starts
  last_NxJ = copy_start_NxJ + tokens_NxJ - 1  # the prompt's last token

  column_1xS = jnp.arange(S)[None]
  seat_NxS = (start_NxJ[:, None, :] <= column_1xS[..., None]).sum(-1) - 1
  has_row_NxS = seat_NxS >= 0
  seat_NxS = jnp.maximum(seat_NxS, 0)
  of_seat = lambda x_NxJ: jnp.take_along_axis(x_NxJ, seat_NxS, axis=1)  # noqa: E731
  offset_NxS = column_1xS - of_seat(own_NxJ)
  is_prompt_NxS = has_row_NxS & (offset_NxS < 0)
  encoded_NxS = of_seat(rows.encoded_B[row_NxJ])
  is_token_NxS = has_row_NxS & (offset_NxS < encoded_NxS)
  prompt_tokens_NxS = of_seat(tokens_NxJ)
  copied_NxS = prompt_tokens_NxS if spec.align == 1 else of_seat(copied_NxJ)
  if spec.align > 1:
    is_token_NxS &= ~is_prompt_NxS | (offset_NxS + copied_NxS < prompt_tokens_NxS)
  place_NxS = _place(offset_NxS, copied_NxS, is_prompt_NxS, is_token_NxS)

  length_F = jnp.where(exists_NxJ, rows.length_B[row_NxJ], 0).ravel()
  end_F = jnp.cumsum(length_F)
  U = N * spec.predicted
  token_U = jnp.arange(U)
  row_U = jnp.minimum(jnp.searchsorted(end_F, token_U, side='right'), N * J - 1)
  place_U = jnp.where(token_U < end_F[-1], token_U - (end_F - length_F)[row_U], 0)
  first = (jnp.arange(N)[:, None] * S).astype(jnp.int32)
  source_U = jnp.where(
    place_U == 0, (first + last_NxJ).ravel()[row_U], (first + own_NxJ).ravel()[row_U] + place_U - 1
  )
  place_1xT = jnp.arange(width)[None]
  return Layout(
    row_F=jnp.where(exists_NxJ, row_NxJ, B).ravel(),
    column_prompt_NxS=of_seat(prompt_NxJ),
    column_row_NxS=of_seat(row_NxJ),
    place_NxS=place_NxS,
    is_prompt_NxS=is_prompt_NxS,
    position_NxS=jnp.where(is_prompt_NxS, place_NxS, place_NxS + prompt_tokens_NxS),
    copy_NxS=jnp.where(is_token_NxS, of_seat(copy_NxJ) + 1, 0),
    part_NxS=jnp.where(is_prompt_NxS, 0, seat_NxS + 1),
    predicted_row_U=row_U,
    predicted_place_U=place_U,
    source_U=jnp.clip(source_U, 0, N * S - 1),
    used=end_F[-1],
    index_FxT=jnp.minimum((end_F - length_F)[:, None] + place_1xT, U - 1),
    is_real_FxT=place_1xT < length_F[:, None],
  )


def _place(
  offset_NxS: jax.Array, copied_NxS: jax.Array, is_prompt_NxS: jax.Array, is_token_NxS: jax.Array
) -> jax.Array:
  """The place of each token in its prompt or completion; 0 for padding."""
  place_NxS = jnp.where(is_prompt_NxS, offset_NxS + copied_NxS, offset_NxS)
  return jnp.where(is_token_NxS, place_NxS, 0)

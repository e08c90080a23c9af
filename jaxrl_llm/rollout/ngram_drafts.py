"""Drafts from the group's text: the tokens that follow a row's last tokens elsewhere in its group.

In every decode iteration of `draft_decode` a slot searches the text of its row and the row's siblings for the row's
last tokens. The tokens that follow the match are its draft.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.rollout import draft_decode
from jaxrl_llm.rollout.decode_records import DecodeInputs, DecodeSettings, LoopConstants
from jaxrl_llm.types import Array, ModelConfig, Rollout


class NgramSettings(NamedTuple):
  """Settings that are fixed when decoding is compiled; the fields of config.rollout.ngram."""

  match: int  # most tokens at the end of a row that are searched for
  draft: int  # most draft tokens per iteration


def generate(
  model: ModelConfig, settings: DecodeSettings, inputs: DecodeInputs, ngram: NgramSettings
) -> tuple[Rollout, jax.Array, draft_decode.DraftCounts]:
  """`draft_decode.generate` with drafts from the group's text.

  arXiv:2511.14617 (Seer), with a search on the device instead of its suffix tree and one fixed draft length instead of
  its budget.
  """
  drafter = draft_decode.Drafter(ngram.draft, functools.partial(_propose, ngram))
  return draft_decode.generate(model, settings, inputs, drafter)


def find_drafts(
  tokens_BxT: Array, length_B: Array, row_S: jax.Array, rollouts: int, ngram: NgramSettings
) -> jax.Array:
  """Tokens that follow each row's last tokens elsewhere in its group: [S, draft], −1 where there is none.

  The longest match with the row's last `match` tokens wins. Ties go to the match followed by most tokens (up to
  `draft`), then to the latest position in its row, then to the lowest sibling. Siblings have the same prompt, so their
  first tokens have the same context. arXiv:2511.14617 (Seer: drafts from the group's own text).
  """
  match, draft = ngram
  T = tokens_BxT.shape[1]
  sibling_SxG = (row_S // rollouts * rollouts)[:, None] + jnp.arange(rollouts)[None]
  text_SxGxT, length_SxG = tokens_BxT[sibling_SxG], length_B[sibling_SxG]
  pad = lambda x: jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(match, 0)], constant_values=-1)  # noqa: E731
  padded, padded_row = pad(text_SxGxT), pad(tokens_BxT[row_S])
  shared_SxGxT = jnp.zeros(text_SxGxT.shape, jnp.int32)
  same = jnp.ones(text_SxGxT.shape, bool)
  for back in range(1, match + 1):
    # Compares token j − back of every text with token length − back of the row.
    there = jax.lax.slice_in_dim(padded, match - back, match - back + T, axis=2)
    here_S = jnp.take_along_axis(padded_row, (match + length_B[row_S] - back)[:, None], axis=1)
    same = same & (there == here_S[:, :, None])
    shared_SxGxT += same
  j_1x1xT = jnp.arange(T)[None, None]
  follow_SxGxT = length_SxG[..., None] - j_1x1xT
  score = shared_SxGxT * (draft + 1) + jnp.minimum(follow_SxGxT, draft)
  score = jnp.where((shared_SxGxT > 0) & (follow_SxGxT > 0), score * T + j_1x1xT, -1)
  flat = score.reshape(len(row_S), -1)
  best_S = jnp.argmax(flat, axis=1)
  column = (best_S % T)[:, None] + jnp.arange(draft)[None]
  chosen_S = jnp.take_along_axis(sibling_SxG, (best_S // T)[:, None], axis=1)
  real = (flat.max(axis=1)[:, None] >= 0) & (column < length_B[chosen_S])
  return jnp.where(real, tokens_BxT[chosen_S, jnp.minimum(column, T - 1)], -1)


def _propose(
  ngram: NgramSettings, constants: LoopConstants, rollout: Rollout, slots: draft_decode.Slots
) -> jax.Array:
  draft_SxN = find_drafts(
    rollout.tokens_BxT, rollout.length_B, slots.row_S, constants.settings.rollouts, ngram
  )
  ahead_SxQ = slots.index_SxQ - rollout.length_B[slots.row_S][:, None]
  return jnp.take_along_axis(draft_SxN, jnp.clip(ahead_SxQ, 0, ngram.draft - 1), axis=1)

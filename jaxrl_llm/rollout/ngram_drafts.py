"""Decode loop with n-gram drafts from the group's text: fewer iterations, and the same tokens.

In every decode iteration a slot searches the text of its row and the row's siblings for the row's last tokens. The
tokens that follow the match are its draft, and one forward pass reads the row's next token and the draft. At each
position the token is drawn as in `ring_decode`, from the uniform keyed by (prompt, rollout, position). The draft is
accepted up to its first difference from the drawn tokens. So draft token y is accepted with probability p(y), and the
result equals that of `ring_decode.generate` token by token, whatever the draft was.

Rows advance by different amounts, so token j of a row lies in column j of its cache. Columns written by a rejected
draft are masked by position until the right tokens overwrite them.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.models import attention, decoder
from jaxrl_llm.rollout import slot_loop
from jaxrl_llm.rollout.decode_records import DecodeInputs, DecodeSettings, LoopConstants, LoopState
from jaxrl_llm.types import UNFINISHED, Array, ModelConfig, Rollout


class NgramSettings(NamedTuple):
  """Settings that are fixed when decoding is compiled; the fields of config.rollout.ngram."""

  match: int  # most tokens at the end of a row that are searched for
  draft: int  # most draft tokens per iteration


class DraftCounts(NamedTuple):
  """Draft statistics, summed over iterations and slots. The names are those of the metrics generate/ngram_*."""

  turns: jax.Array  # times that a slot sampled in an iteration: each samples 1 + accepted tokens
  offered: jax.Array  # draft tokens found
  kept: jax.Array  # draft tokens accepted


class _State(NamedTuple):
  loop: LoopState
  counts: DraftCounts


def generate(
  model: ModelConfig, settings: DecodeSettings, inputs: DecodeInputs, ngram: NgramSettings
) -> tuple[Rollout, jax.Array, DraftCounts]:
  """`ring_decode.generate` with drafts: the same rollout in fewer iterations, and the draft statistics.

  P(token = y) = p(y), drafted or not: accepting y with probability p(y), and else sampling p without y, is one
  inverse-CDF draw. The logits of all draft + 1 positions of all slots exist at once. A stop rule in tokens may be
  exceeded by `draft` tokens per slot. arXiv:2511.14617 (Seer), with a search on the device instead of its suffix tree
  and one fixed draft length instead of its budget.
  """
  constants, rollout, _ = slot_loop.prepare(model, settings, inputs)
  width = settings.max_tokens + ngram.draft  # room for the draft behind the last token
  encode = functools.partial(_encode, width)
  # Sliding layers have columns for all tokens, too, because rejected drafts are overwritten in place.
  width_N = [width] * model.layers
  continues = inputs.continued is not None
  loop = slot_loop.start_loop(constants, rollout, continues, width_N, encode)
  state = jax.lax.while_loop(
    lambda s: slot_loop.loop_continues(constants, s.loop),
    lambda s: _iterate(constants, ngram, s),
    _State(loop, DraftCounts(*[jnp.int32(0)] * 3)),
  )
  return state.loop.rollout, state.loop.iterations, state.counts


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


def _iterate(constants: LoopConstants, ngram: NgramSettings, state: _State) -> _State:
  """One token and its accepted draft tokens for every busy slot; then slots are reassigned."""
  settings, loop, T = constants.settings, state.loop, constants.settings.max_tokens
  row_S = jnp.minimum(loop.row_S, len(constants.keys_B) - 1)
  index_S = jnp.minimum(loop.index_S, T - 1)
  index_SxQ = index_S[:, None] + jnp.arange(ngram.draft + 1)[None]
  prompt_S = row_S // settings.rollouts
  input_SxQ = _model_inputs(settings, ngram, loop.rollout, row_S, index_SxQ)
  start_Sx1 = constants.prompts.length_P[prompt_S][:, None]
  column_W = jnp.arange(T + ngram.draft)
  hidden, cache, _ = decoder.apply(
    constants.model,
    constants.params,
    jnp.maximum(input_SxQ, 0),
    start_Sx1 + index_SxQ,
    column_W[None, None] <= index_SxQ[:, :, None],
    shared=slot_loop.prompt_cache_of(constants, prompt_S),
    cache=loop.cache,
    at=index_S,
    key_positions_BxS=start_Sx1 + column_W[None],
    dtype=settings.dtype,
  )
  logits = decoder.head(constants.model, constants.params, hidden, settings.dtype)
  row_N = jnp.repeat(row_S, ngram.draft + 1)
  token_N, logp_N = slot_loop.sample_rows(
    constants, logits.reshape(len(row_N), -1), row_N, index_SxQ.reshape(-1) + 1
  )
  drawn = token_N.reshape(index_SxQ.shape), logp_N.reshape(index_SxQ.shape)
  rollout, accepted_S = _verify(constants, loop, index_S, input_SxQ, *drawn)
  counts = _add_counts(state, row_S, rollout, input_SxQ, index_SxQ)
  loop = loop._replace(index_S=index_S + accepted_S, rollout=rollout, cache=cache)
  return _State(slot_loop.release_slots(constants, loop), counts)


def _model_inputs(
  settings: DecodeSettings,
  ngram: NgramSettings,
  rollout: Rollout,
  row_S: jax.Array,
  index_SxQ: jax.Array,
) -> jax.Array:
  """Tokens that enter the model: those that the rows already hold, then their drafts, −1 for none."""
  draft_SxN = find_drafts(rollout.tokens_BxT, rollout.length_B, row_S, settings.rollouts, ngram)
  ahead_SxQ = index_SxQ - rollout.length_B[row_S][:, None]
  draft_SxQ = jnp.take_along_axis(draft_SxN, jnp.clip(ahead_SxQ, 0, ngram.draft - 1), axis=1)
  known_SxQ = rollout.tokens_BxT[row_S[:, None], jnp.minimum(index_SxQ, settings.max_tokens - 1)]
  return jnp.where(ahead_SxQ < 0, known_SxQ, draft_SxQ)


def _verify(
  constants: LoopConstants,
  loop: LoopState,
  index_S: jax.Array,
  input_SxQ: jax.Array,
  token_SxQ: jax.Array,
  logp_SxQ: jax.Array,
) -> tuple[Rollout, jax.Array]:
  """Records the tokens drawn behind correct inputs; returns how many inputs of each slot were correct, too."""
  B, rollout = len(constants.keys_B), loop.rollout
  row_S, right_S = jnp.minimum(loop.row_S, B - 1), loop.row_S < B
  count_S: Any = 0
  for q in range(input_SxQ.shape[1]):
    if q:  # the first input is a token that the row holds
      drawn_S = rollout.tokens_BxT[row_S, index_S + q]
      right_S &= (input_SxQ[:, q] == drawn_S) & (rollout.reason_B[row_S] == UNFINISHED)
    count_S += right_S
    fresh_S = right_S & (index_S + q + 1 >= rollout.length_B[row_S])
    write_S = jnp.where(fresh_S, row_S, B)
    rollout = slot_loop.record_tokens(
      constants, rollout, write_S, index_S + q + 1, token_SxQ[:, q], logp_SxQ[:, q]
    )
  return rollout, count_S


def _add_counts(
  state: _State, row_S: jax.Array, rollout: Rollout, input_SxQ: jax.Array, index_SxQ: jax.Array
) -> DraftCounts:
  """The draft statistics with those of one iteration, of which `rollout` is the result."""
  before_S = state.loop.rollout.length_B[row_S]
  busy_S = state.loop.row_S < len(rollout.length_B)
  sampled_S = jnp.where(busy_S, rollout.length_B[row_S] - before_S, 0)
  drafted = busy_S[:, None] & (index_SxQ >= before_S[:, None]) & (input_SxQ >= 0)
  turns = (sampled_S > 0).sum()
  return DraftCounts(
    state.counts.turns + turns,
    state.counts.offered + drafted.sum(),
    state.counts.kept + sampled_S.sum() - turns,
  )


def _encode(
  width: int, constants: LoopConstants, row_S: jax.Array, index_S: jax.Array, rollout: Rollout
) -> decoder.Cache:
  """The cache filled with the tokens of the slots' rows, token j in column j."""
  spare = [(0, 0), (0, 0), (0, width - constants.settings.max_tokens), (0, 0)]
  wide = lambda x: attention.pack_cache(jnp.pad(x, spare), constants.settings.cache_dtype)  # noqa: E731
  return jax.tree.map(wide, slot_loop.encode_rows(constants, row_S, index_S, rollout))

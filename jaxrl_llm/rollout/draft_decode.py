"""Decode loop with drafts: fewer iterations, and the same tokens.

In every decode iteration a `Drafter` proposes the next tokens of each slot's row, and one forward pass reads the row's
next token and the draft. At each position the token is drawn as in `ring_decode`, from the uniform keyed by (prompt,
rollout, position). The draft is accepted up to its first difference from the drawn tokens. So the result equals that of
`ring_decode.generate` token by token, whatever the draft was.

Rows advance by different amounts, so token j of a row lies in column j of its cache. Columns written by a rejected
draft are masked by position until the right tokens overwrite them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.models import attention, decoder
from jaxrl_llm.rollout import slot_loop
from jaxrl_llm.rollout.decode_records import DecodeInputs, DecodeSettings, LoopConstants, LoopState
from jaxrl_llm.types import UNFINISHED, ModelConfig, Rollout


class Slots(NamedTuple):
  """Slots at the start of an iteration, Q = 1 + draft tokens."""

  row_S: jax.Array  # clipped into bounds where the slot is idle
  index_SxQ: jax.Array  # numbers of the row's tokens that enter the model
  known_SxQ: jax.Array  # int32, those that the row holds; −1 elsewhere
  # The hidden state that predicted token index_SxQ[:, 0]; 0 in the first iteration of a row that an earlier call began
  hidden_SxD: jax.Array | None


class Drafter(NamedTuple):
  """A source of draft tokens."""

  tokens: int  # most draft tokens per iteration
  # (constants, rollout, slots) → tokens [S, Q] for the positions that the row does not hold, −1 for none
  propose: Callable[[LoopConstants, Rollout, Slots], jax.Array]
  reads_hidden: bool = False  # whether slots carry hidden states


class DraftCounts(NamedTuple):
  """Draft statistics, summed over iterations and slots."""

  turns: jax.Array  # times that a slot sampled in an iteration: each samples 1 + accepted tokens
  offered: jax.Array  # draft tokens found
  kept: jax.Array  # draft tokens accepted


class _State(NamedTuple):
  loop: LoopState
  counts: DraftCounts
  hidden_SxD: jax.Array | None


def no_drafts() -> DraftCounts:
  """The counts before the first iteration."""
  return DraftCounts(*[jnp.int32(0)] * 3)


def generate(
  model: ModelConfig, settings: DecodeSettings, inputs: DecodeInputs, drafter: Drafter
) -> tuple[Rollout, jax.Array, DraftCounts]:
  """`ring_decode.generate` with drafts: the same rollout in fewer iterations, and the draft statistics.

  P(token = y) = p(y), drafted or not, since each position is one inverse-CDF draw. The logits of all Q positions of
  all slots exist at once. A stop rule in tokens may be exceeded by `drafter.tokens` tokens per slot.
  """
  constants, rollout, _ = slot_loop.prepare(model, settings, inputs)
  width = settings.max_tokens + drafter.tokens  # room for the draft behind the last token
  encode = functools.partial(_encode, width)
  # Sliding layers have columns for all tokens, too, because rejected drafts are overwritten in place.
  width_N = [width] * model.layers
  continues = inputs.continued is not None
  loop = slot_loop.start_loop(constants, rollout, continues, width_N, encode)
  hidden_SxD = None
  if drafter.reads_hidden:
    hidden_SxD = jnp.zeros((len(loop.row_S), model.width), settings.dtype)
  state = jax.lax.while_loop(
    lambda s: slot_loop.loop_continues(constants, s.loop),
    lambda s: _iterate(constants, drafter, s),
    _State(loop, no_drafts(), hidden_SxD),
  )
  return state.loop.rollout, state.loop.iterations, state.counts


def _iterate(constants: LoopConstants, drafter: Drafter, state: _State) -> _State:
  """One token and its accepted draft tokens for every busy slot; then slots are reassigned."""
  settings, loop, T = constants.settings, state.loop, constants.settings.max_tokens
  slots = _slots(constants, drafter, state)
  row_S, index_SxQ = slots.row_S, slots.index_SxQ
  prompt_S = row_S // settings.rollouts
  input_SxQ = _model_inputs(constants, drafter, loop.rollout, slots)
  start_Sx1 = constants.prompts.length_P[prompt_S][:, None]
  column_W = jnp.arange(T + drafter.tokens)
  hidden, cache, _ = decoder.apply(
    constants.model,
    constants.params,
    jnp.maximum(input_SxQ, 0),
    start_Sx1 + index_SxQ,
    column_W[None, None] <= index_SxQ[:, :, None],
    shared=slot_loop.prompt_cache_of(constants, prompt_S),
    cache=loop.cache,
    at=index_SxQ[:, 0],
    key_positions_BxS=start_Sx1 + column_W[None],
    dtype=settings.dtype,
  )
  logits = decoder.head(constants.model, constants.params, hidden, settings.dtype)
  row_N = jnp.repeat(row_S, drafter.tokens + 1)
  token_N, logp_N = slot_loop.sample_rows(
    constants, logits.reshape(len(row_N), -1), row_N, index_SxQ.reshape(-1) + 1
  )
  drawn = token_N.reshape(index_SxQ.shape), logp_N.reshape(index_SxQ.shape)
  rollout, accepted_S = _verify(constants, loop, index_SxQ[:, 0], input_SxQ, *drawn)
  counts = _add_counts(state, row_S, rollout, input_SxQ, index_SxQ)
  if drafter.reads_hidden:  # that behind the last right input predicts the row's new last token
    last_S = jnp.maximum(accepted_S - 1, 0)
    last_Sx1xD = jnp.take_along_axis(hidden, last_S[:, None, None], axis=1)
    state = state._replace(hidden_SxD=last_Sx1xD[:, 0].astype(settings.dtype))
  loop = loop._replace(index_S=index_SxQ[:, 0] + accepted_S, rollout=rollout, cache=cache)
  return _State(slot_loop.release_slots(constants, loop), counts, state.hidden_SxD)


def _slots(constants: LoopConstants, drafter: Drafter, state: _State) -> Slots:
  row_S, index_S = slot_loop.clipped_slots(constants, state.loop)
  index_SxQ = index_S[:, None] + jnp.arange(drafter.tokens + 1)[None]
  rollout, T = state.loop.rollout, constants.settings.max_tokens
  held_SxQ = rollout.tokens_BxT[row_S[:, None], jnp.minimum(index_SxQ, T - 1)]
  known_SxQ = jnp.where(index_SxQ < rollout.length_B[row_S][:, None], held_SxQ, -1)
  hidden_SxD = state.hidden_SxD
  if hidden_SxD is not None:  # a row's first token was predicted by its prompt
    assert constants.prompt_hidden_PxD is not None
    first_SxD = constants.prompt_hidden_PxD[row_S // constants.settings.rollouts]
    hidden_SxD = jnp.where((index_S == 0)[:, None], first_SxD.astype(hidden_SxD.dtype), hidden_SxD)
  return Slots(row_S, index_SxQ, known_SxQ, hidden_SxD)


def _model_inputs(
  constants: LoopConstants, drafter: Drafter, rollout: Rollout, slots: Slots
) -> jax.Array:
  """Tokens that enter the model: those that the rows already hold, then their drafts, −1 for none."""
  draft_SxQ = drafter.propose(constants, rollout, slots)
  return jnp.where(slots.known_SxQ >= 0, slots.known_SxQ, draft_SxQ)


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

"""Decode loop with slots: each prompt is prefilled once, then its rollouts decode in slots that are reused.

The loop is one `lax.while_loop`. Every slot writes its keys and values into the same column of a ring cache, which
advances by one column each iteration. A row at its token a attends to the a + 1 youngest columns, so reusing a slot
only resets its index to 0: nothing is moved, cleared or scattered. A layer with a sliding window has a ring of that
width. With `windows` > 1 the ring grows with the longest row: a chain of loops, each with a ring twice as wide. With
`halvings`, where completions may be long, the last of them goes on with half of the slots, once these suffice. Where a
model `keeps_columns`, there is no ring: each slot writes the column of its row's token.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jaxrl_llm.models import attention, decoder
from jaxrl_llm.models.mixer import Attend, RowStates
from jaxrl_llm.rollout import carried_kv, exit_signals, slot_loop
from jaxrl_llm.rollout.decode_records import (
  CarriedKV,
  DecodeInputs,
  DecodeSettings,
  LoopConstants,
  LoopState,
)
from jaxrl_llm.types import ModelConfig, Rollout

LOOP_SCOPE = 'decode'  # name of the loop inside the compiled program
# Loops with fewer slots follow where lengths may differ much: each compiles all layers again.
_LEAST_TOKENS = 64  # T
_LEAST_SLOTS = 4  # with fewer, an iteration takes hardly less time


def generate(
  model: ModelConfig, settings: DecodeSettings, inputs: DecodeInputs
) -> tuple[Rollout, jax.Array]:
  """Samples G completions of each prompt: rows b = p * G + g of a Rollout, and the decode iterations.

  The key of a token is fold(key, born, prompt index, g, position), so slots, order, mesh and interruptions change no
  sample. Columns behind a row's end hold token 0 and log-probability 0.

  Rows that `settings.stop_rule` cuts short, or that reach `inputs.pause` tokens, stay UNFINISHED.
  """
  constants, rollout, _ = slot_loop.prepare(model, settings, inputs)
  state = _run_loops(constants, rollout, inputs.continued is not None)
  return state.rollout, state.iterations


def resume(
  model: ModelConfig, settings: DecodeSettings, inputs: DecodeInputs
) -> tuple[Rollout, jax.Array, CarriedKV]:
  """As `generate`, with `inputs.carried`: continued rows are not encoded again. Also returns the new carried cache.

  Of a row that holds more tokens than its carried cache, the others are decoded again without being recorded.
  arXiv:2509.19128 (PipelineRL: keys of older weights stay), except that prompts are encoded anew here.
  """
  constants, rollout, _ = slot_loop.prepare(model, settings, inputs)
  state = _run_loops(constants, rollout, continues=True)
  return state.rollout, state.iterations, carried_kv.collect(constants, state)


def _run_loops(constants: LoopConstants, rollout: Rollout, continues: bool) -> LoopState:
  """Assigns rows to slots and runs the chain of loops."""
  chain = widths(constants.settings, continues)
  first_N = slot_loop.ring_widths(constants.model, chain[0])
  if constants.carried is None:
    state = slot_loop.start_loop(constants, rollout, continues, first_N, _encode)
  else:
    state = slot_loop.start_loop(constants, rollout, continues, first_N)
    idle_S = jnp.full_like(state.row_S, len(constants.keys_B))
    state = carried_kv.load_rows(constants, state, idle_S)
  for old, width in zip(chain[:1] + chain[:-1], chain, strict=True):
    state = _widen(constants.model, state, old, width)
    state = _run_loop(constants, width, state)
  return state


def _run_loop(constants: LoopConstants, width: int, state: LoopState) -> LoopState:
  """The loop of one ring width; that of the widest ring is a chain of loops with fewer and fewer slots."""
  sizes = slot_counts(constants, len(state.row_S)) if width == constants.settings.max_tokens else []
  for fewer in [*sizes, 0]:
    with jax.named_scope(LOOP_SCOPE):
      state = jax.lax.while_loop(
        functools.partial(_goes_on, constants, width, fewer),
        functools.partial(_body, constants),
        state,
      )
    if fewer:
      # If a stop rule ended the loop, it lets none of the following loops start, and no slot is read any more.
      constants, state = _halve(constants, state, fewer)
  return state


def slot_counts(constants: LoopConstants, slots: int) -> list[int]:
  """Slots of the loops after one with `slots` of them.

  Each slot of theirs has a copy of its prompt: not where prompts are longer than completions. Carried caches need the
  slots of all rows at the end.
  """
  if constants.carried is not None:
    return []
  return fewer_slots(constants.settings, constants.prompts.tokens_PxL.shape[1], slots)


def fewer_slots(settings: DecodeSettings, prompt_tokens: int, slots: int) -> list[int]:
  """`slot_counts` without carried caches, from the sizes alone."""
  if settings.max_tokens < max(prompt_tokens, _LEAST_TOKENS):
    return []
  counts = [-(-slots // 2**i) for i in range(1, settings.loops.halvings + 1)]
  return [count for count in counts if count >= _LEAST_SLOTS]


def _halve(
  constants: LoopConstants, state: LoopState, slots: int
) -> tuple[LoopConstants, LoopState]:
  """Busy slots move to the front, and the first `slots` of them stay; their prompts' cache is gathered once."""
  order_S = jnp.argsort(state.row_S == len(constants.keys_B), stable=True)[:slots]
  row_S, index_S, cache = jax.tree.map(
    lambda x: x[order_S], (state.row_S, state.index_S, state.cache)
  )
  state = state._replace(row_S=row_S, index_S=index_S, cache=cache)
  prompt_S = slot_loop.clipped_slots(constants, state)[0] // constants.settings.rollouts
  prompts = slot_loop.prompt_cache_of(constants._replace(slot_prompts=None), prompt_S)
  return constants._replace(slot_prompts=prompts), state


def widths(settings: DecodeSettings, continues: bool = False) -> list[int]:
  """Ring widths, one per loop of the chain. Continued rows may have any length and need the full width."""
  windows = 1 if continues else settings.loops.windows
  return [-(-settings.max_tokens // 2**i) for i in reversed(range(windows))]


def _goes_on(constants: LoopConstants, width: int, fewer: int, state: LoopState) -> jax.Array:
  """Whether this loop of the chain goes on.

  It also ends when a row outgrows its ring, and when `fewer` slots (if not 0) suffice for the rows that are left.
  """
  settings = constants.settings
  go_on = slot_loop.loop_continues(constants, state)
  busy_S = state.row_S < len(constants.keys_B)
  if fewer:  # while rows wait, all slots are busy
    go_on &= slot_loop.any_shard(constants, busy_S.sum() > fewer)
  if width == settings.max_tokens:
    return go_on
  outgrown_S = busy_S & (state.index_S + settings.loops.test_every > width)
  return go_on & ~slot_loop.any_shard(constants, outgrown_S.any())


def _body(constants: LoopConstants, state: LoopState) -> LoopState:
  test_every = constants.settings.loops.test_every
  if test_every == 1:
    return _iterate(constants, state)
  return jax.lax.fori_loop(0, test_every, lambda _, s: _iterate(constants, s), state)


def _iterate(constants: LoopConstants, state: LoopState) -> LoopState:
  """Decodes one token in every busy slot, then reassigns slots."""
  settings, (row_S, index_S) = constants.settings, slot_loop.clipped_slots(constants, state)
  logits_SxV, cache, expert_SxNxk = decode(constants, state)
  token_S, logp_S = slot_loop.sample_rows(constants, logits_SxV, row_S, index_S + 1)
  # A continued row whose tokens are read again takes its own next token and records nothing.
  known_S = index_S + 1 < state.rollout.length_B[row_S]
  write_S = jnp.where(known_S, len(constants.keys_B), state.row_S)
  rollout = slot_loop.record_tokens(constants, state.rollout, write_S, index_S + 1, token_S, logp_S)
  if settings.records.experts:
    rollout = slot_loop.record_experts(rollout, write_S, index_S, expert_SxNxk)
  if settings.records.top_tokens:
    top = slot_loop.top_tokens(constants, logits_SxV)
    rollout = slot_loop.record_top_tokens(rollout, write_S, index_S + 1, top)
  state = state._replace(
    rollout=rollout,
    index_S=state.index_S + 1,
    column=state.column + 1,
    cache=cache,
  )
  if settings.exit_rule is not None:
    state = exit_signals.apply_rule(constants, state, write_S, logits_SxV)
  before_S, state = state.row_S, slot_loop.release_slots(constants, state)
  if constants.carried is None or len(before_S) == len(constants.keys_B):
    return state
  return carried_kv.load_rows(constants, state, before_S)


def decode(
  constants: LoopConstants, state: LoopState
) -> tuple[jax.Array, decoder.Cache, jax.Array | None]:
  """One model pass over each slot's last token: logits [S, V] of the next one, the written ring, expert numbers."""
  row_S, index_S = slot_loop.clipped_slots(constants, state)
  prompt_S = row_S // constants.settings.rollouts
  position_Sx1 = (constants.prompts.length_P[prompt_S] + index_S)[:, None]
  width = {
    slides: jax.tree.leaves(kv)[0].shape[2]
    for slides, kv in zip(constants.model.slides, state.cache, strict=True)
    if kv and not isinstance(kv, RowStates)
  }

  in_order = keeps_columns(constants.model)

  def visible(slides):
    if in_order:
      return (jnp.arange(width.get(slides, 0))[None] <= index_S[:, None])[:, None]
    W, oldest_S = width.get(slides, 0), index_S
    if slides and constants.model.chunked:
      oldest_S = jnp.minimum(index_S, position_Sx1[:, 0] % constants.model.window)
    return ((state.column - jnp.arange(W))[None] % W <= oldest_S[:, None])[:, None]

  has_kernel = constants.settings.attend is not None
  hidden, cache, expert_Sx1xNxk = decoder.apply(
    constants.model,
    constants.params,
    state.rollout.tokens_BxT[row_S, index_S][:, None],
    position_Sx1,
    visible(False),
    shared=slot_loop.prompt_cache_of(constants, prompt_S, in_place=has_kernel),
    cache=state.cache,
    at=index_S if in_order else state.column,
    sliding_mask_BxQxS=visible(True),
    dtype=constants.settings.dtype,
    attend=_kernel(constants, state, index_S, prompt_S) if has_kernel else None,
  )
  logits_SxV = decoder.head(
    constants.model, constants.params, hidden[:, 0], constants.settings.dtype
  )
  return logits_SxV, cache, None if expert_Sx1xNxk is None else expert_Sx1xNxk[:, 0]


def keeps_columns(model: ModelConfig) -> bool:
  """Whether token j of a row lies in column j of its slot, which writes a column of its own: the update's order."""
  return model.is_exact


def _kernel(
  constants: LoopConstants, state: LoopState, index_S: jax.Array, prompt_S: jax.Array
) -> Attend:
  """The kernel of attention with the columns of each slot, and the prompt that it reads where no group shares one."""
  attend = constants.settings.attend
  assert attend is not None
  live_S = jnp.where(state.row_S < len(constants.keys_B), index_S + 1, 0)
  shares = len(prompt_S) == len(constants.keys_B) or constants.slot_prompts is not None
  numbers_S = None if shares else prompt_S
  return functools.partial(attend, column=state.column, live_S=live_S, prompt_S=numbers_S)


def _widen(model: ModelConfig, state: LoopState, old: int, width: int) -> LoopState:
  """Unrolls the ring so that its youngest column is the last, and pads it from `old` to `width` columns."""
  if old == width:
    return state

  def stretch(x, wide):
    x = jnp.roll(x, old - state.column, axis=2)
    return jnp.pad(x, [(0, 0)] * 2 + [(0, wide - x.shape[2])] + [(0, 0)] * (x.ndim - 3))

  stretch_layer = lambda kv, wide: jax.tree.map(lambda x: stretch(x, wide), kv)  # noqa: E731
  cache = attention.map_columns(stretch_layer, state.cache, slot_loop.ring_widths(model, width))
  return state._replace(cache=cache, column=jnp.int32(old))


def _encode(
  constants: LoopConstants, row_S: jax.Array, index_S: jax.Array, rollout: Rollout
) -> decoder.Cache:
  """The ring filled with the tokens of the slots' rows: token j of a row at its token a has age a − j."""
  T = constants.settings.max_tokens

  def rolled(x, width):
    # The next token of a row goes to column 0, so the token of age a lies in column −a.
    source_SxW = (index_S[:, None] - (-jnp.arange(width))[None] % width) % T
    x = jnp.take_along_axis(x, source_SxW[:, None, :, None], axis=2)
    return attention.pack_cache(x, constants.settings.cache_dtype)

  width_N = slot_loop.ring_widths(constants.model, T)
  rows = slot_loop.encode_rows(constants, row_S, index_S, rollout)
  return attention.map_columns(
    lambda layer, width: tuple(rolled(x, width) for x in layer), rows, width_N
  )

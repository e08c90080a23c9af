"""The compiled programs of the endpoint: encode a prompt, place it into a slot, decode a window, score a prompt.

Every slot has a cache of its own, in which token j of its row lies in column j. A row is therefore computed in the same
way whatever the other slots hold and whenever it was admitted; in the ring of `ring_decode` the order of its columns
would depend on that. Shapes depend on `EngineSettings` alone: all programs are compiled before the first request.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.models import decoder
from jaxrl_llm.rollout import sampling, slot_loop
from jaxrl_llm.types import Array, ModelConfig, Params, Prompts

ALTERNATIVES = 20  # likeliest tokens that are reported for a position
_SCORED_AT_ONCE = 64  # rows of [V] logits while a prompt is scored


class EngineSettings(NamedTuple):
  """Settings that are fixed when the programs are compiled."""

  slots: int  # S
  context: int  # C, tokens of a prompt and its completion
  window: int  # W, decode iterations of a call
  end_ids: tuple[int, ...]
  dtype: str  # of compute
  cache_dtype: str

  @property
  def buckets(self) -> tuple[int, ...]:
    """Prompt lengths that programs exist for; a prompt is padded to the next one."""
    return tuple(b for b in (64, 256, 1024, 4096, 16384) if b < self.context) + (self.context,)


class RowSettings(NamedTuple):
  """How a row is sampled: scalars, or [S]."""

  seed: Array  # uint32
  prompt: Array  # int32, number of the prompt in its request
  member: Array  # int32, number of the completion of its prompt
  max_tokens: Array  # int32, at least 1
  temperature: Array  # float32; 0: greedy
  top_p: Array  # float32
  scored: Array  # bool: log-probs of the model and alternatives are wanted


class SlotState(NamedTuple):
  """The rows in slots."""

  cache: decoder.Cache  # (k, v) [S, K, C, d] per layer
  token_S: jax.Array  # int32, the newest token, which enters the model next
  length_S: jax.Array  # int32, tokens in the cache
  sampled_S: jax.Array  # int32, tokens of the completion so far
  left_S: jax.Array  # int32, tokens that may still be sampled; 0: the slot is idle
  key_Sx2: jax.Array  # uint32
  temperature_S: jax.Array
  top_p_S: jax.Array
  scored_S: jax.Array


class Sampled(NamedTuple):
  """Sampled tokens with any leading axes; token −1: none was sampled."""

  token: jax.Array  # int32
  behavior_logp: jax.Array  # float32, of the distribution that was sampled from
  logp: jax.Array  # float32, of the model at temperature 1; 0 unless scored
  top_id: jax.Array  # int32 […, ALTERNATIVES], the likeliest tokens; 0 unless scored
  top_logp: jax.Array  # float32, as top_id


class Encoded(NamedTuple):
  """A prompt after its forward pass."""

  cache: decoder.Cache  # (k, v) [1, K, L, d] per layer
  hidden_1xLxD: jax.Array
  logits_1xV: jax.Array  # of the first completion token


class PromptScores(NamedTuple):
  """Log-probs of a prompt's own tokens; row j is of token j + 1."""

  logp_L: jax.Array
  top_id_LxN: jax.Array
  top_logp_LxN: jax.Array


class Programs(NamedTuple):
  """Compiled programs; those of a prompt are by bucket."""

  encode: dict[int, Callable[..., Encoded]]
  score: dict[int, Callable[..., PromptScores]]
  admit: dict[int, Callable[..., tuple[SlotState, Sampled]]]
  decode: Callable[..., tuple[SlotState, Sampled]]


def empty_slots(model: ModelConfig, settings: EngineSettings) -> SlotState:
  """Idle slots."""
  S = settings.slots
  width_N = [settings.context] * model.layers
  number = lambda: jnp.zeros(S, jnp.int32)  # noqa: E731  donated together, so buffers of their own
  return SlotState(
    cache=slot_loop.empty_cache(model, S, width_N, settings.cache_dtype),
    token_S=number(),
    length_S=number(),
    sampled_S=number(),
    left_S=number(),
    key_Sx2=jnp.zeros((S, 2), jnp.uint32),
    temperature_S=jnp.zeros(S, jnp.float32),
    top_p_S=jnp.ones(S, jnp.float32),
    scored_S=jnp.zeros(S, bool),
  )


def compile_all(model: ModelConfig, settings: EngineSettings, params: Params) -> Programs:
  """Compiles the programs of all buckets; the slots are donated to `admit` and `decode`."""
  shapes = functools.partial(jax.tree.map, lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype))
  slots = jax.eval_shape(lambda: empty_slots(model, settings))
  params, number = shapes(params), jax.ShapeDtypeStruct((), jnp.int32)
  row = RowSettings(*_row_shapes())

  def compiled(fn, *args, donate=()):
    bound = functools.partial(fn, model, settings)
    return jax.jit(bound, donate_argnums=donate).lower(*args).compile()

  encode, score, admit = {}, {}, {}
  for bucket in settings.buckets:
    tokens = jax.ShapeDtypeStruct((1, bucket), jnp.int32)
    encode[bucket] = compiled(encode_prompt, params, tokens, number)
    out = jax.eval_shape(functools.partial(encode_prompt, model, settings), params, tokens, number)
    score[bucket] = compiled(score_prompt, params, out.hidden_1xLxD, tokens)
    admitted = (slots, out.cache, out.logits_1xV, number, number, row)
    admit[bucket] = compiled(admit_row, *admitted, donate=0)
  keep = jax.ShapeDtypeStruct((settings.slots,), bool)
  return Programs(encode, score, admit, compiled(decode_window, params, slots, keep, donate=1))


def _row_shapes() -> list[jax.ShapeDtypeStruct]:
  dtypes = (jnp.uint32, jnp.int32, jnp.int32, jnp.int32, jnp.float32, jnp.float32, jnp.bool_)
  return [jax.ShapeDtypeStruct((), dtype) for dtype in dtypes]


def encode_prompt(
  model: ModelConfig,
  settings: EngineSettings,
  params: Params,
  tokens_1xL: jax.Array,
  length: jax.Array,
) -> Encoded:
  """One pass over a right-padded prompt."""
  positions_1xL = jnp.arange(tokens_1xL.shape[1])[None]
  mask = decoder.causal(positions_1xL < length)
  hidden, cache, _ = decoder.apply(
    model, params, tokens_1xL, positions_1xL, mask, dtype=settings.dtype
  )
  last_1xD = jax.lax.dynamic_index_in_dim(hidden, length - 1, axis=1, keepdims=False)
  packed = slot_loop.packed(cache, settings.cache_dtype)
  return Encoded(packed, hidden, decoder.head(model, params, last_1xD, settings.dtype))


def score_prompt(
  model: ModelConfig,
  settings: EngineSettings,
  params: Params,
  hidden_1xLxD: jax.Array,
  tokens_1xL: jax.Array,
) -> PromptScores:
  """Log-probs at temperature 1 of a prompt's tokens behind the first, in chunks of positions."""

  def score(pair):
    hidden_D, token = pair
    logits_1xV = decoder.head(model, params, hidden_D[None], settings.dtype)
    logp_1, top_id, top_logp = _alternatives(logits_1xV, token[None])
    return logp_1[0], top_id[0], top_logp[0]

  following_L = jnp.roll(tokens_1xL[0], -1)
  rows = hidden_1xLxD[0], following_L
  return PromptScores(*jax.lax.map(score, rows, batch_size=min(_SCORED_AT_ONCE, len(following_L))))


def admit_row(
  model: ModelConfig,
  settings: EngineSettings,
  slots: SlotState,
  cache: decoder.Cache,
  logits_1xV: jax.Array,
  length: jax.Array,
  slot: jax.Array,
  row: RowSettings,
) -> tuple[SlotState, Sampled]:
  """Places an encoded prompt into a slot and samples the first token of its completion."""
  del model
  key_1x2 = jax.random.key_data(_row_key(row))[None]
  own = row.temperature[None], row.top_p[None], row.scored[None]
  sampled = _sample(logits_1xV, key_1x2, jnp.zeros(1, jnp.int32), *own)
  first = jax.tree.map(lambda x: x[0], sampled)
  ended = jnp.isin(first.token, jnp.asarray(settings.end_ids, jnp.int32))

  def place(old, new):
    return jax.lax.dynamic_update_slice(old, new, (slot, *[0] * (old.ndim - 1)))

  put = lambda name, value: getattr(slots, name).at[slot].set(value)  # noqa: E731
  slots = SlotState(
    cache=jax.tree.map(place, slots.cache, cache),
    token_S=put('token_S', first.token),
    length_S=put('length_S', length),
    sampled_S=put('sampled_S', 1),
    left_S=put('left_S', jnp.where(ended, 0, row.max_tokens - 1)),
    key_Sx2=put('key_Sx2', key_1x2[0]),
    temperature_S=put('temperature_S', row.temperature),
    top_p_S=put('top_p_S', row.top_p),
    scored_S=put('scored_S', row.scored),
  )
  return slots, first


def decode_window(
  model: ModelConfig,
  settings: EngineSettings,
  params: Params,
  slots: SlotState,
  keep_S: jax.Array,
) -> tuple[SlotState, Sampled]:
  """At most W tokens of each slot, [W, S]; ends early once all are idle. Slots without `keep_S` become idle first."""
  slots = slots._replace(left_S=jnp.where(keep_S, slots.left_S, 0))
  W, S, N = settings.window, settings.slots, ALTERNATIVES
  token_WxS = jnp.full((W, S), -1, jnp.int32)
  logp_WxS, top_id = jnp.zeros((W, S)), jnp.zeros((W, S, N), jnp.int32)
  window = Sampled(token_WxS, logp_WxS, logp_WxS, top_id, jnp.zeros((W, S, N)))

  def iterate(state):
    i, slots, window = state
    slots, sampled = _decode_token(model, settings, params, slots)
    return i + 1, slots, jax.tree.map(lambda all_W, x: all_W.at[i].set(x), window, sampled)

  def goes_on(state):
    return (state[0] < W) & (state[1].left_S > 0).any()

  _, slots, window = jax.lax.while_loop(goes_on, iterate, (jnp.int32(0), slots, window))
  return slots, window


def _decode_token(
  model: ModelConfig, settings: EngineSettings, params: Params, slots: SlotState
) -> tuple[SlotState, Sampled]:
  """One token of every busy slot. Idle slots compute on, and nothing of theirs is recorded."""
  busy_S = slots.left_S > 0
  column_1xC = jnp.arange(settings.context)[None]
  length_Sx1 = jnp.minimum(slots.length_S, settings.context - 1)[:, None]
  hidden_Sx1xD, cache, _ = decoder.apply(
    model,
    params,
    slots.token_S[:, None],
    length_Sx1,
    (column_1xC <= length_Sx1)[:, None],
    cache=slots.cache,
    at=length_Sx1[:, 0],
    key_positions_BxS=jnp.broadcast_to(column_1xC, (settings.slots, settings.context)),
    dtype=settings.dtype,
  )
  logits_SxV = decoder.head(model, params, hidden_Sx1xD[:, 0], settings.dtype)
  sampled = _sample(
    logits_SxV,
    slots.key_Sx2,
    slots.sampled_S,
    slots.temperature_S,
    slots.top_p_S,
    slots.scored_S & busy_S,
  )
  sampled = sampled._replace(token=jnp.where(busy_S, sampled.token, -1))
  ended_S = jnp.isin(sampled.token, jnp.asarray(settings.end_ids, jnp.int32))
  slots = slots._replace(
    cache=cache,
    token_S=jnp.where(busy_S, sampled.token, slots.token_S),
    length_S=slots.length_S + busy_S,
    sampled_S=slots.sampled_S + busy_S,
    left_S=jnp.where(ended_S, 0, slots.left_S - busy_S),
  )
  return slots, sampled


def _row_key(row: RowSettings) -> jax.Array:
  """The key of a row, as `rollout.stream` derives it from a seed: slots and other rows do not enter."""
  zero_1 = jnp.zeros(1, jnp.int32)
  prompts = Prompts(zero_1[None], zero_1, row.prompt[None], zero_1, zero_1)
  return sampling.row_keys(jax.random.key(row.seed), prompts, 1, row.member[None])[0]


def _sample(
  logits_SxV: jax.Array,
  key_Sx2: jax.Array,
  index_S: jax.Array,
  temperature_S: jax.Array,
  top_p_S: jax.Array,
  scored_S: jax.Array,
) -> Sampled:
  """Token `index_S` of each row, with settings of its own. Filters and alternatives cost time only where wanted."""
  greedy_S = temperature_S == 0
  scaled_SxV = logits_SxV / jnp.where(greedy_S, 1, temperature_S)[:, None]
  filtered_S = (top_p_S < 1) & ~greedy_S

  def filter_rows(x_SxV):
    return jnp.where(filtered_S[:, None], sampling.nucleus(x_SxV, top_p_S[:, None]), x_SxV)

  scaled_SxV = jax.lax.cond(filtered_S.any(), filter_rows, lambda x: x, scaled_SxV)
  uniform_S = sampling.uniforms(jax.random.wrap_key_data(key_Sx2), index_S)
  token_S, behavior_S = sampling.sample(scaled_SxV, uniform_S, 1.0, greedy_B=greedy_S)
  nothing = jax.tree.map(
    lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(_alternatives, logits_SxV, token_S)
  )
  scores = jax.lax.cond(scored_S.any(), _alternatives, lambda *_: nothing, logits_SxV, token_S)
  return Sampled(token_S, behavior_S, *scores)


def _alternatives(
  logits_SxV: jax.Array, token_S: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """The log-prob of each row's token, and the likeliest tokens [S, ALTERNATIVES] with theirs."""
  logp_SxV = jax.nn.log_softmax(logits_SxV)
  N = min(ALTERNATIVES, logp_SxV.shape[1])
  top_SxN, id_SxN = jax.lax.top_k(logp_SxV, N)
  spare = ((0, 0), (0, ALTERNATIVES - N))  # a vocabulary of fewer tokens
  top_SxN = jnp.pad(top_SxN, spare, constant_values=-jnp.inf)
  logp_S = jnp.take_along_axis(logp_SxV, token_S[:, None], axis=1)[:, 0]
  return logp_S, jnp.pad(id_SxN.astype(jnp.int32), spare), top_SxN

"""Prefill each prompt once, then decode its rollouts in slots: a finished row hands its slot to the next one.

All of it is one `lax.while_loop`. Every slot writes its keys and values into the same column of a ring, which
moves on by one each iteration. A row at its token a sees the a + 1 youngest columns, so that handing on a
slot is setting a to 0: nothing is moved, cleared or scattered. A layer whose window slides has a ring of that
window. The ring may grow with the longest row: then it is a chain of loops, each with a ring twice as wide.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.models import decoder, kvcache
from jaxrl_llm.rollout import carried_kv, early_exit, sampling, slot_loop
from jaxrl_llm.rollout.slot_loop import DecodeSettings
from jaxrl_llm.types import ModelConfig, Prompts, Rollout

LOOP_SCOPE = 'decode'  # what the loop is called inside the compiled program


def generate(
  model: ModelConfig,
  params: Any,
  prompts: Prompts,
  key: jax.Array,
  version: jax.Array,
  spec: DecodeSettings,
  *,
  begun: Rollout | None = None,
  cap: jax.Array | int | None = None,
  pause: int | None = None,
  member_B: jax.Array | None = None,
) -> tuple[Rollout, jax.Array]:
  """Samples G completions of each prompt: rows b = p * G + g of a Rollout, and the iterations it took.

  `params` are laid out and cast for decoding by the caller: nothing is gathered in the loop. The key
  of a token is fold(key, born, prompt index, g, position), so neither slots, order, mesh nor an
  interruption changes a sample. Columns past a row's end hold token 0 and log-probability 0.

  `begun` holds rows to continue (UNFINISHED) or to leave as they are; `cap`, at most T, is a traced
  number or one per row [B]. Rows that `spec.stop` cuts short, or that reach `pause` tokens, stay
  UNFINISHED. `member_B` says which rollout of its prompt a row is, where that is not b % G.
  Source: none.
  """
  fixed, rollout, _ = slot_loop.prepare(
    model, params, prompts, key, version, spec, begun, cap, pause, member_B
  )
  carry = _loops(fixed, rollout, begun is not None)
  return carry.rollout, carry.iterations


def resume(
  model: ModelConfig,
  params: Any,
  prompts: Prompts,
  key: jax.Array,
  version: jax.Array,
  spec: DecodeSettings,
  begun: Rollout | None,
  kept: carried_kv.CarriedKV,
  *,
  cap: jax.Array | int | None = None,
) -> tuple[Rollout, jax.Array, carried_kv.CarriedKV]:
  """As `generate`, with the keys and values of unfinished rows handed in and out: none is encoded again.

  `kept` is in the order of these prompts (`carried.moved`). A row that holds more tokens than `kept`
  knows keys of decodes the others once more, without recording them.
  Source: arXiv:2509.19128 (PipelineRL: keys of older weights stay), with the prompt's encoded anew here.
  """
  fixed, rollout, _ = slot_loop.prepare(model, params, prompts, key, version, spec, begun, cap)
  fixed = fixed._replace(kept=kept)
  carry = _loops(fixed, rollout, resumes=True)
  return carry.rollout, carry.iterations, carried_kv.left(fixed, carry)


def _loops(fixed: slot_loop.Fixed, rollout: Rollout, resumes: bool) -> slot_loop.Carry:
  """Seats rows and decodes until the last loop of the chain is over."""
  chain = widths(fixed.spec, resumes)
  first_N = slot_loop.ring_widths(fixed.model, chain[0])
  if fixed.kept is None:
    carry = slot_loop.begin(fixed, rollout, resumes, first_N, _encode)
  else:
    carry = slot_loop.begin(fixed, rollout, resumes, first_N)
    carry = carried_kv.seated(fixed, carry, jnp.full_like(carry.row_S, len(fixed.keys_B)))
  for old, width in zip(chain[:1] + chain[:-1], chain, strict=True):
    carry = _widened(fixed.model, carry, old, width)
    with jax.named_scope(LOOP_SCOPE):
      carry = jax.lax.while_loop(
        functools.partial(_running, fixed, width), functools.partial(_body, fixed), carry
      )
  return carry


def widths(spec: DecodeSettings, resumes: bool = False) -> list[int]:
  """Of the ring, one for each loop of the chain. Rows to continue may be of any length: they need all of it.

  Source: none.
  """
  windows = 1 if resumes else spec.windows
  return [-(-spec.max_tokens // 2**i) for i in reversed(range(windows))]


def _running(fixed: slot_loop.Fixed, width: int, carry: slot_loop.Carry) -> jax.Array:
  """Whether this loop of the chain goes on: a ring that a row outgrows hands over to the next one."""
  go_on = slot_loop.running(fixed, carry)
  if width == fixed.spec.max_tokens:
    return go_on
  busy_S = carry.row_S < len(fixed.keys_B)
  outgrown_S = busy_S & (carry.at_S + fixed.spec.test_every > width)
  return go_on & ~slot_loop.anywhere(fixed, outgrown_S.any())


def _body(fixed: slot_loop.Fixed, carry: slot_loop.Carry) -> slot_loop.Carry:
  if fixed.spec.test_every == 1:
    return _iterate(fixed, carry)
  return jax.lax.fori_loop(0, fixed.spec.test_every, lambda _, c: _iterate(fixed, c), carry)


def _iterate(fixed: slot_loop.Fixed, carry: slot_loop.Carry) -> slot_loop.Carry:
  """One token for every slot that has a row, then slots change hands."""
  spec, (row_S, at_S) = fixed.spec, slot_loop.bounded(fixed, carry)
  logits_SxV, cache, expert_SxNxk = decode(fixed, carry)
  uniform_S = sampling.uniforms(fixed.keys_B[row_S], at_S + 1)
  token_S, logp_S = sampling.sample(logits_SxV, uniform_S, spec.temperature, spec.token_filter)
  # A row that streams what it held before takes its own next token and records nothing.
  held_S = at_S + 1 < carry.rollout.length_B[row_S]
  write_S = jnp.where(held_S, len(fixed.keys_B), carry.row_S)
  rollout = slot_loop.record(fixed, carry.rollout, write_S, at_S + 1, token_S, logp_S)
  if spec.record_experts:
    went = rollout.expert_BxTxNxk.at[write_S, at_S].set(expert_SxNxk, mode='drop')
    rollout = rollout._replace(expert_BxTxNxk=went)
  carry = carry._replace(
    rollout=rollout,
    at_S=carry.at_S + 1,
    column=carry.column + 1,
    cache=cache,
  )
  if spec.exit_rule is not early_exit.none:
    carry = slot_loop.judge(fixed, carry, write_S, logits_SxV)
  before_S, carry = carry.row_S, slot_loop.hand_on(fixed, carry)
  if fixed.kept is None or len(before_S) == len(fixed.keys_B):
    return carry
  return carried_kv.seated(fixed, carry, before_S)


def decode(
  fixed: slot_loop.Fixed, carry: slot_loop.Carry
) -> tuple[jax.Array, decoder.Cache, jax.Array | None]:
  """Each slot's last token goes through the model: logits [S, V] of its next one, the ring with it, its experts.

  Source: none.
  """
  row_S, at_S = slot_loop.bounded(fixed, carry)
  prompt_S = row_S // fixed.spec.rollouts
  position_Sx1 = (fixed.prompts.length_P[prompt_S] + at_S)[:, None]
  width_N = [jax.tree.leaves(kv)[0].shape[2] for kv in carry.cache]
  width = dict(zip(fixed.model.slides, width_N, strict=True))

  def seen(slides):
    W = width.get(slides, 0)
    return ((carry.column - jnp.arange(W))[None] % W <= at_S[:, None])[:, None]

  hidden, cache, expert_Sx1xNxk = decoder.apply(
    fixed.model,
    fixed.params,
    carry.rollout.tokens_BxT[row_S, at_S][:, None],
    position_Sx1,
    seen(False),
    shared=slot_loop.prompts_of(fixed, prompt_S),
    cache=carry.cache,
    at=carry.column,
    sliding_mask_BxQxS=seen(True),
    dtype=fixed.spec.dtype,
  )
  logits_SxV = decoder.head(fixed.model, fixed.params, hidden[:, 0], fixed.spec.dtype)
  return logits_SxV, cache, None if expert_Sx1xNxk is None else expert_Sx1xNxk[:, 0]


def _widened(model: ModelConfig, carry: slot_loop.Carry, old: int, width: int) -> slot_loop.Carry:
  """The ring cut open after its youngest column, and drawn out from `old` to `width` columns."""
  if old == width:
    return carry

  def stretch(x, wide):
    x = jnp.roll(x, old - carry.column, axis=2)
    return jnp.pad(x, [(0, 0)] * 2 + [(0, wide - x.shape[2])] + [(0, 0)] * (x.ndim - 3))

  wide_N = slot_loop.ring_widths(model, width)
  cache = [
    jax.tree.map(lambda x: stretch(x, wide), kv)  # noqa: B023
    for kv, wide in zip(carry.cache, wide_N, strict=True)
  ]
  return carry._replace(cache=cache, column=jnp.int32(old))


def _encode(
  fixed: slot_loop.Fixed, row_S: jax.Array, at_S: jax.Array, rollout: Rollout
) -> decoder.Cache:
  """The ring with what the slots' rows hold: token j of a row at its token a gets age a − j."""
  T = fixed.spec.max_tokens

  def rolled(x, width):
    # The next token of a row goes to column 0, so the one of age a lies in column −a.
    source_SxW = (at_S[:, None] - (-jnp.arange(width))[None] % width) % T
    x = jnp.take_along_axis(x, source_SxW[:, None, :, None], axis=2)
    return kvcache.pack(x, fixed.spec.cache_dtype)

  width_N = slot_loop.ring_widths(fixed.model, T)
  held = slot_loop.held(fixed, row_S, rollout)
  return [tuple(rolled(x, w) for x in kv) for kv, w in zip(held, width_N, strict=True)]

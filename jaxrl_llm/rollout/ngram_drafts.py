"""Drafts from what a row's group has said so far, verified in the loop: several tokens a round, and the same tokens.

Every round a slot looks for its row's last tokens in the text of the row and its siblings. What followed there is
its draft, and one forward pass reads the row's next token and the draft. At each position the token is drawn
as the plain engine draws it, from the uniform keyed by (prompt, rollout, position); the draft counts as far as it
says the same. So a draft token y is taken with probability p(y), and the outcome is, token for token, that of
`engine.generate`, whatever was drafted.

Rows advance by different amounts, so that here token j of a row lies in column j of its cache. Columns that a
rejected draft has written are hidden by their position until the tokens that belong there overwrite them.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.models import decoder, kvcache
from jaxrl_llm.rollout import sampling, slot_loop
from jaxrl_llm.types import UNFINISHED, ModelConfig, Prompts, Rollout


class NgramSettings(NamedTuple):
  """What is fixed when generation is compiled."""

  match: int  # tokens at the end of a row that are looked for, at most
  draft: int  # tokens guessed a round, at most


class Counts(NamedTuple):
  """How drafts fared, summed over rounds and slots."""

  turns: jax.Array  # times a slot sampled in a round; a turn samples 1 + kept tokens
  offered: jax.Array  # draft tokens found
  kept: jax.Array  # draft tokens that were what the policy drew


class _Carry(NamedTuple):
  loop: slot_loop.Carry
  counts: Counts


def generate(
  model: ModelConfig,
  params: Any,
  prompts: Prompts,
  key: jax.Array,
  version: jax.Array,
  spec: slot_loop.DecodeSettings,
  settings: NgramSettings,
  *,
  begun: Rollout | None = None,
  cap: jax.Array | int | None = None,
) -> tuple[Rollout, jax.Array, Counts]:
  """`engine.generate` with drafts: the same rollout in fewer rounds, and how the drafts fared.

  P(token = y) = p(y), drafted or not: the rule for drafts without a distribution of their own, accept y with
  probability p(y), else sample p without y, comes out of one inverse-CDF draw. The logits of all draft + 1
  positions of all slots exist at once. A stop rule in tokens may be overshot by `draft` tokens a slot.
  Source: arXiv:2511.14617 (Seer), with a search on the device in place of its suffix tree and one fixed
  draft length in place of its budget.
  """
  fixed, rollout, _ = slot_loop.prepare(model, params, prompts, key, version, spec, begun, cap)
  width = spec.max_tokens + settings.draft  # the last token's draft has a place, too
  encode = functools.partial(_encode, width)
  # A row's tokens lie in columns of their own number, in sliding layers too: a draft that fails is written over.
  width_N = [width] * model.layers
  loop = slot_loop.begin(fixed, rollout, begun is not None, width_N, encode)
  carry = jax.lax.while_loop(
    lambda c: slot_loop.running(fixed, c.loop),
    lambda c: _iterate(fixed, settings, c),
    _Carry(loop, Counts(*[jnp.int32(0)] * 3)),
  )
  return carry.loop.rollout, carry.loop.iterations, carry.counts


def find_drafts(
  tokens_BxT: jax.Array, length_B: jax.Array, row_S: jax.Array, rollouts: int, settings: NgramSettings
) -> jax.Array:
  """What followed a row's last tokens elsewhere in its group: [S, draft] tokens, −1 where there is none.

  The place that shares most of the row's last `match` tokens counts; of equals the one that more tokens
  follow (up to `draft`), then the one furthest from its row's start, then the lowest sibling. All
  siblings have the same prompt, so that their first tokens stand in the same context.
  Source: arXiv:2511.14617 (Seer: drafts from the group's own text).
  """
  match, draft = settings
  T = tokens_BxT.shape[1]
  sibling_SxG = (row_S // rollouts * rollouts)[:, None] + jnp.arange(rollouts)[None]
  text_SxGxT, length_SxG = tokens_BxT[sibling_SxG], length_B[sibling_SxG]
  before = lambda x: jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(match, 0)], constant_values=-1)  # noqa: E731
  padded, own = before(text_SxGxT), before(tokens_BxT[row_S])
  shared_SxGxT = jnp.zeros(text_SxGxT.shape, jnp.int32)
  same = jnp.ones(text_SxGxT.shape, bool)
  for back in range(1, match + 1):
    # Token j − back of every text, beside token length − back of the row.
    there = jax.lax.slice_in_dim(padded, match - back, match - back + T, axis=2)
    here_S = jnp.take_along_axis(own, (match + length_B[row_S] - back)[:, None], axis=1)
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


def _iterate(fixed: slot_loop.Fixed, settings: NgramSettings, carry: _Carry) -> _Carry:
  """One token and those of its draft that hold, for every slot that has a row; then slots change hands."""
  spec, loop, T = fixed.spec, carry.loop, fixed.spec.max_tokens
  row_S = jnp.minimum(loop.row_S, len(fixed.keys_B) - 1)
  at_S = jnp.minimum(loop.at_S, T - 1)
  place_SxQ = at_S[:, None] + jnp.arange(settings.draft + 1)[None]
  prompt_S = row_S // spec.rollouts
  input_SxQ = _inputs(spec, settings, loop.rollout, row_S, place_SxQ)
  start_Sx1, column_W = fixed.prompts.length_P[prompt_S][:, None], jnp.arange(T + settings.draft)
  hidden, cache, _ = decoder.apply(
    fixed.model,
    fixed.params,
    jnp.maximum(input_SxQ, 0),
    start_Sx1 + place_SxQ,
    column_W[None, None] <= place_SxQ[:, :, None],
    shared=slot_loop.prompts_of(fixed, prompt_S),
    cache=loop.cache,
    at=at_S,
    key_positions_BxS=start_Sx1 + column_W[None],
    dtype=spec.dtype,
  )
  logits = decoder.head(fixed.model, fixed.params, hidden, spec.dtype)
  keys_N = jnp.repeat(fixed.keys_B[row_S], settings.draft + 1)
  token_N, logp_N = sampling.sample(
    logits.reshape(len(keys_N), -1),
    sampling.uniforms(keys_N, place_SxQ.reshape(-1) + 1),
    spec.temperature,
    spec.token_filter,
  )
  drawn = token_N.reshape(place_SxQ.shape), logp_N.reshape(place_SxQ.shape)
  rollout, right_S = _verify(fixed, loop, at_S, input_SxQ, *drawn)
  counts = _counted(carry, row_S, rollout, input_SxQ, place_SxQ)
  return _Carry(
    slot_loop.hand_on(fixed, loop._replace(at_S=at_S + right_S, rollout=rollout, cache=cache)),
    counts,
  )


def _inputs(spec, settings: NgramSettings, rollout: Rollout, row_S, place_SxQ):
  """What goes into the model: tokens that the rows hold, their drafts behind these, −1 for none."""
  draft_SxN = find_drafts(rollout.tokens_BxT, rollout.length_B, row_S, spec.rollouts, settings)
  ahead_SxQ = place_SxQ - rollout.length_B[row_S][:, None]
  draft_SxQ = jnp.take_along_axis(draft_SxN, jnp.clip(ahead_SxQ, 0, settings.draft - 1), axis=1)
  held_SxQ = rollout.tokens_BxT[row_S[:, None], jnp.minimum(place_SxQ, spec.max_tokens - 1)]
  return jnp.where(ahead_SxQ < 0, held_SxQ, draft_SxQ)


def _verify(fixed: slot_loop.Fixed, loop: slot_loop.Carry, at_S, input_SxQ, token_SxQ, logp_SxQ):
  """Records what was drawn behind right inputs; the rollout, and how many inputs of each slot were right."""
  B, rollout = len(fixed.keys_B), loop.rollout
  row_S, right_S, count_S = jnp.minimum(loop.row_S, B - 1), loop.row_S < B, 0
  for q in range(input_SxQ.shape[1]):
    if q:  # the first input is a token that the row holds
      said_S = rollout.tokens_BxT[row_S, at_S + q]
      right_S &= (input_SxQ[:, q] == said_S) & (rollout.reason_B[row_S] == UNFINISHED)
    count_S += right_S
    fresh_S = right_S & (at_S + q + 1 >= rollout.length_B[row_S])
    write_S = jnp.where(fresh_S, row_S, B)
    rollout = slot_loop.record(
      fixed, rollout, write_S, at_S + q + 1, token_SxQ[:, q], logp_SxQ[:, q]
    )
  return rollout, count_S


def _counted(carry: _Carry, row_S, rollout: Rollout, input_SxQ, place_SxQ) -> Counts:
  before_S, busy_S = carry.loop.rollout.length_B[row_S], carry.loop.row_S < len(rollout.length_B)
  sampled_S = jnp.where(busy_S, rollout.length_B[row_S] - before_S, 0)
  drafted = busy_S[:, None] & (place_SxQ >= before_S[:, None]) & (input_SxQ >= 0)
  turns = (sampled_S > 0).sum()
  return Counts(
    carry.counts.turns + turns,
    carry.counts.offered + drafted.sum(),
    carry.counts.kept + sampled_S.sum() - turns,
  )


def _encode(width: int, fixed: slot_loop.Fixed, row_S, at_S, rollout: Rollout) -> decoder.Cache:
  """The cache with what the slots' rows hold, token j in column j."""
  spare = [(0, 0), (0, 0), (0, width - fixed.spec.max_tokens), (0, 0)]
  wide = lambda x: kvcache.pack(jnp.pad(x, spare), fixed.spec.cache_dtype)  # noqa: E731
  return jax.tree.map(wide, slot_loop.held(fixed, row_S, rollout))

"""Draft head: predicts the policy's next hidden states, whose tokens are drafts; each update trains it on the rollouts.

A public function, named in `config.rollout.draft_head.fn`, returns None or a DraftHead. Drafts change no token
(`draft_decode`). The head drafts only while it is expected to save time.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxrl_llm.models import decoder, logprob
from jaxrl_llm.rollout import draft_decode, slot_loop
from jaxrl_llm.rollout.decode_records import LoopConstants
from jaxrl_llm.types import Metrics, ModelConfig, Params, Rollout, UserError

_STEP_DECAY = 0.8  # weight of a draft token's loss over that of the one before it


class DraftHeadState(NamedTuple):
  """A two-layer perceptron, its optimizer state, and how well it drafted lately."""

  params: Params
  opt_state: optax.OptState
  accepted: jax.Array  # float32 [], running mean of the draft tokens accepted per turn


class PredictedTokens(NamedTuple):
  """Completions one after another, each token with the hidden state that predicts it. Z shards, U tokens of each."""

  hidden_ZxUxD: jax.Array
  token_ZxU: jax.Array
  place_ZxU: jax.Array  # of the token in its completion
  used_Z: jax.Array  # tokens of a shard; those behind are padding


class DraftSums(NamedTuple):
  """Sums over the tokens that draft tokens predict."""

  kl_K: jax.Array  # KL(policy ‖ draft) in nats, [k] by the draft token's place in the draft
  first_accepted: jax.Array  # the probability that the first token of a draft is accepted
  turns: jax.Array  # times that a slot samples the tokens with drafts: an expected number


class DraftHead(NamedTuple):
  """Settings of a head, and its rules."""

  tokens: int  # k, drafted in a decode iteration
  width: int  # features between the layers; 0: twice the hidden state's
  learning_rate: float
  clip_norm: float
  rollouts: int  # of each prompt that train the head
  cost: float
  memory: float

  def init(self, features: int, seed: int) -> DraftHeadState:
    """A head that predicts no change of the hidden state, and does not draft."""
    width = self.width or 2 * features
    scale = (2 * features) ** -0.5
    first = jax.random.normal(jax.random.key(seed), (2 * features, width)) * scale
    params = dict(w1=first, b1=jnp.zeros(width), w2=jnp.zeros((width, features)))
    return DraftHeadState(params, self._optimizer().init(params), jnp.float32(0))

  def proposes(self, state: DraftHeadState) -> jax.Array:
    """Whether a decode iteration with drafts samples more tokens of a slot than it costs: bool []."""
    return 1 + state.accepted > self.cost

  def drafter(self, state: DraftHeadState) -> draft_decode.Drafter:
    """Drafts of `tokens` tokens, each drawn by the uniform that draws the policy's token at its position."""

    def propose(constants: LoopConstants, rollout: Rollout, slots: draft_decode.Slots) -> jax.Array:
      model, dtype, hidden_SxD = constants.model, constants.settings.dtype, slots.hidden_SxD
      assert hidden_SxD is not None
      token_S, draft = jnp.maximum(slots.known_SxQ[:, 0], 0), [slots.known_SxQ[:, 0]]
      for q in range(1, self.tokens + 1):
        embedded_SxD = decoder.embed(constants.params, token_S, dtype)
        hidden_SxD = _next_hidden(state.params, hidden_SxD, embedded_SxD)
        logits_SxV = decoder.head(model, constants.params, hidden_SxD, dtype)
        drawn_S, _ = slot_loop.sample_rows(
          constants, logits_SxV, slots.row_S, slots.index_SxQ[:, q]
        )
        known_S = slots.known_SxQ[:, q]
        token_S = jnp.where(known_S >= 0, known_S, drawn_S)
        draft.append(token_S)
      return jnp.stack(draft, axis=1)

    return draft_decode.Drafter(self.tokens, propose, reads_hidden=True)

  def counts(self, length_B: jax.Array) -> jax.Array:
    """How many tokens [k] of completions of these lengths each place in a draft may predict."""
    place_K = jnp.arange(1, self.tokens + 1)
    return jnp.maximum(length_B[:, None] - place_K[None], 0).sum(0).astype(jnp.float32)

  def loss(
    self,
    model: ModelConfig,
    params: Params,
    policy: Params,
    inputs: PredictedTokens,
    count_K: jax.Array,
    *,
    temperature: float,
    chunk_tokens: int,
    dtype: str,
  ) -> tuple[jax.Array, DraftSums]:
    """Σ_k 0.8^(k − 1)·Σ KL(policy ‖ draft token k) / count_k, and its sums without a gradient.

    Draft token k at a token is that of a draft which began k tokens before it, with the rollout's tokens and the head's
    own hidden states between.
    """
    draft_ZxKxUxD = self._unroll(params, policy, inputs, dtype)
    kl_ZxKxU, share_ZxKxU = _compare(
      model, policy, inputs, draft_ZxKxUxD, temperature, chunk_tokens, dtype
    )
    in_use_ZxU = jnp.arange(inputs.token_ZxU.shape[1])[None] < inputs.used_Z[:, None]
    place_1xKx1 = jnp.arange(1, self.tokens + 1)[None, :, None]
    real_ZxKxU = in_use_ZxU[:, None] & (inputs.place_ZxU[:, None] >= place_1xKx1)
    kl_K = jnp.where(real_ZxKxU, kl_ZxKxU, 0).sum((0, 2))
    weight_K = _STEP_DECAY ** jnp.arange(self.tokens) / jnp.maximum(count_K, 1)
    began_ZxU = _shifted(_turn_begins(share_ZxKxU, inputs.place_ZxU))
    first_accepted, turns = (
      jnp.where(real_ZxKxU[:, 0], x_ZxU, 0).sum() for x_ZxU in (share_ZxKxU[:, 0], began_ZxU)
    )
    return (weight_K * kl_K).sum(), jax.lax.stop_gradient(DraftSums(kl_K, first_accepted, turns))

  def learn(
    self, state: DraftHeadState, grads: Params, sums: DraftSums, count_K: jax.Array
  ) -> tuple[DraftHeadState, Metrics]:
    """One step of Adam, and the running mean; without tokens or with a gradient that is not finite, the state stays."""
    updates, opt_state = self._optimizer().update(grads, state.opt_state, state.params)
    count = jnp.maximum(count_K[0], 1)
    accepted = count / jnp.maximum(sums.turns, 1) - 1  # a turn samples 1 + accepted tokens
    mean = self.memory * state.accepted + (1 - self.memory) * accepted
    trained = DraftHeadState(optax.apply_updates(state.params, updates), opt_state, mean)
    usable = (count_K[0] > 0) & jnp.isfinite(optax.tree.norm(grads))
    state = jax.tree.map(lambda new, old: jnp.where(usable, new, old), trained, state)
    return state, {
      'draft_head/kl': sums.kl_K[0] / count,
      'draft_head/first_accepted': sums.first_accepted / count,
      'draft_head/accepted': accepted,
      'draft_head/proposes': self.proposes(state).astype(jnp.float32),
    }

  def _unroll(
    self, params: Params, policy: Params, inputs: PredictedTokens, dtype: str
  ) -> jax.Array:
    """The hidden states [Z, k, U, D] that drafts give for each token, by the token's place in the draft."""
    embedded_ZxUxD = _shifted(decoder.embed(policy, inputs.token_ZxU, dtype))
    hidden_ZxUxD, found = inputs.hidden_ZxUxD, []
    for _ in range(self.tokens):
      hidden_ZxUxD = _next_hidden(params, _shifted(hidden_ZxUxD), embedded_ZxUxD)
      found.append(hidden_ZxUxD)
    return jnp.stack(found, axis=1)

  def _optimizer(self) -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(self.clip_norm), optax.adam(self.learning_rate))


def none() -> None:
  """No head: tokens are decoded one by one, or drafted by `config.rollout.ngram`."""
  return None


def eagle(
  *,
  tokens: int = 3,
  width: int = 0,
  learning_rate: float = 1e-4,
  clip_norm: float = 0.5,
  rollouts: int = 1,
  cost: float = 1.5,
  memory: float = 0.9,
) -> DraftHead:
  """h' = h + W₂·silu(W₁·[h, e] + b), with h and the token's embedding e scaled to unit mean square, `tokens` times.

  h is the policy's hidden state after its final norm, and h' goes through the policy's own output matrix. The loss is
  Σ_k 0.8^(k − 1)·KL(policy ‖ draft k); loss, learning rate and bound of the gradient are those of the official code.
  Its head is a transformer layer over the whole row that reads three layers of the policy (EAGLE-3) and has an output
  matrix of its own; this one has no attention, reads the last layer alone and needs no cache. The official code drafts
  7 tokens and trains on each token that it serves; this function trains on `rollouts` completions of each prompt.
  arXiv:2602.06932 (Aurora), arXiv:2503.01840 (EAGLE-3).

  The head drafts while 1 + a > `cost`, where a is the number of draft tokens accepted per turn of a slot. The update
  computes its expectation for the tokens that it learns from, and averages it over steps with weight `memory` for the
  past. A turn at the end of a row accepts fewer. `cost` is the time of a decode iteration with drafts over
  that of one without. Where reading weights takes the time, it is about 1 + `tokens` · (output matrix + head) / all
  weights. Training goes on while the head does not draft. Raises UserError for settings out of range.
  """
  for name, value in (('tokens', tokens), ('rollouts', rollouts)):
    if value < 1:
      raise UserError(f'config.rollout.draft_head.{name}={value} must be at least 1.')
  if width < 0:
    raise UserError(f'config.rollout.draft_head.width={width} must be at least 0; 0 = automatic.')
  for name, value in (('learning_rate', learning_rate), ('clip_norm', clip_norm)):
    if not 0 < value < math.inf:
      raise UserError(f'config.rollout.draft_head.{name}={value} must be finite and above 0.')
  if not 0 <= cost < math.inf:
    raise UserError(
      f'config.rollout.draft_head.cost={cost} must be finite and at least 0; 0 = always draft.'
    )
  if not 0 <= memory < 1:
    raise UserError(
      f'config.rollout.draft_head.memory={memory} must be from 0 up to but not including 1.'
    )
  return DraftHead(tokens, width, learning_rate, clip_norm, rollouts, cost, memory)


def _next_hidden(params: Params, hidden: jax.Array, embedded: jax.Array) -> jax.Array:
  """The hidden state [..., D] after a token, from the one that predicted it and the token's embedding."""
  inputs = jnp.concatenate([_unit(hidden), _unit(embedded)], axis=-1)
  w1, b1, w2 = (params[name].astype(hidden.dtype) for name in ('w1', 'b1', 'w2'))
  return hidden + jax.nn.silu(inputs @ w1 + b1.reshape((1,) * (inputs.ndim - 1) + (-1,))) @ w2


def _unit(x: jax.Array) -> jax.Array:
  wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
  return (wide * jax.lax.rsqrt((wide**2).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype)


def _shifted(x_ZxUx_: jax.Array) -> jax.Array:
  """The value of the token before each token; 0 before the first."""
  return jnp.pad(x_ZxUx_[:, :-1], [(0, 0), (1, 0)] + [(0, 0)] * (x_ZxUx_.ndim - 2))


def _compare(
  model: ModelConfig,
  policy: Params,
  inputs: PredictedTokens,
  draft_ZxKxUxD: jax.Array,
  temperature: float,
  chunk_tokens: int,
  dtype: str,
) -> tuple[jax.Array, jax.Array]:
  """KL(policy ‖ draft), and the probability that the draft's token is the rollout's; both [Z, k, U]."""
  Z, K, U, D = draft_ZxKxUxD.shape
  # Chunks of logits hold those of the policy and of all drafts of the same tokens.
  hidden_ZxKxUxD = jnp.concatenate(
    [jax.lax.stop_gradient(inputs.hidden_ZxUxD)[:, None], draft_ZxKxUxD], axis=1
  )

  def compare(logits, token):
    split = lambda x: x.reshape(-1, K + 1, *x.shape[1:])  # noqa: E731
    logits, token = split(logits) / temperature, split(token)[:, 1:]
    policy_logp = jax.lax.stop_gradient(jax.nn.log_softmax(logits[:, :1]))
    draft_logp = jax.nn.log_softmax(logits[:, 1:])
    kl = (jnp.exp(policy_logp) * (policy_logp - draft_logp)).sum(-1)
    share = _agreement(policy_logp, jax.lax.stop_gradient(draft_logp), token)
    join = lambda x: jnp.pad(x, [(0, 0), (1, 0), (0, 0)]).reshape(-1, x.shape[-1])  # noqa: E731
    return join(kl), join(share)

  found = logprob.over_logits(
    compare,
    model,
    policy,
    hidden_ZxKxUxD.reshape(Z * (K + 1), U, D),
    jnp.repeat(inputs.token_ZxU, K + 1, axis=0),
    chunk_tokens=chunk_tokens,
    dtype=dtype,
    used=inputs.used_Z.max(),
  )
  kl, share = (x.reshape(Z, K + 1, U)[:, 1:] for x in found)
  return kl, share


def _turn_begins(share_ZxKxU: jax.Array, place_ZxU: jax.Array) -> jax.Array:
  """P(a slot begins a turn at the token), [Z, U]: at the first one of a row, and where the draft before it ended.

  A turn begins at a token whose draft was rejected, or behind k accepted ones. `share_ZxKxU` [k] is the probability
  that draft token k is accepted where those before it were.
  """

  def advance(input_ZxQ, token):
    """[q]: the probability that a token is the q-th accepted one of a draft, for q = 0 that a turn begins at it."""
    share_ZxK, place_Z = token
    accepted_ZxK = jnp.where(place_Z[:, None] > 0, input_ZxQ[:, :-1] * share_ZxK, 0)
    begins_Z = 1 - accepted_ZxK.sum(1)
    return jnp.concatenate([begins_Z[:, None], accepted_ZxK], axis=1), begins_Z

  Z, K, _ = share_ZxKxU.shape
  none_ZxQ = jnp.zeros((Z, K + 1), share_ZxKxU.dtype)
  tokens = jnp.moveaxis(share_ZxKxU, 2, 0), place_ZxU.T
  return jax.lax.scan(advance, none_ZxQ, tokens)[1].T


def _agreement(policy_logp: jax.Array, draft_logp: jax.Array, token: jax.Array) -> jax.Array:
  """P(the draft draws `token` | the policy did), where one uniform draws both by inverse CDF; [..., V] → [...].

  |[P⁻, P⁻ + p) ∩ [Q⁻, Q⁻ + q)| / p, with the probabilities p, q of the token and P⁻, Q⁻ of all tokens before it.
  """
  number = jax.lax.broadcasted_iota(jnp.int32, draft_logp.shape, draft_logp.ndim - 1)
  below, at = number < token[..., None], number == token[..., None]
  p, q = jnp.exp(policy_logp), jnp.exp(draft_logp)
  p_below, q_below = (jnp.where(below, x, 0).sum(-1) for x in (p, q))
  p_at, q_at = (jnp.where(at, x, 0).sum(-1) for x in (p, q))
  overlap = jnp.minimum(p_below + p_at, q_below + q_at) - jnp.maximum(p_below, q_below)
  return jnp.clip(overlap / jnp.maximum(p_at, 1e-30), 0, 1)

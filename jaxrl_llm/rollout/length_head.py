"""Length head: predicts from the hidden state at a prompt's end how many tokens its rollouts take.

A public function, named in `config.rollout.length_head.fn`, returns None or a LengthHead. With one, expected lengths of
the queue orders are its predictions, and each update trains it on the lengths of the batch.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxrl_llm.types import UNFINISHED, Metrics, Params, Rollout, UserError


class LengthHeadState(NamedTuple):
  """A two-layer perceptron and its optimizer state."""

  params: Params
  opt_state: optax.OptState


class LengthHead(NamedTuple):
  """Settings of a head, and its rules."""

  gamma: float  # discount of a token; 0: see `for_completions`
  learning_rate: float
  width: int  # features between the layers

  def for_completions(self, tokens: int) -> LengthHead:
    """The head for completions of at most `tokens` tokens: γ = 1 − 1 / tokens, where it is 0."""
    return self._replace(gamma=self.gamma or 1 - 1 / tokens)

  def init(self, features: int, seed: int) -> LengthHeadState:
    """A head that predicts the same for every input."""
    first = jax.random.normal(jax.random.key(seed), (features, self.width)) * features**-0.5
    zeros = jnp.zeros(self.width)
    params = dict(w1=first, b1=zeros, w2=zeros, b2=jnp.zeros(()))
    return LengthHeadState(params, self._optimizer().init(params))

  def remaining_tokens(self, state: LengthHeadState, hidden_NxD: jax.Array) -> jax.Array:
    """The predicted tokens [N] that follow each hidden state."""
    return _remaining_tokens(_logit(state.params, hidden_NxD), self.gamma)

  def train(self, state: LengthHeadState, rollout: Rollout) -> tuple[LengthHeadState, Metrics]:
    """One step of Adam on the finished rows; without any, the state stays as it is.

    Metrics are the mean absolute errors, in tokens, of the predictions before the step and of the best constant, the
    median length of these rows.
    """
    length_B, hidden_BxF = rollout.length_B, rollout.feature_BxF
    learned_B = (length_B > 0) & (rollout.reason_B != UNFINISHED)
    weight_B = learned_B.astype(jnp.float32)
    grads = jax.grad(_loss)(state.params, hidden_BxF, length_B, weight_B, self.gamma)
    updates, opt_state = self._optimizer().update(grads, state.opt_state, state.params)
    trained = LengthHeadState(optax.apply_updates(state.params, updates), opt_state)
    error = lambda tokens_B: _mean(jnp.abs(tokens_B - length_B), weight_B)  # noqa: E731
    metrics = {
      'length_head/error_tokens': error(self.remaining_tokens(state, hidden_BxF)),
      'length_head/constant_error_tokens': error(_median(length_B, learned_B)),
    }
    any_row = learned_B.any()
    return jax.tree.map(lambda new, old: jnp.where(any_row, new, old), trained, state), metrics

  def _optimizer(self) -> optax.GradientTransformation:
    return optax.adam(self.learning_rate)


def none() -> None:
  """No head: expected lengths are those of earlier visits to a prompt."""
  return None


def discounted_return(
  *, gamma: float = 0.0, learning_rate: float = 3e-3, width: int = 128
) -> LengthHead:
  """Each token costs 1 − γ, so that l tokens return G = −(1 − γ^l), which V = −σ(z) approximates.

  z is a perceptron of two layers with SiLU, the loss ½·(V − G)², and the prediction l = ln(1 + V) / ln γ.
  arXiv:2604.27039 (LenVM; the tests compare with official code). There the head is as wide as the hidden state, the
  whole model is trained, and each token is a sample; here the policy's hidden states at the ends of prompts are read,
  and learning rate and width are ours. `gamma=0` stands for 1 − 1 / config.completion_tokens: far beyond 1 / (1 − γ)
  tokens V is flat, and a small error in V is many tokens. Raises UserError for settings out of range.
  """
  for name, value, valid in (
    ('gamma', gamma, 0 <= gamma < 1),
    ('learning_rate', learning_rate, 0 < learning_rate < float('inf')),
    ('width', width, width >= 1),
  ):
    if not valid:
      bounds = 'from 0 up to but not including 1' if name == 'gamma' else 'finite and above 0'
      raise UserError(f'config.rollout.length_head.{name}={value} must be {bounds}.')
  return LengthHead(gamma, learning_rate, width)


def _logit(params: Params, hidden_NxD: jax.Array) -> jax.Array:
  between = jax.nn.silu(hidden_NxD @ params['w1'] + params['b1'][None])
  return between @ params['w2'] + params['b2']


def _loss(
  params: Params, hidden_NxD: jax.Array, length_N: jax.Array, weight_N: jax.Array, gamma: float
) -> jax.Array:
  """Σ w·½·(V − G)² / Σ w."""
  value_N = -jax.nn.sigmoid(_logit(params, hidden_NxD))
  return _mean(0.5 * (value_N - _discounted_return(length_N, gamma)) ** 2, weight_N)


def _discounted_return(length_N: jax.Array, gamma: float) -> jax.Array:
  return jnp.expm1(length_N * math.log(gamma))


def _remaining_tokens(logit_N: jax.Array, gamma: float) -> jax.Array:
  """ln(1 + V) / ln γ, from z: ln(1 − σ(z)) = −softplus(z) is finite for every z."""
  return jax.nn.softplus(logit_N) / -math.log(gamma)


def _mean(x_N: jax.Array, weight_N: jax.Array) -> jax.Array:
  return (weight_N * x_N).sum() / jnp.maximum(weight_N.sum(), 1)


def _median(length_N: jax.Array, learned_N: jax.Array) -> jax.Array:
  """The median length of the rows in `learned_N`, the lower one of two; undefined without any."""
  most = jnp.iinfo(jnp.int32).max
  ordered_N = jnp.sort(jnp.where(learned_N, length_N, most))
  return ordered_N[jnp.maximum(learned_N.sum() - 1, 0) // 2]

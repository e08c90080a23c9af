"""Correctness head: predicts from a hidden state whether a rollout will be correct, and learns from finished ones."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxrl_llm.types import Params

_WIDTH, _BINS = 128, 20
_DECAY = 0.99  # of the bins' counts, per update
_PRIOR = 2.0  # weight of a bin's middle as a prior, in rollouts


class CorrectnessHead(NamedTuple):
  """A two-layer perceptron with its optimizer state, and the outcomes counted per bin of its score."""

  params: Params
  opt_state: optax.OptState
  right_N: jax.Array
  count_N: jax.Array
  updates: jax.Array


def init(features: int, seed: int) -> CorrectnessHead:
  """A head whose score is 0 for every input. arXiv:2603.24840 (ARRoL; width from a re-implementation)."""
  first = jax.random.normal(jax.random.key(seed), (features, _WIDTH)) * features**-0.5
  params = dict(w1=first, b1=jnp.zeros(_WIDTH), w2=jnp.zeros(_WIDTH), b2=jnp.zeros(()))
  zeros = jnp.zeros(_BINS)
  return CorrectnessHead(params, _optimizer(1.0).init(params), zeros, zeros, jnp.int32(0))


def score(params: Params, feature_BxF: jax.Array) -> jax.Array:
  """The logit of success, [B], from features scaled to unit mean square. arXiv:2603.24840."""
  scale = jnp.sqrt((feature_BxF**2).mean(-1, keepdims=True) + 1e-6)
  hidden = jax.nn.gelu(feature_BxF / scale @ params['w1'] + params['b1'][None])
  return hidden @ params['w2'] + params['b2']


def probability(head: CorrectnessHead, feature_BxF: jax.Array, warmup_steps: int) -> jax.Array:
  """The probability of success, [B], calibrated by the outcomes of earlier rollouts; 1/2 during warmup.

  p = (right_n + k·m_n) / (count_n + k) for the score's bin n with middle m_n. arXiv:2603.24840 (calibration by bins;
  the prior is ours).
  """
  bin_B = _bin(score(head.params, feature_BxF))
  middle_B = (bin_B + 0.5) / _BINS
  p_B = (head.right_N[bin_B] + _PRIOR * middle_B) / (head.count_N[bin_B] + _PRIOR)
  return jnp.where(head.updates < warmup_steps, 0.5, p_B)


def train(
  head: CorrectnessHead,
  feature_BxF: jax.Array,
  right_B: jax.Array,
  weight_B: jax.Array,
  learning_rate: float,
) -> CorrectnessHead:
  """One AdamW step on Σ w·BCE / Σ w, and the bins' counts; rows of weight 0 are ignored.

  Weights 1/s correct for the sampling of survivors. arXiv:2603.24840.
  """
  total = jnp.maximum(weight_B.sum(), 1e-6)

  def loss(params):
    return (
      weight_B * optax.sigmoid_binary_cross_entropy(score(params, feature_BxF), right_B)
    ).sum()

  bin_B = _bin(score(head.params, feature_BxF))  # before the step, as at sampling
  grads = jax.tree.map(lambda g: g / total, jax.grad(loss)(head.params))
  updates, opt_state = _optimizer(learning_rate).update(grads, head.opt_state, head.params)
  trained = CorrectnessHead(
    optax.apply_updates(head.params, updates),
    opt_state,
    _DECAY * head.right_N + jnp.zeros(_BINS).at[bin_B].add(weight_B * right_B),
    _DECAY * head.count_N + jnp.zeros(_BINS).at[bin_B].add(weight_B),
    head.updates + 1,
  )
  # A batch without weight leaves the head unchanged, its decay included.
  return jax.tree.map(lambda new, old: jnp.where(weight_B.sum() > 0, new, old), trained, head)


def _bin(score_B: jax.Array) -> jax.Array:
  return jnp.clip((jax.nn.sigmoid(score_B) * _BINS).astype(jnp.int32), 0, _BINS - 1)


def _optimizer(learning_rate: float) -> optax.GradientTransformation:
  return optax.adamw(learning_rate, weight_decay=0.01)

"""The head that guesses from a hidden state whether a rollout will be right, and learns from those that ended."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

_WIDTH, _BINS = 128, 20
_DECAY = 0.99  # of the bins' counts, per update
_PRIOR = 2.0  # rollouts that a bin's own middle counts for


class CorrectnessHead(NamedTuple):
  """A two-layer perceptron, its optimizer, and how often each bin of its score was right."""

  params: Any
  opt_state: Any
  right_N: jax.Array
  count_N: jax.Array
  updates: jax.Array


def init(features: int, seed: int) -> CorrectnessHead:
  """A judge that says 1/2 to everything. Source: arXiv:2603.24840 (ARRoL; width from a re-implementation)."""
  first = jax.random.normal(jax.random.key(seed), (features, _WIDTH)) * features**-0.5
  params = dict(w1=first, b1=jnp.zeros(_WIDTH), w2=jnp.zeros(_WIDTH), b2=jnp.zeros(()))
  zeros = jnp.zeros(_BINS)
  return CorrectnessHead(params, _optimizer(1.0).init(params), zeros, zeros, jnp.int32(0))


def score(params: Any, feature_BxF: jax.Array) -> jax.Array:
  """The logit of being right, from a feature scaled to unit mean square. Source: arXiv:2603.24840."""
  scale = jnp.sqrt((feature_BxF**2).mean(-1, keepdims=True) + 1e-6)
  hidden = jax.nn.gelu(feature_BxF / scale @ params['w1'] + params['b1'][None])
  return hidden @ params['w2'] + params['b2']


def probability(judge: CorrectnessHead, feature_BxF: jax.Array, warmup_steps: int) -> jax.Array:
  """The probability of being right, by what became of earlier rollouts with such a score; 1/2 while warming up.

  p = (right_n + k·m_n) / (count_n + k) for the score's bin n with middle m_n. Source: arXiv:2603.24840
  (calibration by bins; the prior is ours).
  """
  bin_B = _bin(score(judge.params, feature_BxF))
  middle_B = (bin_B + 0.5) / _BINS
  p_B = (judge.right_N[bin_B] + _PRIOR * middle_B) / (judge.count_N[bin_B] + _PRIOR)
  return jnp.where(judge.updates < warmup_steps, 0.5, p_B)


def train(
  judge: CorrectnessHead,
  feature_BxF: jax.Array,
  right_B: jax.Array,
  weight_B: jax.Array,
  learning_rate: float,
) -> CorrectnessHead:
  """One AdamW step on Σ w·BCE / Σ w, and the bins' counts; rows of weight 0 do not exist.

  Weights 1/s undo the choice of who was finished. Source: arXiv:2603.24840.
  """
  total = jnp.maximum(weight_B.sum(), 1e-6)

  def loss(params):
    return (
      weight_B * optax.sigmoid_binary_cross_entropy(score(params, feature_BxF), right_B)
    ).sum()

  bin_B = _bin(score(judge.params, feature_BxF))  # before the step: as they were judged
  grads = jax.tree.map(lambda g: g / total, jax.grad(loss)(judge.params))
  updates, opt_state = _optimizer(learning_rate).update(grads, judge.opt_state, judge.params)
  learned = CorrectnessHead(
    optax.apply_updates(judge.params, updates),
    opt_state,
    _DECAY * judge.right_N + jnp.zeros(_BINS).at[bin_B].add(weight_B * right_B),
    _DECAY * judge.count_N + jnp.zeros(_BINS).at[bin_B].add(weight_B),
    judge.updates + 1,
  )
  return jax.tree.map(lambda new, old: jnp.where(weight_B.sum() > 0, new, old), learned, judge)


def _bin(score_B: jax.Array) -> jax.Array:
  return jnp.clip((jax.nn.sigmoid(score_B) * _BINS).astype(jnp.int32), 0, _BINS - 1)


def _optimizer(learning_rate: float) -> optax.GradientTransformation:
  return optax.adamw(learning_rate, weight_decay=0.01)

"""A network that predicts the velocity of a flow from noise to a hidden state, given another hidden state."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.types import Params

_FREQUENCIES, _MAX_PERIOD, _EPS = 128, 10000, 1e-6


def init(width: int, depth: int, seed: int) -> Params:
  """Weights of `depth` blocks for hidden states of `width` features, in float32; the first velocities are 0.

  Xavier's uniform kernels, but 0 for those of gates, shifts and scales and for the last one.
  """
  keys = iter(jax.random.split(jax.random.key(seed), 6 + 2 * depth))
  kernel = jax.nn.initializers.xavier_uniform()

  def dense(inputs: int, outputs: int, zero: bool = False) -> Params:
    shape = inputs, outputs
    made = jnp.zeros(shape) if zero else kernel(next(keys), shape, jnp.float32)
    return dict(kernel=made, bias=jnp.zeros(outputs))

  def embedding() -> Params:
    return dict(first=dense(2 * _FREQUENCIES, width), second=dense(width, width))

  def block() -> Params:
    return dict(
      norm=jnp.ones(width),
      first=dense(width, width),
      second=dense(width, width),
      modulation=dense(width, 3 * width, zero=True),
    )

  return dict(
    target=dense(width, width),
    time=embedding(),
    context=dense(width, width),
    layer=embedding(),
    blocks=[block() for _ in range(depth)],
    norm=jnp.ones(width),
    modulation=dense(width, 2 * width, zero=True),
    last=dense(width, width, zero=True),
  )


def velocity(
  params: Params, x: jax.Array, context: jax.Array, time: jax.Array, layer: jax.Array
) -> jax.Array:
  """The velocity […, D] at the point x […, D] and time []; `layer` [] is the layer's place among all, in [0, 1].

  Blocks of a perceptron whose shift, scale and gate depend on context […, D], time and layer. arXiv:2510.10201 (RLFR).
  """
  of_both = _embed(params['time'], time) + _embed(params['layer'], layer)
  given = jax.nn.silu(_dense(params['context'], context) + _spread(of_both, x.ndim))
  x = _dense(params['target'], x)
  for block in params['blocks']:
    shift, scale, gate = jnp.split(_dense(block['modulation'], given), 3, axis=-1)
    inner = _dense(block['first'], _norm(block['norm'], x) * (1 + scale) + shift)
    x = x + gate * _dense(block['second'], jax.nn.silu(inner))
  shift, scale = jnp.split(_dense(params['modulation'], given), 2, axis=-1)
  return _dense(params['last'], _norm(params['norm'], x) * (1 + scale) + shift)


def deviation(
  params: Params,
  target: jax.Array,
  context: jax.Array,
  noise: jax.Array,
  time: jax.Array,
  layer: jax.Array,
) -> jax.Array:
  """mean_D (v(t·target + (1 − t)·noise) − (target − noise))², […], of arrays […, D]. arXiv:2510.10201 (RLFR)."""
  wanted = target - noise
  got = velocity(params, time * target + (1 - time) * noise, context, time, layer)
  return ((got - wanted) ** 2).mean(-1)


def _dense(params: Params, x: jax.Array) -> jax.Array:
  return x @ params['kernel'] + _spread(params['bias'], x.ndim)


def _norm(scale: jax.Array, x: jax.Array) -> jax.Array:
  root = jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + _EPS)
  return x * root * _spread(scale, x.ndim)


def _spread(x_D: jax.Array, rank: int) -> jax.Array:
  return x_D.reshape((1,) * (rank - 1) + (-1,))


def _embed(params: Params, number: jax.Array) -> jax.Array:
  """Cosines and sines of a number [], through a perceptron: [D]."""
  rate = np.exp(-np.log(_MAX_PERIOD) * np.arange(_FREQUENCIES) / _FREQUENCIES)
  angle = number * jnp.asarray(rate, params['first']['kernel'].dtype)
  waves = jnp.concatenate([jnp.cos(angle), jnp.sin(angle)])
  return _dense(params['second'], jax.nn.silu(_dense(params['first'], waves)))

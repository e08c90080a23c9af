"""Kernels in int8 and float8: rounding errors, products, gradients, and which parameters are quantized."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxrl_llm.distributed import sharding
from jaxrl_llm.models import decoder, layer_loops, linear, logprob
from jaxrl_llm.types import ModelConfig

LOW = ('int8', 'float8_e4m3fn')
DENSE = ModelConfig(
  vocab=23, width=16, layers=2, heads=2, kv_heads=1, head_dim=8, mlp=24, max_tokens=16, tied=False
)
MODELS = dict(
  dense=DENSE,
  biased=dataclasses.replace(DENSE, tied=True, qkv_bias=True, out_bias=True, mlp_bias=True),
  mixture=dataclasses.replace(DENSE, experts=4, experts_per_token=2, norm_top_k=True),
)
KERNEL = np.random.default_rng(0).normal(size=(3, 20, 6)) * 10.0 ** np.arange(-3, 3)


def plain(kernel):
  """The dequantized kernel."""
  return kernel.data.astype(jnp.float32) * kernel.scale[..., None, :]


def dequantized(params):
  is_quantized = lambda x: isinstance(x, linear.Quantized)  # noqa: E731
  return jax.tree.map(lambda x: plain(x) if is_quantized(x) else x, params, is_leaf=is_quantized)


def test_int8_is_within_half_a_step_of_each_channel():
  got = linear.quantize(jnp.asarray(KERNEL), 'int8')
  assert got.data.dtype == jnp.int8 and got.scale.shape == (3, 6)
  np.testing.assert_allclose(got.scale, np.abs(KERNEL).max(1) / 127, rtol=1e-6)
  assert (np.abs(KERNEL - plain(got)) <= got.scale[:, None] / 2 * (1 + 1e-4)).all()
  assert (np.abs(got.data).max(1) == 127).all(), 'all of the range is used'


def test_float8_is_within_half_a_step_of_each_number():
  """3 bits behind the leading one; below 2^-6 of the scale steps are 2^-9 of it."""
  got = linear.quantize(jnp.asarray(KERNEL), 'float8_e4m3fn')
  assert got.data.dtype == jnp.float8_e4m3fn
  step = np.maximum(np.abs(KERNEL) / 16, np.asarray(got.scale)[:, None] * 2.0**-10)
  error = np.abs(KERNEL - plain(got))
  assert (error <= step * (1 + 1e-4)).all() and (error > 0.9 * step).any()


@pytest.mark.parametrize('dtype', LOW)
def test_representable_kernels_are_exact(dtype):
  """Integers up to the largest, times a power of two per channel; and channels of zeros."""
  largest = dict(int8=127, float8_e4m3fn=448)[dtype]
  data = np.array([[1, 8, -12, 0], [largest, -largest, largest, 0], [-96, 64, 5, 0]], np.float32)
  kernel = data * 2.0 ** np.array([-9, 0, 3, 1])
  got = linear.quantize(jnp.asarray(kernel), dtype)
  np.testing.assert_array_equal(plain(got), kernel)
  np.testing.assert_array_equal(got.data.astype(jnp.float32), data)


@pytest.mark.parametrize('dtype', LOW)
def test_infinite_numbers_stay_infinite(dtype):
  for bad in (np.nan, np.inf):
    got = linear.quantize(jnp.array([[1.0, bad], [2.0, 1.0]]), dtype)
    assert np.isfinite(plain(got)[:, 0]).all() and not np.isfinite(plain(got)[:, 1]).all()


@pytest.mark.parametrize('dtype', LOW)
@pytest.mark.parametrize('compute, error', [('float32', 2e-6), ('bfloat16', 0.02)])
def test_a_layer_is_the_product_with_the_dequantized_kernel(dtype, compute, error):
  layer = linear.Dense(20, 6, dtype=jnp.dtype(compute), rngs=nnx.Rngs(0))
  layer.bias = nnx.Param(jnp.arange(6.0))
  kernel = linear.quantize(jnp.asarray(KERNEL[0]), dtype)
  x = jax.random.normal(jax.random.key(1), (2, 3, 20))
  layer.kernel = nnx.Param(kernel)
  got = layer(x)
  want = x @ plain(kernel) + jnp.arange(6.0).reshape(1, 1, 6)
  assert got.dtype == jnp.dtype(compute) and got.shape == want.shape
  size = np.abs(want).max((0, 1))
  assert (np.abs(got.astype(jnp.float32) - want).max((0, 1)) <= error * size).all()


@pytest.mark.parametrize('dtype', LOW)
@pytest.mark.parametrize('name', MODELS)
def test_a_model_equals_that_of_the_dequantized_kernels(name, dtype):
  model, params = MODELS[name], decoder.init(MODELS[name], 0)
  rounded = linear.quantize_params(params, dtype, 'float32')
  got, want, before = (forward(model, p) for p in (rounded, dequantized(rounded), params))
  np.testing.assert_allclose(got, want, atol=1e-5)
  assert np.abs(want - before).max() > 1e-3


def forward(model, params):
  tokens = jax.random.randint(jax.random.key(3), (2, 5), 0, model.vocab)
  return decoder.forward(model, params, tokens, np.ones((2, 5), bool))


@pytest.mark.parametrize('name', MODELS)
def test_only_kernels_are_quantized(name):
  params = decoder.init(MODELS[name], 0)
  stored = linear.quantize_params(params, 'int8', 'bfloat16')
  types = {
    sharding.path_name(path): str(leaf.dtype)
    for path, leaf in jax.tree_util.tree_leaves_with_path(stored)
  }
  layer = {p.split('/', 2)[2]: t for p, t in types.items() if p.startswith('layers/1/')}
  experts = 'experts/' if name == 'mixture' else ''
  kernels = [*'qkvo', *(f'{experts}{part}' for part in ('gate', 'up', 'down'))]
  for kernel in kernels:
    assert layer.pop(f'{kernel}/kernel/data') == 'int8', kernel
    assert layer.pop(f'{kernel}/kernel/scale') == 'float32', kernel
  assert set(layer.values()) == {'bfloat16'}
  assert ('experts/router/kernel' in layer) == (name == 'mixture')
  assert types['embed/embedding'] == types['norm/scale'] == 'bfloat16'
  assert types.get('head/kernel/data', 'int8') == 'int8'
  assert ('head/kernel/data' in types) == (not MODELS[name].tied)


def test_data_is_sharded_as_the_kernel_and_scales_as_its_channels():
  mesh = sharding.make_mesh(dict(fsdp=2, expert=2, tensor=2), jax.devices())
  params = decoder.init(MODELS['mixture'], 0)
  stored = linear.quantize_params(params, 'int8', 'float32')
  spec_of = {
    sharding.path_name(path): tuple(s.spec)
    for path, s in jax.tree_util.tree_leaves_with_path(sharding.layout(stored, mesh))
  }
  assert spec_of['layers/0/q/kernel/data'] == (('fsdp', 'expert'), 'tensor')
  assert spec_of['layers/0/q/kernel/scale'] == ('tensor',)
  assert spec_of['layers/0/o/kernel/scale'] == (('fsdp', 'expert'),)
  assert spec_of['layers/0/experts/gate/kernel/data'] == ('expert', 'fsdp', 'tensor')
  assert spec_of['layers/0/experts/gate/kernel/scale'] == ('expert', 'tensor')
  assert spec_of['layers/0/experts/down/kernel/scale'] == ('expert', 'fsdp')
  assert spec_of['layers/0/attn_norm/scale'] == ()


def loss(model, params, remat=False):
  """Some function of the log-probabilities of a few tokens."""
  tokens = jax.random.randint(jax.random.key(3), (2, 6), 0, model.vocab)
  positions = jnp.broadcast_to(jnp.arange(6), (2, 6))
  mask = decoder.causal(jnp.ones((2, 6), bool))
  hidden, *_ = decoder.apply(model, params, tokens, positions, mask, remat=remat)
  how = dict(temperature=1.0, chunk_tokens=5)
  logp_BxT, _ = logprob.token_logp(model, params, hidden, tokens[:, ::-1], **how)
  return (logp_BxT * jnp.cos(jnp.arange(12.0)).reshape(2, 6)).sum()


@pytest.mark.parametrize(
  'name, dtype, remat',
  [
    ('dense', 'int8', False),
    ('dense', 'float8_e4m3fn', True),
    ('biased', 'float8_e4m3fn', False),
    ('mixture', 'int8', False),
    ('mixture', 'float8_e4m3fn', True),
  ],
)
def test_straight_through_learns_the_rounded_model(name, dtype, remat):
  """Value and gradient equal those of the model with rounded kernels, and a finite difference along one direction."""
  model, params = MODELS[name], decoder.init(MODELS[name], 0)

  def through(params):
    return loss(model, linear.straight_through(params, dtype, 'float32'), remat)

  rounded = linear.quantize_params(params, dtype, 'float32')
  got, grads = jax.jit(jax.value_and_grad(through))(params)
  plainly = jax.jit(jax.value_and_grad(lambda p: loss(model, p)))
  want, wanted = plainly(dequantized(rounded))
  np.testing.assert_allclose(got, loss(model, rounded), rtol=1e-5)
  np.testing.assert_allclose(got, want, rtol=1e-5)
  assert abs(float(plainly(params)[0] - want)) > 1e-3
  for path, leaf in jax.tree_util.tree_leaves_with_path(wanted):
    own = grads
    for entry in path:
      own = own[entry.key]
    np.testing.assert_allclose(own, leaf, atol=2e-5, rtol=1e-3, err_msg=sharding.path_name(path))
  moves = jax.tree.map(lambda x: x / jnp.linalg.norm(x.reshape(-1)), wanted)
  moved = lambda h: float(  # noqa: E731
    plainly(jax.tree.map(lambda x, d: x + h * d, dequantized(rounded), moves))[0]
  )
  slope = sum(
    float((g * d).sum()) for g, d in zip(*map(jax.tree.leaves, (grads, moves)), strict=True)
  )
  np.testing.assert_allclose((moved(1e-4) - moved(-1e-4)) / 2e-4, slope, rtol=2e-2)


def test_scales_stay_in_float32_where_layers_are_stacked():
  layers = decoder.init(MODELS['mixture'], 0)['layers']
  rounded = [linear.straight_through(layers[i], 'int8', 'bfloat16') for i in range(2)]
  stacked = layer_loops.stack_weights(tuple(rounded), 'bfloat16')
  for module in (stacked['q'], stacked['experts']['down']):
    assert module['kernel'].data.dtype == jnp.bfloat16
    assert module['kernel'].scale.dtype == jnp.float32
  assert stacked['experts']['router']['kernel'].dtype == jnp.bfloat16


def test_straight_through_rounds_bfloat16_kernels():
  params = decoder.init(DENSE, 0)
  got = linear.straight_through(params, 'bfloat16', 'float32')
  want = linear.quantize_params(params, 'bfloat16', 'float32')
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(a, b)

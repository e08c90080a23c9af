"""Blockwise quantized kernels: against bitsandbytes, NF4 against the paper's quantiles, int8 against plain numpy."""

from __future__ import annotations

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from jaxrl_llm.models import blockwise, decoder
from jaxrl_llm.types import ModelConfig, UserError

GOLDEN = json.loads(pathlib.Path(__file__).with_name('blockwise_golden.json').read_text())
MODEL = ModelConfig(
  vocab=50, width=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=48, max_tokens=64
)


def test_nf4_is_that_of_bitsandbytes():
  """Its kernels are [out, in], cut into blocks along the inputs. Of a block of zeros it stores the scale 0."""
  x_DxF = np.array(GOLDEN['kernel_DxF'], np.float32)
  D, F = x_DxF.shape
  np.testing.assert_array_equal(blockwise.CODE, np.float32(GOLDEN['code']))
  kernel = blockwise.quantize(x_DxF, 'nf4')
  scale_NxF = np.float32(GOLDEN['absmax']).reshape(F, D // 64).T
  np.testing.assert_array_equal(kernel.scale, np.where(scale_NxF == 0, 1, scale_NxF))
  full = np.repeat(scale_NxF != 0, 64, axis=0)
  assert full.sum() > 200 and not full.all()
  # It packs two neighbors into a byte, ours the halves of a block.
  packed = np.array(GOLDEN['packed'], np.uint8).reshape(F, D // 2).T
  theirs = np.stack([packed >> 4, packed & 15], 1).reshape(D, F)
  ours = np.stack([kernel.data >> 4, kernel.data & 15]).reshape(2, D // 64, 32, F)
  ours = ours.swapaxes(0, 1).reshape(D, F)
  np.testing.assert_array_equal(ours[full], theirs[full])
  np.testing.assert_array_equal(blockwise.dequantize(kernel), np.float32(GOLDEN['nf4_DxF']))


def test_int8_is_that_of_bitsandbytes():
  """Its indices are into k / 127 in order, with a second 0 behind the first.

  Its search on CPUs rounds 38.4997 up, so that numbers next to a half are left out.
  """
  x_DxF = np.array(GOLDEN['kernel_DxF'], np.float32)
  D, F = x_DxF.shape
  kernel = blockwise.quantize(x_DxF, 'int8')
  scale_NxF = np.float32(GOLDEN['int8_absmax']).reshape(F, D // 64).T / np.float32(127)
  np.testing.assert_array_equal(kernel.scale, np.where(scale_NxF == 0, 1, scale_NxF))
  ratio = x_DxF / np.repeat(kernel.scale, 64, axis=0)
  compared = np.repeat(scale_NxF != 0, 64, axis=0) & (np.abs(ratio % 1 - 0.5) > 1e-3)
  assert compared.sum() > 310 and not compared.all()
  number = np.array([*range(-127, 1), *range(128)])
  np.testing.assert_allclose(GOLDEN['int8_code'], number / 127, atol=1e-7)
  theirs = number[np.array(GOLDEN['int8_index_FxD'])].T
  np.testing.assert_array_equal(kernel.data[compared], theirs[compared])
  want = np.float32(GOLDEN['int8_DxF'])
  got = np.asarray(blockwise.dequantize(kernel))
  np.testing.assert_allclose(got[compared], want[compared], rtol=3e-7, atol=1e-9)


def test_the_code_consists_of_quantiles_of_the_normal_distribution():
  """8 positive and 7 negative ones, evenly spaced in probability up to the mean of 1 − 1/30 and 1 − 1/32, and 0."""
  most = (1 - 1 / 30 + 1 - 1 / 32) / 2
  positive, negative = (
    scipy.stats.norm.ppf(np.linspace(most, 0.5, n)[:-1]) * sign for n, sign in ((9, 1), (8, -1))
  )
  want = np.sort(np.concatenate([positive, [0.0], negative]))
  np.testing.assert_allclose(blockwise.CODE, want / want.max(), atol=1e-6)


@pytest.mark.parametrize('D, block', [(128, 64), (96, 32), (48, 16)])
def test_int8_is_rounded_block_by_block(D, block):
  x_DxF = np.random.default_rng(0).normal(size=(D, 5)).astype(np.float32)
  x_DxF[:block, 2] = 0
  kernel = blockwise.quantize(x_DxF, 'int8')
  assert kernel.data.dtype == np.int8 and kernel.scale.shape == (D // block, 5)
  got = np.asarray(blockwise.dequantize(kernel))
  for first in range(0, D, block):
    for f in range(5):
      part = np.float64(x_DxF[first : first + block, f])
      scale = np.abs(part).max() / 127 or 1.0
      want = np.round(part / scale) * scale
      np.testing.assert_allclose(got[first : first + block, f], want, atol=scale * 1e-4)


@pytest.mark.parametrize('quantized', blockwise.DTYPES)
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_a_product_and_its_gradient_are_those_of_the_unpacked_kernel(quantized, dtype):
  r = np.random.default_rng(1)
  kernel = blockwise.quantize(r.normal(size=(96, 24)).astype(np.float32), quantized)
  plain = blockwise.dequantize(kernel, dtype)
  x, g = (jnp.asarray(r.normal(size=(2, 3, n)), dtype) for n in (96, 24))
  assert kernel.shape == plain.shape
  got, pull = jax.vjp(lambda x: blockwise.product(x, kernel), x)
  want, pull_plain = jax.vjp(lambda x: jnp.matmul(x, plain), x)
  for a, b in ((got, want), (pull(g)[0], pull_plain(g)[0])):
    assert a.dtype == b.dtype == dtype
    tolerance = 1e-5 if dtype == 'float32' else 2e-2
    np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize('quantized', blockwise.DTYPES)
def test_only_kernels_of_layers_are_quantized_and_shapes_are_known_before(quantized):
  params = decoder.init(MODEL, 0)
  base = blockwise.quantize_params(params, quantized, 'bfloat16')
  abstract = blockwise.quantize_params(decoder.abstract_params(MODEL), quantized, 'bfloat16')
  assert jax.tree.structure(base) == jax.tree.structure(abstract)
  shape = lambda x: (x.shape, x.dtype)  # noqa: E731
  assert [*map(shape, jax.tree.leaves(base))] == [*map(shape, jax.tree.leaves(abstract))]
  packed = (16, 32) if quantized == 'nf4' else (32, 32)
  assert base['layers'][1]['q']['kernel'].data.shape == packed
  assert base['layers'][1]['attn_norm']['scale'].dtype == 'float32'
  assert base['embed']['embedding'].dtype == 'bfloat16'


def test_kernels_without_whole_blocks_are_refused():
  params = dict(layers={0: dict(up=dict(kernel=np.ones((40, 8), np.float32)))})
  with pytest.raises(UserError, match="'up' has 40 inputs, no multiple of 16"):
    blockwise.quantize_params(params, 'nf4', 'float32')

"""KV cache: rounding errors, and writes that change only their columns."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models import attention

X = np.random.default_rng(0).normal(size=(3, 2, 6, 8)).astype(np.float32) * 5


def unpacked(stored):
  x, scale = attention.read_cache(stored, jnp.float32)
  return np.array(x * (1 if scale is None else scale[..., None]), np.float32)


def test_int8_is_within_half_a_step_of_each_head():
  got = unpacked(attention.pack_cache(X, 'int8'))
  step = np.abs(X).max(-1, keepdims=True) / 127
  assert (np.abs(got - X) <= step / 2 * 1.001).all()
  assert np.abs(got - X).max() > 0


def test_a_head_of_zeros_stays_zero():
  assert not np.asarray(unpacked(attention.pack_cache(X * 0, 'int8'))).any()


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'int8'])
def test_a_write_changes_its_columns_and_no_others(dtype):
  cache = attention.pack_cache(X, dtype)
  got = unpacked(attention.write_cache(cache, -X[:, :, :2], 3))
  want = unpacked(cache)
  want[:, :, 3:5] = unpacked(attention.pack_cache(-X[:, :, :2], dtype))
  np.testing.assert_array_equal(got, want)
  assert jax.tree.leaves(attention.empty_cache(X.shape, dtype))[0].dtype == dtype


@pytest.mark.parametrize('shared', [False, True])
def test_attention_over_int8_equals_that_over_the_dequantized_cache(shared):
  r = np.random.default_rng(1)
  q = r.normal(size=(6 if shared else 3, 1, 4, 8)).astype(np.float32)
  v = attention.pack_cache(r.normal(size=X.shape).astype(np.float32), 'int8')
  k = attention.pack_cache(X, 'int8')
  plain = lambda x: jnp.asarray(unpacked(x))  # noqa: E731
  mask = r.random((3, 6)) < 0.7
  mask[:, 0] = True
  if shared:
    own = attention.KeyValues(
      *(jnp.asarray(x[:, :, :3]) for x in (np.repeat(X, 2, 0),) * 2), np.ones((6, 1, 3), bool)
    )
    got = attention.attend(q, own, attention.KeyValues(k, v, mask))
    want = attention.attend(q, own, attention.KeyValues(plain(k), plain(v), mask))
  else:
    got = attention.attend(q, attention.KeyValues(k, v, mask[:, None]))
    want = attention.attend(q, attention.KeyValues(plain(k), plain(v), mask[:, None]))
  np.testing.assert_allclose(got, want, atol=1e-5)

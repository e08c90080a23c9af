"""The GPU kernel of decoding: interpreted on a CPU, and lowered for CUDA, against XLA's attention over whole rings."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from jaxrl_llm.models import attention, gpu_decode_attention
from jaxrl_llm.models.mixer import Int8

S, K, R, d, e = 6, 2, 3, 20, 12  # sizes that are no powers of two, and values narrower than keys
P, L = 3, 37
COLUMN = 131
# Rows with one column, with all, around the end of the ring of 80, and an idle one.
LIVE = [1, 80, 66, 24, 0, 60]
TOLERANCE = {'float32': 1e-6, 'bfloat16': 2e-2, 'int8': 1e-6}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
  monkeypatch.setattr(gpu_decode_attention, '_MAX_BLOCK', 16)


def draw(seed, *shape, dtype=jnp.float32):
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def live_columns(width):
  age_SxW = np.broadcast_to((COLUMN - np.arange(width)) % width, (S, width))
  return age_SxW < np.array(LIVE)[:, None]


def ring(width, dtype, poison=False):
  k, v = draw(1, S, K, width, d), draw(2, S, K, width, e)
  if poison:
    hidden = ~live_columns(width)[:, None, :, None]
    k, v = (jnp.where(hidden, jnp.nan, x) for x in (k, v))
  return tuple(attention.pack_cache(x, dtype) for x in (k, v))


def kernel(q, own, prompts=None, mask=None, **options):
  return gpu_decode_attention.attend(
    q, own, prompts, mask, column=jnp.int32(COLUMN), live_S=jnp.array(LIVE), interpret=True, **options
  )  # fmt: skip


def whole(q, own, prompts=None, mask=None, **options):
  """XLA's attention over all columns."""
  width = jax.tree.leaves(own)[0].shape[2]
  own = attention.KeyValues(*own, jnp.asarray(live_columns(width))[:, None])
  shared = None if prompts is None else attention.KeyValues(*prompts, mask)
  return attention.attend(q, own, shared, **options)


@pytest.mark.parametrize('dtype', TOLERANCE)
@pytest.mark.parametrize('width', [80, 75, 5, 16], ids=lambda w: f'{w} columns')
@pytest.mark.parametrize('programs', [1, 24, 1000], ids=lambda n: f'{n} programs')
def test_a_softmax_over_own_columns_and_prompts(programs, width, dtype, monkeypatch):
  monkeypatch.setattr(gpu_decode_attention, '_PROGRAMS', programs)
  compute = 'float32' if dtype == 'int8' else dtype
  q, own = draw(0, S, 1, K * R, d, dtype=compute), ring(width, dtype)
  cached = [attention.pack_cache(draw(i, P, K, L, n), dtype) for i, n in ((3, d), (4, e))]
  prompt_S = jnp.array([2, 0, 0, 1, 2, 1])
  mask_SxL = jnp.arange(L)[None] < jnp.array([4, 37, 20])[prompt_S][:, None]
  mask_SxL &= jnp.arange(L)[None] > jnp.array([-1, 2, 30, 9, 1, 30])[:, None]
  options = dict(scale=0.3, cap=2.0, sink_H=draw(5, K * R))
  gathered = jax.tree.map(lambda x: x[prompt_S], cached)
  want = whole(q, own, gathered, mask_SxL[:, None, None], **options)
  got = kernel(q, own, cached, mask_SxL, prompt_S=prompt_S, **options)
  assert got.dtype == want.dtype == jnp.dtype(compute)
  scale = float(jnp.abs(want).max())
  np.testing.assert_allclose(
    *(np.asarray(x, 'f4') for x in (got, want)), atol=TOLERANCE[dtype] * scale
  )


@pytest.mark.parametrize('width', [80, 75, 5])
def test_columns_that_are_not_live_are_not_read(width):
  q, busy = draw(0, S, 1, K * R, d), np.array(LIVE) > 0
  got = kernel(q, ring(width, 'float32', poison=True))[busy]
  np.testing.assert_array_equal(got, kernel(q, ring(width, 'float32'))[busy])
  np.testing.assert_allclose(got, whole(q, ring(width, 'float32'))[busy], atol=1e-6)


class Memory:
  """An array of a GPU, where an index behind an axis is one of another row."""

  def __init__(self, array):
    self.array, self.shape, self.at = np.array(array), array.shape, self.At(self)

  class At:
    def __init__(self, memory):
      self.memory = memory

    def __getitem__(self, place):
      return self.memory, place

  def __getitem__(self, index):
    return jnp.asarray(self.array[index])


def inside(view, mask):
  """The array, the places that the mask shows, and the mask; all of them must lie inside the array."""
  memory, place = view
  *place, mask = np.broadcast_arrays(*place, mask)
  for index, size in zip(place, memory.shape, strict=True):
    assert ((0 <= index) & (index < size))[mask].all()
  return memory.array, tuple(index[mask] for index in place), mask


def load(view, mask, other):
  array, place, mask = inside(view, mask)
  found = np.full(mask.shape, other, array.dtype)
  found[mask] = array[place]
  return jnp.asarray(found)


def store(view, x, mask):
  array, place, mask = inside(view, mask)
  assert np.isnan(array[place]).all()  # no other program has written here
  array[place] = np.asarray(x)[mask]


@pytest.mark.parametrize('width', [75, 5])
def test_every_program_stays_inside_the_arrays_and_writes_its_own_results(width, monkeypatch):
  """Program after program without Pallas, whose interpreter drops what is stored behind the end of an axis."""

  def call_programs(kernel, *, out_shape, grid, **_):
    def call(*arrays):
      refs = [Memory(x) for x in arrays]
      refs += [Memory(np.full(x.shape, np.nan, x.dtype)) for x in out_shape]
      monkeypatch.setattr(pl, 'num_programs', grid.__getitem__)
      for program in np.ndindex(*grid):
        monkeypatch.setattr(pl, 'program_id', program.__getitem__)
        kernel(*refs)
      return [jnp.asarray(x.array) for x in refs[len(arrays) :]]

    return call

  q, own = draw(0, S, 1, K * R, d), ring(width, 'float32')
  want = kernel(q, own)
  monkeypatch.setattr(pl, 'pallas_call', call_programs)
  monkeypatch.setattr(plgpu, 'load', load)
  monkeypatch.setattr(plgpu, 'store', store)
  with jax.disable_jit():
    got = kernel(q, own)
  np.testing.assert_allclose(got, want, atol=1e-6)


def test_blocks_are_powers_of_two_of_at_most_16_kibibytes(monkeypatch):
  monkeypatch.undo()
  columns = gpu_decode_attention.block_columns
  assert columns(1024, 128 * 2) == 64 and columns(1024, 128 * 4) == 32
  assert columns(1024, 64 * 2) == 128 == columns(1024, 64)
  assert columns(1024, 96 * 2) == 64  # and not 85
  assert columns(40, 128 * 2) == 64 and columns(5, 128 * 2) == 16 == columns(1024, 2048)


SIZES = {  # d, R, K of models, and the width of a ring whose numbers an int32 cannot count
  'Qwen3-0.6B': (128, 2, 8, 1024),
  'Qwen2.5-0.5B': (64, 7, 2, 1024),
  'Gemma 3 1B': (256, 4, 1, 512),
  'Phi-3': (96, 1, 32, 4096),
  'long': (128, 2, 8, 40_000),
}


@pytest.mark.parametrize('dtype', ['bfloat16', 'float32', 'int8'])
@pytest.mark.parametrize('size', SIZES)
def test_it_lowers_for_cuda(size, dtype, monkeypatch):
  monkeypatch.undo()
  d, R, K, W = SIZES[size]
  if (size, dtype) == ('long', 'int8'):
    W //= 2  # more keys of one byte are refused
  array = jax.ShapeDtypeStruct
  cache = array((64, K, W, d), dtype)
  cache = Int8(cache, array((64, K, W), 'float32')) if dtype == 'int8' else cache
  attend = lambda q, kv, column, live_S: gpu_decode_attention.attend(  # noqa: E731
    q, kv, column=column, live_S=live_S
  )
  q = array((64, 1, K * R, d), 'bfloat16' if dtype == 'int8' else dtype)
  device = AbstractDevice('NVIDIA H200', 132, 'gpu')
  with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
    traced = jax.jit(attend).trace(q, (cache, cache), array((), 'int32'), array((64,), 'int32'))
    lowered = traced.lower(lowering_platforms=('cuda',))
  assert 'gpu.triton' in lowered.as_text()


def test_keys_that_int32_cannot_count_are_refused():
  array = jax.ShapeDtypeStruct
  cache = Int8(array((64, 8, 40_000, 128), 'int8'), array((64, 8, 40_000), 'float32'))
  attend = lambda q, kv: gpu_decode_attention.attend(  # noqa: E731
    q, (kv, kv), column=jnp.int32(3), live_S=jnp.ones(64, jnp.int32), interpret=True
  )
  with pytest.raises(ValueError, match='2621440000 keys of one byte.*rollout.slots'):
    jax.eval_shape(attend, array((64, 1, 16, 128), 'bfloat16'), cache)

"""The kernel of decoding, interpreted on a CPU, against XLA's attention over whole rings."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.commands import sharding_report
from jaxrl_llm.config import loading as configs
from jaxrl_llm.distributed import sharding
from jaxrl_llm.learner.spec_from_config import make_spec
from jaxrl_llm.models import attention, decode_attention, gpu_decode_attention
from jaxrl_llm.types import ModelConfig, UserError

MODEL = ModelConfig(
  vocab=40, width=32, layers=2, heads=4, kv_heads=2, head_dim=128, mlp=48, max_tokens=10_000
)  # fmt: skip
S, K, R, d, e = 6, 2, 3, 16, 12  # values are narrower than keys
P, L = 3, 11
COLUMN = 29
# Rows with few columns, with all, around the end of the ring of 40, and an idle one.
LIVE = [1, 40, 33, 12, 0, 30]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
  monkeypatch.setattr(decode_attention, '_MAX_BLOCK', 8)


def draw(seed, *shape, dtype=jnp.float32):
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def ring(width, dtype, poison=False):
  k, v = draw(1, S, K, width, d), draw(2, S, K, width, e)
  if poison:
    unread_SxW = jnp.asarray(~blocks_with_live_columns(width))
    k, v = (jnp.where(unread_SxW[:, None, :, None], jnp.nan, x) for x in (k, v))
  return tuple(attention.pack_cache(x, dtype) for x in (k, v))


def live_columns(width):
  age_SxW = np.broadcast_to((COLUMN - np.arange(width)) % width, (S, width))
  return age_SxW < np.array(LIVE)[:, None]


def blocks_with_live_columns(width):
  padded = np.pad(live_columns(width), [(0, 0), (0, -width % 8)]).reshape(S, -1, 8)
  return np.repeat(padded.any(2), 8, axis=1)[:, :width]


def whole(q, own, prompts, mask_GxL, **options):
  """XLA's attention over all columns; row s of the prompts reads `prompts[s]`, or those of its group."""
  width = jax.tree.leaves(own)[0].shape[2]
  own = attention.KeyValues(*own, jnp.asarray(live_columns(width))[:, None])
  shared = None if prompts is None else attention.KeyValues(*prompts, mask_GxL)
  return attention.attend(q, own, shared, **options)


def kernel(q, own, prompts, mask, **options):
  return decode_attention.attend(
    q, own, prompts, mask, column=jnp.int32(COLUMN), live_S=jnp.array(LIVE), interpret=True, **options
  )  # fmt: skip


TOLERANCE = {'float32': 1e-6, 'bfloat16': 2e-2, 'int8': 1e-6}


@pytest.mark.parametrize('dtype', TOLERANCE)
@pytest.mark.parametrize('width', [40, 37, 5, 8], ids=lambda w: f'{w} columns')
@pytest.mark.parametrize('prompts', ['of groups', 'of slots', 'of slots, sliding'])
def test_a_softmax_over_own_columns_and_prompts(prompts, width, dtype):
  compute = 'float32' if dtype == 'int8' else dtype
  q, own = draw(0, S, 1, K * R, d, dtype=compute), ring(width, dtype)
  cached = [attention.pack_cache(draw(i, P, K, L, n), dtype) for i, n in ((3, d), (4, e))]
  length_P = jnp.array([4, 11, 7])
  options = dict(scale=0.3, cap=2.0, sink_H=draw(5, K * R))
  if prompts == 'of groups':
    mask_PxL = jnp.arange(L)[None] < length_P[:, None]
    want = whole(q, own, cached, mask_PxL, **options)
    got = kernel(q, own, cached, mask_PxL, **options)
  else:
    prompt_S = jnp.array([2, 0, 0, 1, 2, 1])
    mask_SxL = jnp.arange(L)[None] < length_P[prompt_S][:, None]
    if 'sliding' in prompts:  # of the last row, which is far from its prompt, nothing is left
      mask_SxL &= jnp.arange(L)[None] > jnp.array([-1, 2, 3, 9, 1, 20])[:, None]
      mask_SxL = mask_SxL[:, None, None]
    gathered = jax.tree.map(lambda x: x[prompt_S], cached)
    want = whole(q, own, gathered, mask_SxL, **options)
    got = kernel(q, own, cached, mask_SxL, prompt_S=prompt_S, **options)
  assert got.dtype == want.dtype == jnp.dtype(compute)
  scale = float(jnp.abs(want).max())
  np.testing.assert_allclose(
    *(np.asarray(x, 'f4') for x in (got, want)), atol=TOLERANCE[dtype] * scale
  )


@pytest.mark.parametrize('width', [40, 37, 5])
def test_blocks_without_a_column_of_the_row_are_not_read(width):
  q = draw(0, S, 1, K * R, d)
  busy = np.array(LIVE) > 0
  got = kernel(q, ring(width, 'float32', poison=True), None, None)[busy]
  np.testing.assert_array_equal(got, kernel(q, ring(width, 'float32'), None, None)[busy])
  columns = decode_attention.Columns(
    jnp.arange(S), jnp.full(S, COLUMN % width), jnp.minimum(jnp.array(LIVE), width)
  )
  first_S, count_S = decode_attention.blocks_of_rows(columns, width, 8)
  blocks = -(-width // 8)
  for s in np.flatnonzero(busy):
    read = {int(first_S[s] + i) % blocks for i in range(int(count_S[s]))}
    assert len(read) == count_S[s]
    assert read == set(np.flatnonzero(blocks_with_live_columns(width)[s]) // 8)


def test_blocks_are_large_enough_to_move_and_small_enough_to_waste_little(monkeypatch):
  monkeypatch.undo()
  assert decode_attention.block_columns(8192, 8 * 128 * 2) == 256  # half a mebibyte
  assert decode_attention.block_columns(8192, 128 * 2) == 512
  assert decode_attention.block_columns(8192, 64 * 128 * 4) == 128
  assert decode_attention.block_columns(8192, 12 * 128 * 2) == 128  # and not 170: whole tiles
  assert decode_attention.block_columns(100, 128 * 2) == 100


def spec(name, model=MODEL, kind='TPU v5 lite', tokens=2048, mesh=None, **changes):
  c = configs.default()
  c.prompts, c.rollouts, c.prompt_tokens, c.completion_tokens = 16, 2, 100, tokens
  c.mesh.update(mesh or {})
  c.rollout.attention = name
  c.rollout.ngram.draft = changes.pop('ngram', 0)
  platform = {'TPU': 'tpu', 'NVIDIA': 'gpu'}.get(kind.split()[0], kind.lower())
  devices = [sharding_report.Device(i, platform, kind) for i in range(4)]
  model = dataclasses.replace(model, **changes)
  return make_spec(c, model, (3,), sharding.make_mesh(c.mesh, devices))


def test_auto_is_the_kernel_on_tpus_for_long_completions_that_it_can_read():
  chosen = lambda *args, **changes: spec('auto', *args, **changes).rollout.decode.attend is not None  # noqa: E731
  assert chosen() and chosen(mesh=dict(tensor=2)) and chosen(head_dim=256)
  assert chosen(window=4, sliding=(True, False)) and chosen(sinks=True)
  assert not chosen(tokens=2047) and not chosen(head_dim=64)
  assert not chosen(ngram=2)
  assert not chosen(window=4, sliding=(True, False), chunked=True)
  assert spec('xla').rollout.decode.attend is None
  assert spec('auto').rollout.decode.attend.func is decode_attention.attend


def test_auto_is_the_kernel_of_gpus_for_shorter_completions_and_all_heads():
  chosen = lambda **changes: spec('auto', kind='NVIDIA H200', **changes).rollout.decode.attend  # noqa: E731
  for changes in (
    {},
    dict(mesh=dict(tensor=2)),
    dict(head_dim=64),
    dict(window=4, sliding=(True, False)),
  ):
    attend = chosen(**dict(tokens=256) | changes)
    assert attend.func is gpu_decode_attention.attend and attend.keywords == dict(interpret=False)
  assert chosen(tokens=255) is None and chosen(ngram=2) is None


@pytest.mark.parametrize(
  'name, changes, message',
  [
    ('flash', {}, 'is unknown; choose one of: auto, xla, ragged'),
    ('ragged', dict(kind='METAL'), 'is a kernel for TPUs and GPUs, and this is a metal; set it to'),
    ('ragged', dict(ngram=2), 'does not go with config.rollout.ngram.draft=2'),
    ('ragged', dict(window=4, sliding=(True, False), chunked=True), 'a model with chunked=True'),
  ],
)
def test_unsupported_settings_are_refused(name, changes, message):
  with pytest.raises(UserError, match=f"config.rollout.attention='{name}' .*{message}"):
    spec(name, **changes)

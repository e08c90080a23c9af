"""Decode loops whose attention is a kernel that reads each row's own columns sample what the plain loops do."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest
from rollout_checks import assert_same

from jaxrl_llm.config import loading as configs
from jaxrl_llm.distributed import sharding
from jaxrl_llm.learner import attention_kernels
from jaxrl_llm.learner import compile as programs
from jaxrl_llm.learner import state as train_state
from jaxrl_llm.learner.spec_from_config import make_spec
from jaxrl_llm.models import decode_attention, decoder, gpu_decode_attention
from jaxrl_llm.rollout import ring_decode
from jaxrl_llm.rollout.decode_records import DecodeInputs, Loops
from jaxrl_llm.types import ModelConfig, Prompts

MODEL = ModelConfig(
  vocab=40, width=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=48, max_tokens=64, qk_norm='head'
)  # fmt: skip
SLIDING = dataclasses.replace(MODEL, window=6, sliding=(True, False))
L, T, G = 9, 23, 3
KERNELS = {
  platform: functools.partial(module.attend, interpret=True)
  for platform, module in (('tpu', decode_attention), ('gpu', gpu_decode_attention))
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
  monkeypatch.setattr(decode_attention, '_MAX_BLOCK', 8)
  monkeypatch.setattr(gpu_decode_attention, '_MAX_BLOCK', 16)


def make_prompts():
  r = np.random.default_rng(0)
  length_P = np.array([4, 9, 1, 6], np.int32)
  tokens_PxL = np.where(np.arange(L)[None] < length_P[:, None], r.integers(0, 40, (4, L)), 0)
  zeros_P = np.zeros(4, np.int32)
  return Prompts(
    tokens_PxL.astype(np.int32), length_P, np.arange(4, dtype=np.int32), zeros_P, zeros_P.astype('f4')
  )  # fmt: skip


def sample(model, params, attend, inputs=None, **changes):
  settings = ring_decode.DecodeSettings(G, T, 1.0, (3, 11), 'float32', attend=attend)
  settings, inputs = settings._replace(**changes), inputs or {}

  def run(params):
    one = DecodeInputs(params, make_prompts(), jax.random.key(0), 4, **inputs)
    return ring_decode.generate(model, settings, one)[0]

  traced = jax.jit(run).trace(params)
  assert ('pallas_call' in str(traced.jaxpr)) == (attend is not None)
  return jax.tree.map(np.asarray, traced.lower().compile()(params))


CASES = {
  'a slot for each row': {},
  'five slots': dict(slots=5),
  'five slots, a ring that grows': dict(slots=5, loops=Loops(windows=3)),
  'fewer and fewer slots': dict(loops=Loops(halvings=2)),
  'int8': dict(cache_dtype='int8'),
  'several iterations between tests': dict(slots=5, loops=Loops(test_every=3)),
}


@pytest.mark.parametrize('model', [MODEL, SLIDING], ids=['whole', 'sliding'])
@pytest.mark.parametrize('case', CASES)
@pytest.mark.parametrize('platform', KERNELS)
def test_the_same_tokens(platform, case, model, monkeypatch):
  monkeypatch.setattr(ring_decode, '_LEAST_TOKENS', 8)
  params = jax.tree.map(lambda x: x * 1.5, decoder.init(model, 0))
  plain = sample(model, params, None, **CASES[case])
  assert plain.length_B.min() < 8 < plain.length_B.max()
  assert_same(sample(model, params, KERNELS[platform], **CASES[case]), plain)


@pytest.mark.parametrize('kernel', KERNELS.values(), ids=KERNELS)
def test_continued_rows(kernel):
  params = jax.tree.map(lambda x: x * 1.5, decoder.init(MODEL, 0))
  whole = sample(MODEL, params, None)
  half = sample(MODEL, params, kernel, dict(pause=7), slots=5)
  assert (half.length_B < whole.length_B).any()
  assert_same(sample(MODEL, params, kernel, dict(continued=half), slots=5), whole)


@pytest.mark.parametrize('platform', KERNELS)
def test_rows_and_heads_on_four_devices(platform, monkeypatch):
  kernels = attention_kernels.KERNELS['rollout.attention']['ragged']
  monkeypatch.setitem(kernels, 'cpu', kernels[platform])

  def rollout(name, slots, **mesh):
    c = configs.default()
    c.prompts, c.rollouts, c.prompt_tokens, c.completion_tokens = 4, G, L, T
    c.rollout.attention, c.rollout.slots = name, slots
    c.mesh.update(dict(fsdp=1) | mesh)
    devices = jax.devices()[: int(np.prod(list(mesh.values()), dtype=int))]
    spec = make_spec(c, MODEL, (3, 11), sharding.make_mesh(c.mesh, devices))
    attend = spec.rollout.decode.attend
    assert attend is None if name == 'xla' else attend.func is kernels[platform]
    params = jax.tree.map(lambda x: x * 1.5, decoder.init(MODEL, 0))
    state = train_state.init_state(spec, params)._replace(carried=())
    sampled = programs.compile_sample(spec)(state, (), make_prompts(), None, None, None)
    return jax.tree.map(np.asarray, sampled[0])

  plain = rollout('xla', 0)
  for slots in (0, 6):
    assert_same(rollout('ragged', slots, fsdp=2, tensor=2), plain)

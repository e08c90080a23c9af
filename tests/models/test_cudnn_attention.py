"""Attention of the update by cuDNN: masks, groups and layouts against XLA's attention.

On a CPU jax computes the same function without cuDNN, in float32. With JAX_PLATFORMS=cuda the kernel itself runs, in
bfloat16, and both are compared with float32.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scored_rows import VOCAB, G, L, P, T, batch, packed_rows, whole_rows

from jaxrl_llm.commands import sharding_report
from jaxrl_llm.config import loading as configs
from jaxrl_llm.distributed import sharding
from jaxrl_llm.learner.spec_from_config import make_spec
from jaxrl_llm.models import attention, cudnn_attention, decoder
from jaxrl_llm.types import ModelConfig, UserError

ON_GPU = jax.default_backend() == 'gpu'
DTYPE = 'bfloat16' if ON_GPU else 'float32'
MODEL = ModelConfig(
  vocab=VOCAB, width=32, layers=2, heads=4, kv_heads=2, head_dim=16, mlp=48, max_tokens=64, qk_norm='head'
)  # fmt: skip
WINDOW = dict(window=4, sliding_rope_theta=100.0)
MODELS = dict(
  full=MODEL,
  window=dataclasses.replace(MODEL, **WINDOW, sliding=(True, False)),
  irregular=dataclasses.replace(
    MODEL, **WINDOW, layers=5, sliding=(True, False, False, True, True)
  ),
  chunked=dataclasses.replace(MODEL, **WINDOW, sliding=(True, False), chunked=True),
)


def error(x, reference):
  """‖x − reference‖ / ‖reference‖."""
  x, reference = (np.asarray(a, np.float64) for a in (x, reference))
  return np.linalg.norm(x - reference) / np.linalg.norm(reference)


@pytest.mark.parametrize('Q', [130, 131])
@pytest.mark.parametrize('shares', [False, True])
def test_attention_and_its_gradient(Q, shares):
  """Any mask within the causal one, an odd number of tokens, and a prompt that a group shares."""
  r = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(r.normal(size=shape), jnp.float32)  # noqa: E731
  B, P, L, H, K, d = 4, 2, 5, 4, 2, 16
  inputs = draw(B, Q, H, d), draw(B, K, Q, d), draw(B, K, Q, d), draw(P, K, L, d), draw(P, K, L, d)
  slope_BxQxHxd = draw(B, Q, H, d)
  prompt_mask = jnp.asarray(np.arange(L) < np.array([[3], [5]]))
  mask = np.tril(r.random((B, Q, Q)) < 0.7) | np.eye(Q, dtype=bool)
  mask = jnp.asarray(mask)

  def plain(q, k, v, pk, pv):
    shared = attention.KeyValues(pk, pv, prompt_mask) if shares else None
    return attention.attend(q, attention.KeyValues(k, v, mask), shared, scale=0.3)

  def kernel(q, k, v, pk, pv):
    q, k, v, pk, pv = (x.astype(DTYPE) for x in (q, k, v, pk, pv))
    prompt = ((pk, pv), prompt_mask) if shares else (None, None)
    options = dict(mask_BxQxS=mask, scale=0.3, interpret=not ON_GPU)
    return cudnn_attention.attend(q, (k, v), *prompt, **options).astype(jnp.float32)

  results = []
  with jax.default_matmul_precision('highest'):
    for f in (plain, kernel):
      loss = lambda *x, f=f: (f(*x) * slope_BxQxHxd).sum()  # noqa: E731
      slope = jax.grad(loss, argnums=range(5 if shares else 3))
      results.append(
        jax.jit(lambda *x, f=f, slope=slope: jax.tree.leaves((f(*x), slope(*x))))(*inputs)
      )
  for expected, found in zip(*results, strict=True):
    assert error(found, expected) < (1e-2 if ON_GPU else 1e-5)


def spec(attend, model=MODEL, **mesh):
  c = configs.default()
  c.prompts, c.rollouts, c.prompt_tokens, c.completion_tokens = P, G, L, T
  c.learner.attention, c.dtype = attend, DTYPE if ON_GPU else 'auto'
  c.mesh.update(dict(fsdp=1) | mesh)
  devices = jax.devices()[: int(np.prod(list(mesh.values()), dtype=int))]
  return make_spec(c, model, (3,), sharding.make_mesh(c.mesh, devices))


@pytest.mark.parametrize('score', [whole_rows, packed_rows])
@pytest.mark.parametrize(
  'model, mesh', [*((name, {}) for name in MODELS), ('full', dict(fsdp=2, tensor=2))], ids=str
)
def test_the_update_is_that_without_the_kernel(model, mesh, score):
  """Several bins a microbatch, and in a bin rows of a group that share their prompt."""
  if len(jax.devices()) < int(np.prod(list(mesh.values()), dtype=int)):
    pytest.skip('needs more devices')
  config = MODELS[model]
  params = decoder.init(config, 0)

  def scored(score, attend, dtype, **mesh):
    p = spec(attend, config, **mesh)
    assert p.update.packing.shares_prompt
    size = p.update.packing._replace(bins=2, tokens=3 * L, predicted=2 * T, rows=3)
    p = p._replace(update=p.update._replace(remat=True, packing=size))
    p = p._replace(model=p.model._replace(dtype=dtype))
    placed = jax.device_put(params, sharding.layout(params, p.layout.mesh))
    return jax.jit(lambda x, y: sharding.on_mesh(score)(p, x, y))(placed, batch())

  with jax.default_matmul_precision('highest'):
    expected = scored(whole_rows, 'xla', 'float32')
    found = scored(score, 'cudnn', DTYPE, **mesh)
  bound = 5e-2 if ON_GPU else 2e-5
  for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
    assert error(b, a) < bound


@pytest.mark.parametrize(
  'change, mesh, message',
  [
    (dict(attention_cap=30.0), {}, 'a model with attention_cap=30.0'),
    (dict(WINDOW, sliding=(True, True), sinks=True), {}, 'a model with sinks'),
    ({}, dict(context=2), 'config.mesh.context=2'),
  ],
)
def test_unsupported_settings_are_refused(change, mesh, message):
  with pytest.raises(UserError, match=f"config.learner.attention='cudnn' .*{message}"):
    spec('cudnn', dataclasses.replace(MODEL, **change), **mesh)


def test_the_kernel_refuses_what_it_would_ignore():
  x = jnp.ones((1, 2, 1, 8))
  own = (x.swapaxes(1, 2),) * 2
  mask = jnp.ones((1, 2, 2), bool)
  for options in (dict(cap=2.0), dict(sink_H=jnp.zeros(1))):
    with pytest.raises(ValueError, match='neither caps of scores nor sinks'):
      cudnn_attention.attend(x, own, mask_BxQxS=mask, interpret=True, **options)


def test_auto_is_the_kernel_on_gpus_for_long_rows_that_it_can_read():
  def chosen(model=MODEL, kind='NVIDIA H200', tokens=208, dtype='auto'):
    c = configs.default()
    c.prompts, c.rollouts, c.prompt_tokens, c.completion_tokens = 16, 2, 48, tokens
    c.dtype = dtype
    platform = 'tpu' if kind.startswith('TPU') else 'gpu'
    devices = [sharding_report.Device(i, platform, kind) for i in range(4)]
    model = dataclasses.replace(model, max_tokens=10_000)
    attend = make_spec(c, model, (3,), sharding.make_mesh(c.mesh, devices)).update.attention
    return 'xla' if attend is None else 'cudnn'

  assert chosen() == chosen(MODELS['window']) == chosen(MODELS['chunked']) == 'cudnn'
  assert chosen(tokens=207) == chosen(kind='TPU v5 lite') == chosen(dtype='float32') == 'xla'
  assert chosen(dataclasses.replace(MODEL, attention_cap=30.0)) == 'xla'
  assert chosen(dataclasses.replace(MODEL, head_dim=12)) == 'xla'

"""Splash attention in the update, interpreted on CPU, against XLA's attention: values and gradients."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.config import loading as configs
from jaxrl_llm.distributed import sharding
from jaxrl_llm.learner import microbatch
from jaxrl_llm.learner.spec_from_config import make_spec
from jaxrl_llm.models import attention, decoder, splash
from jaxrl_llm.types import ModelConfig, Prompts, UserError

MODEL = ModelConfig(
  vocab=40, width=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=48, max_tokens=64, qk_norm='head'
)  # fmt: skip
P, G, L, T = 4, 2, 7, 9


def spec(attend, model=MODEL, platform=None, **mesh):
  c = configs.default()
  c.prompts, c.rollouts, c.prompt_tokens, c.completion_tokens, c.learner.attention = (
    P,
    G,
    L,
    T,
    attend,
  )
  c.mesh.update(dict(fsdp=1) | mesh)
  devices = jax.devices()[: int(np.prod(list(mesh.values()), dtype=int))]
  return make_spec(c, model, (3,), sharding.make_mesh(c.mesh, devices))


@pytest.mark.parametrize('cap', [0.0, 3.0])
def test_attention_of_a_group_to_its_prompt_and_its_gradient(cap):
  r = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(r.normal(size=shape), jnp.float32)  # noqa: E731
  B, P, Q, L, H, K, d = 4, 2, 130, 5, 4, 2, 16
  inputs = draw(B, Q, H, d), draw(B, K, Q, d), draw(B, K, Q, d), draw(P, K, L, d), draw(P, K, L, d)
  prompt_mask_PxL = jnp.arange(L)[None] < jnp.array([[3], [5]])
  causal = jnp.broadcast_to(jnp.tril(jnp.ones((Q, Q), bool)), (B, Q, Q))

  def plain(q, k, v, pk, pv):
    own, shared = attention.KeyValues(k, v, causal), attention.KeyValues(pk, pv, prompt_mask_PxL)
    return attention.attend(q, own, shared, scale=0.3, cap=cap)

  def kernel(q, k, v, pk, pv):
    return splash.attend(q, (k, v), (pk, pv), prompt_mask_PxL, scale=0.3, cap=cap, interpret=True)

  outs = []
  for f in (plain, kernel):
    slope = jax.grad(lambda *x, f=f: jnp.sin(f(*x)).sum(), argnums=range(5))
    outs.append(jax.jit(lambda *x, f=f, slope=slope: (f(*x), slope(*x)))(*inputs))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), *outs)


def batch(packed):
  r = np.random.default_rng(1)
  length_P = np.array([4, 7, 1, 6], np.int32)
  zeros_P = np.zeros(P, np.int32)
  prompts = Prompts(
    r.integers(0, 40, (P, L)).astype(np.int32), length_P, zeros_P, zeros_P, zeros_P.astype('f4')
  )
  if not packed:
    return prompts, r.integers(0, 40, (P * G, T)).astype(np.int32), np.ones((P * G, T), bool)
  segment = np.array([[1, 1, 1, 2, 2, 2, 2, 0, 0]] * 2 + [[1, 2, 2, 2, 3, 3, 0, 0, 0]] * 2)
  tokens = r.integers(0, 40, (P, T)).astype(np.int32)
  mask = (segment > 0) & (np.diff(segment, axis=1, prepend=-1) == 0)
  return prompts._replace(segment_PxT=segment.astype(np.int32)), tokens, mask


@pytest.mark.parametrize('packed', [False, True])
@pytest.mark.parametrize(
  'mesh', [{}, dict(fsdp=2, tensor=2)], ids=['one device', 'rows and heads on four']
)
def test_log_probabilities_and_gradients_of_the_update_are_those_without_the_kernel(mesh, packed):
  prompts, tokens, mask = batch(packed)
  params = decoder.init(MODEL, 0)

  def scored(attend, **mesh):
    p = spec(attend, **mesh)
    p = p._replace(update=p.update._replace(remat=True))
    placed = jax.device_put(params, sharding.layout(params, p.layout.mesh))

    def loss(p, params):
      logp_BxT, entropy_BxT = microbatch.log_probs(p, params, prompts, tokens)
      return jnp.where(mask, logp_BxT, 0.0).sum(), (logp_BxT, entropy_BxT)

    run = sharding.on_mesh(lambda p, x: jax.grad(lambda x: loss(p, x), has_aux=True)(x))
    traced = jax.jit(lambda x: run(p, x)).trace(placed)
    assert ('pallas_call' in str(traced.jaxpr)) == (attend == 'splash')
    slope, outputs = traced.lower().compile()(placed)
    return slope, jax.tree.map(lambda x: np.where(mask, x, 0), outputs)

  a, b = scored('xla'), scored('splash', **mesh)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5), a, b)


@pytest.mark.parametrize(
  'attend, model, mesh, message',
  [
    ('flash', {}, {}, 'is unknown; choose one of: xla, splash'),
    ('splash', dict(window=4, sliding=(True, False)), {}, 'a model with window=4'),
    ('splash', {}, dict(context=2), 'config.mesh.context=2'),
  ],
)
def test_unsupported_settings_are_refused(attend, model, mesh, message):
  with pytest.raises(UserError, match=f"config.learner.attention='{attend}' .*{message}"):
    spec(attend, dataclasses.replace(MODEL, **model), **mesh)

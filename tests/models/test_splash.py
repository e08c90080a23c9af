"""Splash attention in the update, interpreted on CPU, against XLA's attention: values and gradients."""

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
from jaxrl_llm.models import attention, decoder, splash
from jaxrl_llm.types import ModelConfig, UserError

MODEL = ModelConfig(
  vocab=VOCAB, width=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=48, max_tokens=64, qk_norm='head'
)  # fmt: skip


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


@pytest.mark.parametrize('cap, window', [(0.0, 0), (3.0, 0), (0.0, 4), (3.0, 140), (0.0, 1)])
@pytest.mark.parametrize('has_sinks', [False, True])
def test_attention_of_a_group_to_its_prompt_and_its_gradient(cap, window, has_sinks):
  r = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(r.normal(size=shape), jnp.float32)  # noqa: E731
  B, P, Q, L, H, K, d, e = 4, 2, 130, 5, 4, 2, 16, 12  # values are narrower than keys
  inputs = draw(B, Q, H, d), draw(B, K, Q, d), draw(B, K, Q, e), draw(P, K, L, d), draw(P, K, L, e)
  length_P, j = np.array([3, 5]), np.arange(Q)
  prompt_mask = np.arange(L) < length_P[:, None]
  mask_QxQ = np.tril(np.ones((Q, Q), bool))
  if window:
    mask_QxQ &= j[:, None] - j < window
    near = length_P[:, None, None, None] + j[:, None] - np.arange(L) < window
    prompt_mask = np.broadcast_to(prompt_mask[:, None, None] & near, (P, B // P, Q, L))
  own_mask = np.broadcast_to(mask_QxQ, (B, Q, Q))

  def plain(q, k, v, pk, pv, sinks):
    own, shared = attention.KeyValues(k, v, own_mask), attention.KeyValues(pk, pv, prompt_mask)
    sinks = sinks if has_sinks else None
    return attention.attend(q, own, shared, scale=0.3, cap=cap, sink_H=sinks)

  def kernel(q, k, v, pk, pv, sinks):
    options = dict(scale=0.3, cap=cap, window=window, slides=bool(window), interpret=True)
    sinks = sinks if has_sinks else None
    return splash.attend(q, (k, v), (pk, pv), jnp.asarray(prompt_mask), sink_H=sinks, **options)

  outs, inputs = [], (*inputs, draw(H))
  for f in (plain, kernel):
    slope = jax.grad(lambda *x, f=f: jnp.sin(f(*x)).sum(), argnums=range(6))
    outs.append(jax.jit(lambda *x, f=f, slope=slope: (f(*x), slope(*x)))(*inputs))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), *outs)


WINDOW = dict(window=4, sliding_rope_theta=100.0)
MODELS = dict(
  full=MODEL,
  window=dataclasses.replace(MODEL, **WINDOW, sliding=(True, False)),
  # layers of one loop, some of which slide
  irregular=dataclasses.replace(
    MODEL, **WINDOW, layers=5, sliding=(True, False, False, True, True)
  ),
  sinks=dataclasses.replace(MODEL, **WINDOW, sliding=(True, True), sinks=True),
)


@pytest.mark.parametrize('score', [whole_rows, packed_rows])
@pytest.mark.parametrize(
  'model, mesh',
  [(name, {}) for name in MODELS] + [(name, dict(fsdp=2, tensor=2)) for name in ('full', 'sinks')],
  ids=str,
)
def test_log_probabilities_and_gradients_of_the_update_are_those_without_the_kernel(
  model, mesh, score
):
  """Several bins a microbatch, and several rows a bin, each with its own copy of the prompt."""
  model = MODELS[model]
  params = decoder.init(model, 0)
  if model.sinks:  # at their initial 0 heads would not differ
    params = jax.tree_util.tree_map_with_path(
      lambda path, x: jnp.arange(4.0) - 1 if 'sinks' in sharding.path_name(path) else x, params
    )

  def scored(score, attend, **mesh):
    p = spec(attend, model, **mesh)
    size = p.update.packing
    assert size.shares_prompt == (attend == 'xla')
    size = size._replace(bins=2, tokens=3 * L, predicted=2 * T, rows=3)
    p = p._replace(update=p.update._replace(remat=True, packing=size))
    placed = jax.device_put(params, sharding.layout(params, p.layout.mesh))
    run = jax.jit(lambda x, y: sharding.on_mesh(score)(p, x, y))
    traced = run.trace(placed, batch())
    assert ('pallas_call' in str(traced.jaxpr)) == (attend == 'splash')
    return traced.lower().compile()(placed, batch())

  a, b = scored(whole_rows, 'xla'), scored(score, 'splash', **mesh)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=2e-5), a, b)


@pytest.mark.parametrize(
  'attend, model, mesh, message',
  [
    ('flash', {}, {}, 'is unknown; choose one of: auto, xla, splash, cudnn'),
    ('splash', dict(WINDOW, sliding=(True, False), chunked=True), {}, 'a model with chunked'),
    ('splash', {}, dict(context=2), 'config.mesh.context=2'),
  ],
)
def test_unsupported_settings_are_refused(attend, model, mesh, message):
  with pytest.raises(UserError, match=f"config.learner.attention='{attend}' .*{message}"):
    spec(attend, dataclasses.replace(MODEL, **model), **mesh)


def test_auto_is_the_kernel_on_tpus_for_long_completions_that_it_can_read():
  def chosen(model=MODEL, tokens=2048, prompt=100, **mesh):
    c = configs.default()
    c.prompts, c.rollouts, c.prompt_tokens, c.completion_tokens = 16, 2, prompt, tokens
    c.mesh.update(mesh)
    devices = [sharding_report.Device(i, 'tpu', 'TPU v5 lite') for i in range(4)]
    model = dataclasses.replace(model, max_tokens=10_000)
    step_spec = make_spec(c, model, (3,), sharding.make_mesh(c.mesh, devices))
    assert step_spec.update.packing.shares_prompt == (step_spec.update.attention is None)
    return 'xla' if step_spec.update.attention is None else 'splash'

  assert chosen() == 'splash'
  assert chosen(tokens=2047) == chosen(prompt=2049) == 'xla'
  assert chosen(MODELS['window']) == chosen(MODELS['sinks']) == 'splash'
  assert chosen(dataclasses.replace(MODELS['window'], chunked=True)) == 'xla'
  assert chosen(context=2) == 'xla' and chosen(tensor=2) == 'splash'

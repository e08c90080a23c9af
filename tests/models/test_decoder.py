"""The decoder's structure, and how often its layers are traced."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxrl_llm.models import decoder
from jaxrl_llm.models.block import Block
from jaxrl_llm.types import ModelConfig

SHAPE = dict(vocab=32, width=16, layers=4, heads=2, kv_heads=1, head_dim=8, mlp=24, max_tokens=64)
EXPERTS = dict(experts=4, experts_per_token=2, dense_mlp=8)
CONFIGS = dict(
  dense=ModelConfig(**SHAPE),
  untied=ModelConfig(**SHAPE, tied=False, qk_norm='head', norms='both', qkv_bias=True),
  readers=ModelConfig(
    **SHAPE,
    sliding=(True, False, True, False),
    window=3,
    kv_readers=2,
    kv_reader_mlp=2,
    layer_input=6,
    layer_input_vocab=40,
    qk_norm='qkv',
    norms='both',
    layer_scales=True,
  ),  # fmt: skip
  mixed=ModelConfig(**SHAPE, **EXPERTS, dense_layers=(True, False, True, False)),
)


@pytest.mark.parametrize('adapted', [(), ('q', 'o')])
@pytest.mark.parametrize('name', CONFIGS)
def test_the_structure_is_that_of_the_whole_module(name, adapted):
  config = CONFIGS[name]
  make = lambda: decoder.Decoder(config, jnp.dtype('bfloat16'), nnx.Rngs(0), adapted)  # noqa: E731
  graph, params = nnx.split(nnx.eval_shape(make), nnx.Param)
  found_graph, found_params = decoder._definition(config, 'bfloat16', adapted)
  assert found_graph == graph
  assert jax.tree.structure(found_params) == jax.tree.structure(nnx.to_pure_dict(params))
  same = lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype)  # noqa: E731
  assert jax.tree.all(jax.tree.map(same, found_params, nnx.to_pure_dict(params)))


@pytest.mark.parametrize(('name', 'structures'), [('dense', 1), ('mixed', 2)])
def test_layers_of_one_structure_are_traced_once(monkeypatch, name, structures):
  traced, call = [], Block.__call__
  monkeypatch.setattr(Block, '__call__', lambda *a, **k: traced.append(1) or call(*a, **k))
  config = CONFIGS[name]
  tokens = jax.ShapeDtypeStruct((2, 5), jnp.int32)
  mask = jax.ShapeDtypeStruct((2, 5), bool)
  jax.eval_shape(
    jax.grad(lambda p, t, m: decoder.forward(config, p, t, m).sum()),
    decoder.abstract_params(config),
    tokens,
    mask,
  )
  assert len(traced) == structures

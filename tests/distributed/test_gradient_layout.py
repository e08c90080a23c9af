"""Gradients of weights that are gathered before use: each device keeps its part, and the sum is that of one device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_llm.distributed import sharding

D, F = 16, 24


def weights():
  draw = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape)  # noqa: E731
  return dict(q=dict(kernel=draw(0, D, F)), attn_norm=dict(scale=draw(1, D)))


def product(layer, x_BxD):
  return jnp.sin((x_BxD * layer['attn_norm']['scale'][None]) @ layer['q']['kernel']).sum()


def test_the_gradient_of_a_gathered_layer_is_scattered_as_its_weights_lie():
  layer, x_BxD = weights(), jax.random.normal(jax.random.key(2), (32, D))
  mesh = sharding.make_mesh(dict(fsdp=4, tensor=2), jax.devices()[:8])
  gather = sharding.layer_gather(mesh)

  def loss(layer, x_BxD):
    return product(gather(layer), x_BxD)

  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    # Nothing but the gather states where a gradient lies.
    whole, rows = sharding.replicated(mesh), NamedSharding(mesh, PartitionSpec('fsdp'))
    slope = jax.jit(jax.grad(loss), in_shardings=(whole, rows))
    compiled = slope.lower(layer, x_BxD).compile()
    gradient = slope(layer, jax.device_put(x_BxD, rows))
  found, want = compiled.output_shardings, sharding.layout(layer, mesh)
  for one, other, x in zip(*map(jax.tree.leaves, (found, want, layer)), strict=True):
    assert one.is_equivalent_to(other, x.ndim), (one, other)
  assert want['q']['kernel'].spec == PartitionSpec('fsdp', 'tensor')
  close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)  # noqa: E731
  jax.tree.map(close, gradient, jax.grad(product)(layer, x_BxD))


def test_only_what_is_trained_has_a_gradient():
  mesh = sharding.make_mesh(dict(fsdp=8), jax.devices()[:8])
  gather = sharding.layer_gather(mesh)
  layer, x_BxD = weights(), jnp.ones((8, D))

  def loss(scale):
    return product(gather(layer | dict(attn_norm=dict(scale=scale))), x_BxD)

  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    text = str(jax.make_jaxpr(jax.grad(loss))(layer['attn_norm']['scale']))
  assert (
    text.count('dot_general[') == 2
  )  # one forward, one for x; the frozen kernel would have a third


def test_gradients_that_no_layer_gathers_keep_the_layout_of_their_weights():
  mesh = sharding.make_mesh(dict(fsdp=8), jax.devices()[:8])
  params = dict(embed=dict(embedding=jnp.ones((40, D))), norm=dict(scale=jnp.ones(D)))
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    keep = jax.jit(lambda p: sharding.keep_layout(p, mesh), in_shardings=sharding.replicated(mesh))
    found = keep.lower(params).compile().output_shardings
  for one, other, x in zip(
    *map(jax.tree.leaves, (found, sharding.layout(params, mesh), params)), strict=True
  ):
    assert one.is_equivalent_to(other, x.ndim)
  one = sharding.make_mesh({}, jax.devices()[:1])
  assert sharding.keep_layout(params, one) is params and sharding.layer_gather(one) is None

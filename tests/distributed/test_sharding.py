"""Meshes and layouts."""

from __future__ import annotations

import jax
import pytest
from jax.sharding import PartitionSpec

from jaxrl_llm.distributed import sharding as sharding_lib
from jaxrl_llm.models import decoder
from jaxrl_llm.types import ModelConfig, UserError

MODEL = ModelConfig(
  vocab=48,
  width=32,
  layers=1,
  heads=4,
  kv_heads=1,
  head_dim=6,
  mlp=64,
  max_tokens=64,
  qkv_bias=True,
)


def test_one_axis_takes_the_remaining_devices():
  mesh = sharding_lib.make_mesh(dict(data=2, fsdp=-1, tensor=2), jax.devices())
  assert dict(mesh.shape) == dict(data=2, fsdp=2, context=1, expert=1, decode=1, tensor=2)
  assert sharding_lib.rows_shards(mesh) == 4
  assert (
    dict(sharding_lib.make_mesh(dict(data=1, fsdp=2, tensor=1), jax.devices()).shape)['fsdp'] == 2
  )


@pytest.mark.parametrize('sizes', [(3, -1, 1), (-1, -1, 1), (16, 1, 1), (0, 8, 1)])
def test_a_mesh_that_does_not_fit_is_refused(sizes):
  with pytest.raises(UserError, match='does not fit 8 devices'):
    sharding_lib.make_mesh(dict(zip(('data', 'fsdp', 'tensor'), sizes, strict=True)), jax.devices())


def test_parameters_are_sharded_by_the_rules_where_they_divide():
  mesh = sharding_lib.make_mesh(dict(data=1, fsdp=2, tensor=4), jax.devices())
  placed = sharding_lib.layout(decoder.abstract_params(MODEL), mesh)
  spec = lambda *path: _at(placed, path).spec  # noqa: E731
  assert spec('embed', 'embedding') == PartitionSpec('tensor', 'fsdp')
  assert spec('layers', 0, 'up', 'kernel') == PartitionSpec('fsdp', 'tensor')
  assert spec('layers', 0, 'down', 'kernel') == PartitionSpec('tensor', 'fsdp')
  assert spec('layers', 0, 'q', 'bias') == PartitionSpec('tensor')
  assert spec('layers', 0, 'k', 'kernel') == PartitionSpec('fsdp', None), '6 does not divide by 4'
  assert spec('norm', 'scale') == PartitionSpec()


def test_decoding_keeps_only_the_tensor_axis():
  mesh = sharding_lib.make_mesh(dict(data=2, fsdp=2, tensor=2), jax.devices())
  placed = sharding_lib.decode_layout(decoder.abstract_params(MODEL), mesh)
  for sharding in jax.tree.leaves(placed):
    assert set(sharding.spec) <= {None, 'tensor'}
  assert placed['layers'][0]['up']['kernel'].spec == PartitionSpec(None, 'tensor')


def test_decoding_spreads_features_over_devices_that_share_rows_in_the_update():
  """A kernel [in, out] as it is stored, while sampling, and within a layer of the update."""
  mesh = sharding_lib.make_mesh(dict(fsdp=2, decode=2, tensor=2), jax.devices())
  params = decoder.abstract_params(MODEL)
  up = lambda placed: placed['layers'][0]['up']['kernel'].spec  # noqa: E731
  both = ('tensor', 'decode')
  assert up(sharding_lib.layout(params, mesh)) == PartitionSpec('fsdp', both)
  assert up(sharding_lib.decode_layout(params, mesh)) == PartitionSpec(None, both)
  place = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)  # noqa: E731
  layer = jax.tree.map(place, params, sharding_lib.layout(params, mesh))['layers'][0]
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    compiled = jax.jit(sharding_lib.layer_gather(mesh)).lower(layer).compile()
  assert compiled.output_shardings['up']['kernel'].spec == PartitionSpec(None, 'tensor')
  keys = [jax.ShapeDtypeStruct((8, heads, 16, 4), 'float32') for heads in (2, 4)]
  specs = [x.spec for x in sharding_lib.cache_layout(keys, mesh)]
  assert specs == [PartitionSpec(sharding_lib.ROWS), PartitionSpec(sharding_lib.ROWS, both)]
  sampled, updated = sharding_lib.ROWS, sharding_lib.UPDATE_ROWS
  assert [sharding_lib.rows_shards(mesh, axes) for axes in (sampled, updated)] == [2, 4]


def _at(tree, path):
  for key in path:
    tree = tree[key]
  return tree

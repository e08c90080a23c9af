"""Collectives of a program by mesh axis, and the operations of an update."""

from __future__ import annotations

import dataclasses
import types

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from jaxrl_llm.distributed import sharding
from jaxrl_llm.learner.packing import PackingSpec
from jaxrl_llm.profiling import hlo_update
from jaxrl_llm.types import ModelConfig

SIZES = dict(data=2, fsdp=2, tensor=2)
MODEL = ModelConfig(
  vocab=50, width=32, layers=3, heads=4, kv_heads=2, head_dim=8, mlp=48, max_tokens=64
)


@pytest.mark.parametrize(
  'attributes, axes',
  [
    ('replica_groups={{0,1},{2,3},{4,5},{6,7}}', 'tensor'),
    ('replica_groups={{0,2},{1,3},{4,6},{5,7}}', 'fsdp'),
    ('replica_groups={{0,4},{1,5},{2,6},{3,7}}', 'data'),
    ('replica_groups=[4,2]<=[8], use_global_device_ids=true', 'tensor'),
    ('replica_groups=[2,4]<=[4,2]T(1,0)', 'data·fsdp'),
    ('replica_groups=[4,2]<=[2,2,2]T(0,2,1)', 'fsdp'),
    ('replica_groups={{0,1,2,3},{4,5,6,7}}', 'fsdp·tensor'),
    ('source_target_pairs={{0,2},{2,0},{1,3},{3,1}}', 'fsdp'),
    ("replica_groups=mesh['a'=2,'b'=2,'c'=2] {'c'}, channel_id=1", 'tensor'),
    ("replica_groups=mesh['a'=2,'b'=1,'c'=4], device_ids=([2,4]T(1,0)) {'c'}", 'data·tensor'),
    ("replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}", 'data'),
    ("replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}", 'fsdp·tensor'),
    ("replica_groups=mesh['a'=8] {'a':(2)2}", 'fsdp'),
    ("replica_groups=mesh['a'=8] {'a':(1)2,'a':(4)2}", 'data·tensor'),
    ("replica_groups=mesh['a'=2,'b'=4] {'a','b':(2)2}", 'data·tensor'),
    ("replica_groups=mesh['a'=2,'b'=4], device_ids=(1,0,3,2,5,4,7,6) {'b':(2)2}", 'tensor'),
    ('replica_groups={}', 'data·fsdp·tensor'),
    ('replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}', ''),
  ],
)
def test_mesh_axes_of_a_collective(attributes, axes):
  assert hlo_update.mesh_axes(f'channel_id=1, {attributes}, to_apply=%add', SIZES) == axes


def test_a_sum_in_a_loop_counts_once_per_iteration():
  mesh = sharding.make_mesh(dict(fsdp=2, tensor=4), jax.devices())

  def local(x):
    once = jax.lax.psum(x, 'fsdp')
    return jax.lax.fori_loop(0, 5, lambda _, y: jax.lax.psum(jnp.sin(y), 'tensor'), once)

  cut = jax.shard_map(
    local, mesh=mesh, in_specs=PartitionSpec('fsdp'), out_specs=PartitionSpec(), check_vma=False
  )
  text = jax.jit(cut).lower(jnp.zeros((8, 16))).compile().as_text()
  size = 4 * 16 * 4  # bytes on a device
  received = hlo_update.collective_bytes(text, mesh.shape)
  assert received == {'tensor': 5 * 2 * 3 / 4 * size, 'fsdp': 2 * 1 / 2 * size}
  assert hlo_update.collective_bytes(text, mesh.shape, 7) == received


def test_a_sum_in_a_loop_whose_length_is_data_counts_as_often_as_assumed():
  """As the update's loop over microbatches, with a loop over layers in it."""
  mesh = sharding.make_mesh(dict(fsdp=2, tensor=4), jax.devices())

  def layer(_, y):
    return jax.lax.psum(jnp.sin(y), 'tensor')

  def local(x, count):
    once = jax.lax.psum(x, 'fsdp')
    return jax.lax.fori_loop(0, count, lambda _, y: jax.lax.fori_loop(0, 5, layer, y), once)

  parts = PartitionSpec('fsdp'), PartitionSpec()
  cut = jax.shard_map(local, mesh=mesh, in_specs=parts, out_specs=PartitionSpec(), check_vma=False)
  text = jax.jit(cut).lower(jnp.zeros((8, 16)), jnp.int32(3)).compile().as_text()
  size = 4 * 16 * 4  # bytes on a device
  for trips in (1, 7):
    received = hlo_update.collective_bytes(text, mesh.shape, trips)
    assert received == {'tensor': trips * 5 * 2 * 3 / 4 * size, 'fsdp': 2 * 1 / 2 * size}


def test_operations_of_an_update_by_hand():
  model = dataclasses.replace(MODEL, experts=8, experts_per_token=2, mlp=24)
  attention = 32 * 8 * (2 * 4 + 2 * 2)
  assert hlo_update.weights_per_token(MODEL) == 3 * (attention + 3 * 32 * 48)
  assert hlo_update.weights_per_token(model) == 3 * (attention + 2 * 3 * 32 * 24 + 32 * 8)
  spec = types.SimpleNamespace(
    model=types.SimpleNamespace(config=MODEL),
    rollout=types.SimpleNamespace(decode=types.SimpleNamespace(max_tokens=6)),
    update=types.SimpleNamespace(remat=True, passes=1, packing=PackingSpec(1, 99, 99, 9, True)),
    layout=types.SimpleNamespace(slots=4, prompt_tokens=10, group=2),
  )
  rows, attended = 4 * 10 + 8 * 6, 4 * 10 * 5 + 8 * 6 * (10 + 3)
  forward = (
    2 * hlo_update.weights_per_token(MODEL) * rows + 2 * 50 * 32 * 8 * 6 + 4 * 3 * 4 * 8 * attended
  )
  assert hlo_update.update_flops(spec) == (3 * forward, 4 * forward)

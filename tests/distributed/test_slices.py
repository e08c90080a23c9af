"""Meshes of several slices: which devices form a slice, and what crosses the network between slices."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from jaxrl_llm.commands import compile_report, sharding_report
from jaxrl_llm.config import loading as configs
from jaxrl_llm.distributed import hardware, sharding, slices
from jaxrl_llm.learner import compile as programs
from jaxrl_llm.profiling import dcn, hlo_decode, hlo_update
from jaxrl_llm.types import UserError


@dataclasses.dataclass(frozen=True)
class Chip:
  id: int
  platform: str
  process_index: int
  slice_index: int = 0


def chips(platform: str, processes: int, slices_of=lambda process: 0) -> list[Chip]:
  """Four chips of each process."""
  return [Chip(i, platform, i // 4, slices_of(i // 4)) for i in range(4 * processes)]


def test_the_data_axis_alone_crosses_slices():
  """TPUs go by their slice_index, in whatever order jax lists them; others in consecutive blocks."""
  tpus = chips('tpu', 4, lambda process: process % 2)
  mesh = sharding.make_mesh(dict(data=2, fsdp=2, tensor=2), tpus)
  assert dict(mesh.shape) == dict(data=4, fsdp=2, context=1, expert=1, decode=1, tensor=2)
  rows = mesh.devices.reshape(4, -1)
  assert [{d.slice_index for d in row} for row in rows] == [{0}, {0}, {1}, {1}]
  others = chips('cpu', 2)
  mesh = sharding.make_mesh(dict(slices=2, fsdp=-1), others)
  assert [d.id for d in mesh.devices.flat] == list(range(8)) and mesh.shape['data'] == 2
  assert sharding.make_mesh(dict(fsdp=-1), others).shape['fsdp'] == 8
  assert sharding.make_mesh(dict(preset='v5e-4'), chips('tpu', 2, lambda p: p)).shape['data'] == 2


@pytest.mark.parametrize(
  'devices, wanted, words',
  [
    (chips('tpu', 2, lambda p: p), 4, 'slices=4, but the 8 devices belong to 2 slices; set --config.mesh.slices=2'),
    (chips('tpu', 2), 2, 'belong to 1 slice; set --config.mesh.slices=1'),
    (chips('tpu', 3, lambda p: p // 2), 0, '2 slices .* do not share 12 devices of 3 processes evenly'),
    (chips('gpu', 3), 2, 'do not share 12 devices of 3 processes evenly'),
    (chips('cpu', 1), 3, 'do not share 4 devices of 1 process evenly'),
  ],
)  # fmt: skip
def test_slices_that_the_devices_do_not_form_are_refused(devices, wanted, words):
  with pytest.raises(UserError, match=words):
    slices.split(devices, wanted)


@pytest.mark.parametrize('mesh', [dict(fsdp=8), dict(fsdp=2, tensor=4), dict(data=2, fsdp=4)])
def test_a_mesh_larger_than_a_slice_is_refused(mesh):
  """It would fit the eight devices of both slices together."""
  with pytest.raises(
    UserError, match='does not fit 4 devices of each of the 2 slices; let the product'
  ):
    sharding.make_mesh(dict(slices=2) | mesh, jax.devices())


@pytest.mark.parametrize(
  'mesh, count, words',
  [
    (dict(preset='v5e-16'), 8, r"'v5e-16' is for 16 devices.* slice here has 8; type --config.mesh.preset=v5e-8\."),
    (dict(preset='v5p-32'), 64, r'is for 16 devices.* type --config.mesh.preset=v5p-128\.'),
    (dict(preset='v6e-16'), 12, r"type --config.mesh.preset='' --config.mesh.fsdp=-1\."),
    (dict(preset='gpu-node'), 12, r'is for a multiple of 8 devices, and a slice here has 12'),
  ],
)  # fmt: skip
def test_a_preset_of_other_devices_is_refused_with_the_one_to_type(mesh, count, words):
  with pytest.raises(UserError, match=words):
    sharding.make_mesh(mesh, [sharding_report.Device(i) for i in range(count)])


def test_names_of_several_slices():
  assert hardware.slices('2xv5e-16') == (2, 'v5e-16') and hardware.slices('2x4') == (1, '2x4')
  assert hardware.topology('2xv5e-16') == hardware.topology('2xv5e:4x4') == 'v5e:4x4'
  assert hardware.topology_options('2xv5e-1') == dict(chips_per_host_bounds=(1, 1, 1), num_slices=2)
  found = sharding_report.devices('2xv5litepod-16')
  assert [d.slice_index for d in found] == [0] * 16 + [1] * 16
  # 2 cards of 100 Gbit/s for 8 chips: a gigabyte a chip takes 8 GB / 25 GB/s.
  assert hardware.dcn_seconds('TPU v5 lite', 1e9) == pytest.approx(0.32)
  assert hardware.dcn_seconds('cpu', 1e9) is None


@pytest.mark.parametrize(
  'exchange, between, links',
  [
    # Shards of 256 bytes on two slices of four.
    (lambda x: jax.lax.psum(x, 'data'), 256, 0),
    (lambda x: jax.lax.psum(x, 'fsdp'), 0, 2 * 3 / 4 * 256),
    # Each of four sums a quarter over both slices.
    (lambda x: jax.lax.psum(x, ('data', 'fsdp')), 256 / 4, 2 * 7 / 8 * 256 - 256 / 4),
    (lambda x: jax.lax.all_gather(x, ('data', 'fsdp')), 4 * 256 / 4, 7 * 256 - 4 * 256 / 4),
    # Half of a row is for the other slice, and none of it comes twice.
    (lambda x: jax.lax.all_to_all(x, ('data', 'fsdp'), 0, 0, tiled=True), 128, 7 / 8 * 256 - 128),
    (lambda x: jax.lax.ppermute(x, 'data', [(0, 1), (1, 0)]), 256, 0),
    # A ring through all devices crosses twice.
    (lambda x: jax.lax.ppermute(x, ('data', 'fsdp'), [(i, (i + 1) % 8) for i in range(8)]), 64, 192),
    # Three sums, one after the other.
    (lambda x: jax.lax.fori_loop(0, 3, lambda _, y: jax.lax.psum(y, 'data'), x), 3 * 256, 0),
  ],
)  # fmt: skip
def test_bytes_between_slices_by_hand(exchange, between, links):
  mesh = sharding.make_mesh(dict(slices=2, fsdp=4), jax.devices())
  rows = PartitionSpec(('data', 'fsdp'))
  cut = jax.shard_map(exchange, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)
  text = jax.jit(cut).lower(jnp.zeros((64, 8))).compile().as_text()
  found = hlo_decode.all_collectives(text, slice_size=4)
  assert sum(c.dcn_bytes * c.times for c in found) == pytest.approx(between)
  assert sum((c.wire_bytes - c.dcn_bytes) * c.times for c in found) == pytest.approx(links)
  assert sum(c.dcn_bytes for c in hlo_decode.all_collectives(text)) == 0


def test_groups_may_differ_in_slices():
  """Slices of four: two of the four groups cross, and each sends its sum over and receives the other's."""
  groups = 'replica_groups={{0,1},{2,4},{3,5},{6,7}}'
  assert dcn.crossing_share('all-reduce', groups, 8, 4) == 2 * (1 + 1) / 8
  # Three rows of a group of four lie in one slice: 3 of 4 parts cross for the fourth, and 1 of 4 for each of the three.
  groups = 'replica_groups={{0,1,2,4},{3,5,6,7}}'
  assert dcn.crossing_share('all-to-all', groups, 8, 4) == 2 * (3 / 4 + 3 * 1 / 4) / 8


def test_an_update_sums_gradients_over_slices_once():
  """On 2 × 4 devices: after the last of 8 microbatches, and not in each."""
  c = configs.default()
  with c.ignore_type():
    c.update(
      dict(
        model='scratch',
        scratch=dict(width=64, layers=2, heads=2, kv_heads=2, mlp=128, max_tokens=64),
        prompts=64, rollouts=8, prompt_tokens=16, completion_tokens=24,
        learner=dict(microbatch_tokens=64), mesh=dict(slices=2, fsdp=4),
      )
    )  # fmt: skip
  spec = compile_report.make(c, jax.devices())
  assert spec.layout.slices == 2
  state, batch, *_ = compile_report.arguments(spec)
  text = programs.compile_update(spec).lower(state, batch).compile().as_text()
  report = hlo_update.report(spec, text, hardware.CHIPS['TPU v5 lite'])
  assert report['microbatches'] == 8
  crossing = [c for c in hlo_decode.all_collectives(text, 8, 4) if c.dcn_bytes]
  assert {c.times for c in crossing} == {1}
  weights = {sharding.path_name(p): x for p, x in jax.tree_util.tree_leaves_with_path(state.params)}
  norms = sum(x.size for name, x in weights.items() if name.endswith('norm/scale'))
  kernels = sum(x.size for x in weights.values()) - norms
  # In float32, a quarter of the kernels and all norms, which each device holds; seven sums and one maximum of the loss.
  gradient = 4 * (kernels / 4 + norms) + 4 * (7 + 1)
  sums = [c for c in crossing if c.source.rpartition('/')[2] in ('psum', 'pmax')]
  assert sum(c.dcn_bytes for c in sums) == gradient
  # Prompts are dealt to shards anew. A gather brings each device an eighth of: five arrays of 512 rows' 24 tokens, 64
  # prompts of 16, a number and a flag of each row, two numbers of each prompt.
  rows = (5 * 512 * 24 * 4 + 64 * 16 * 4 + 512 * (4 + 1) + 64 * 2 * 4) / 8
  # Ten numbers and a flag are reduced over all eight devices: each is sent to the other slice and back.
  numbers = (10 * 4 + 1) * 2 / 8
  assert report['dcn_bytes'] == gradient + rows + numbers
  assert report['dcn_s'] is None and report['serial_s'] > report['best_s']


# As libtpu 0.0.42 prints the sum of 4 KB over two slices.
_TRANSFER = """HloModule sum, num_partitions=16

ENTRY %main (p: f32[1,8,128]) -> f32[1,8,128] {
  %p = f32[1,8,128]{2,1,0} parameter(0)
  %after-all = token[] after-all()
  %send = (f32[1,8,128]{2,1,0:T(8,128)}, u32[]{:S(2)}, token[]) send(%p, %after-all), channel_id=2, is_host_transfer=true, frontend_attributes={_xla_megascale_target="{TARGET}x{0:15}",_xla_megascale_transfer_type="KIND"}
  %recv = (f32[1,8,128]{2,1,0:T(8,128)}, u32[]{:S(2)}, token[]) recv(%after-all), channel_id=1, is_host_transfer=true, frontend_attributes={_xla_megascale_target="{TARGET}x{0:15}",_xla_megascale_transfer_type="KIND"}
  ROOT %sum = f32[1,8,128]{2,1,0} all-reduce(%p), channel_id=3, replica_groups={{0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15}}
}
"""  # noqa: E501


@pytest.mark.parametrize(
  'kind, target, received',
  [
    ('ALL_REDUCE', '1,2', 4096),
    ('ALL_REDUCE', '1:4', 2 * 3 / 4 * 4096),
    ('ALL_GATHER', '1,2,3', 2 * 4096),
    ('ALL_TO_ALL', '1:4', 3 / 4 * 4096),
    ('ONE_TO_ONE', '1,2', 4096),
  ],
)
def test_the_program_of_one_slice_exchanges_through_its_host(kind, target, received):
  text = _TRANSFER.replace('KIND', kind).replace('TARGET', target)
  within, between = sorted(
    hlo_decode.all_collectives(text, slice_size=16), key=lambda c: c.dcn_bytes
  )
  assert between.dcn_bytes == between.wire_bytes == received
  assert within.dcn_bytes == 0 and within.wire_bytes == 2 * 15 / 16 * 4096

"""Slots that fit into a device's memory: none are left out where rows fit, and fewer rows at once sample the same."""

from __future__ import annotations

import pytest
import tpu_specs

from jaxrl_llm.distributed import hardware
from jaxrl_llm.learner import device_memory

MLP = 8192  # so that the optimizer takes the memory of several slots


def make(**changes):
  scratch = dict(width=128, layers=2, heads=4, kv_heads=4, mlp=MLP, max_tokens=1024)
  sizes = dict(scratch=scratch, prompt_tokens=100, completion_tokens=800)
  return tpu_specs.make(**sizes | changes)[1]


def gib(size: float) -> float:
  return size / 2**30


def kept_bytes(spec) -> float:
  """What stays on a device while rows decode, counted by hand for the sizes of `make`; float32 optimizer state."""
  chips = spec.layout.mesh.size
  parameters = 128 * 128 * 4 + 3 * 128 * MLP  # of a layer, without its norms
  whole = 2 * parameters + spec.model.config.vocab * 128
  return 12 * whole / chips + 2 * whole


def column_bytes() -> int:
  """Keys and values of one token, 2 layers, 4 heads of 32, bfloat16."""
  return 2 * 2 * 4 * 32 * 2


def test_sizes_are_those_counted_by_hand():
  spec = make()
  assert device_memory.prompt_cache_bytes(spec) == 64 // 16 * 100 * column_bytes()
  assert device_memory.ring_bytes(spec) == 64 * 8 // 16 * 800 * column_bytes()
  counted = device_memory.state_bytes(spec) + device_memory.sampling_weight_bytes(spec)
  assert counted == pytest.approx(kept_bytes(spec), rel=0.01)  # norms and counters are left out


@pytest.mark.parametrize('local', [1, 3, 8, 16, 24])
def test_as_many_slots_as_fit_beside_weights_and_prompts(local, monkeypatch):
  spec = make()
  assert spec.rollout.decode.slots == 0
  kept = kept_bytes(spec) + 4 * 100 * column_bytes()
  slot = (100 + 800) * column_bytes()
  limit = (kept * 1.01 + (local + 0.5) * slot) / 0.85
  monkeypatch.setitem(hardware.HBM_GIB, tpu_specs.V5E, gib(limit))
  fewer = make()
  assert fewer.rollout.decode.slots == 16 * local
  assert fewer.layout == spec.layout and fewer.update.packing == spec.update.packing
  # A number that was asked for stays.
  assert make(rollout=dict(slots=512)).rollout.decode.slots == 512


def test_slots_of_a_device_are_rounded_down_and_at_least_one(monkeypatch):
  kept = kept_bytes(make()) + 4 * 100 * column_bytes()
  slot = (100 + 800) * column_bytes()
  monkeypatch.setitem(hardware.HBM_GIB, tpu_specs.V5E, gib((kept * 1.01 + 13.5 * slot) / 0.85))
  assert make().rollout.decode.slots == 16 * 8
  monkeypatch.setitem(hardware.HBM_GIB, tpu_specs.V5E, gib(kept))
  assert make().rollout.decode.slots == 16


def test_a_kernel_that_reads_prompts_where_they_are_leaves_room_for_more_slots(monkeypatch):
  rollout, kept = dict(attention='ragged'), kept_bytes(make()) + 4 * 100 * column_bytes()
  limit = (kept * 1.01 + 24.5 * 800 * column_bytes()) / 0.85
  monkeypatch.setitem(hardware.HBM_GIB, tpu_specs.V5E, gib(limit))
  assert make(rollout=rollout).rollout.decode.slots == 16 * 24
  assert make().rollout.decode.slots == 16 * 16  # 21 with a copy of its prompt each, rounded down


def test_where_every_row_needs_a_slot_none_is_left_out(monkeypatch):
  monkeypatch.setitem(hardware.HBM_GIB, tpu_specs.V5E, 1e-3)
  assert make().rollout.decode.slots
  for settings in (
    dict(tree=dict(fn='latr')),
    dict(pruning=dict(fn='quality', candidates=16, at_tokens=50)),
  ):
    assert make(rollout=settings).rollout.decode.slots == 0

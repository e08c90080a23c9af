"""Rooflines of a step, against those of a compiled step and a count by hand."""

from __future__ import annotations

import dataclasses

import jax
import pytest

from jaxrl_llm.commands import compile_report
from jaxrl_llm.config import loading as configs
from jaxrl_llm.distributed import hardware, sharding
from jaxrl_llm.learner import device_memory
from jaxrl_llm.profiling import hlo_update, roofline

CHIP = hardware.Chip(flops=1e9, memory_bandwidth=1e6, link_bandwidth=1e6)


def spec(mesh, **changes):
  config = configs.default()
  with config.ignore_type():
    config.update(
      dict(
        model='scratch',
        scratch=dict(width=128, layers=2, heads=2, kv_heads=2, mlp=256, max_tokens=64),
        prompts=4,
        rollouts=4,
        learner=dict(microbatch_tokens=256),
        prompt_tokens=16,
        completion_tokens=24,
        mesh=mesh,
      )
      | changes
    )
  return compile_report.make(config, jax.devices())


@pytest.mark.parametrize('slots', [0, 8])
def test_a_decode_iteration_matches_the_compiled_roofline(monkeypatch, slots):
  monkeypatch.setitem(hardware.CHIPS, jax.devices()[0].device_kind, CHIP)
  step_spec = spec(dict(data=1, fsdp=4, tensor=2), rollout=dict(slots=slots))
  ring = (
    2
    * 2
    * ((slots or 16) // 4)
    * 1
    * 24
    * 64
    * 4
    / (2 if step_spec.rollout.decode.cache_dtype == 'bfloat16' else 1)
  )
  assert (
    device_memory.ring_bytes(step_spec) == ring
  )  # keys and values, 2 layers, rows and heads of a device, float32
  report = roofline.report(step_spec)
  decode = dict(cache_bytes=ring, cache_shape=(1,), wire_bytes=0)
  roof = compile_report.roofline(step_spec, decode)
  assert report['round']['rows'] == roof['rows'] == (slots or 16)
  assert report['round']['seconds'] == pytest.approx(roof['rows'] / roof['tokens_per_s'])
  assert report['round']['bytes'] == roof['weight_bytes'] + ring + roof['prompt_cache_bytes']
  assert report['update']['seconds'] == hlo_update.update_flops(step_spec).executed / 8 / 1e9
  # 4 prompts of 16 tokens, which attend to half of 16 keys in 2 layers of 2 heads of 64.
  attention = 4 * 2 * 2 * 64 * 4 * 16 * 8
  products = 2 * hlo_update.weights_per_token(step_spec.model.config) * 4 * 16
  assert report['prefill']['seconds'] == pytest.approx((products + attention) / 8 / 1e9)


def test_a_decode_iteration_costs_as_much_over_the_decode_axis_as_over_tensor():
  by_tensor, by_decode = (spec({'data': 1, 'fsdp': 2, axis: 2}) for axis in ('tensor', 'decode'))
  assert device_memory.ring_bytes(by_tensor) == device_memory.ring_bytes(by_decode)
  assert roofline.decode(by_tensor, 1.0) == roofline.decode(by_decode, 1.0)


def test_a_layer_that_reads_the_cache_of_another_stores_none():
  step_spec = spec(dict(data=1, fsdp=4, tensor=2))
  config = dataclasses.replace(step_spec.model.config, kv_readers=1)
  readers = step_spec._replace(model=step_spec.model._replace(config=config))
  ring, half = (device_memory.ring_bytes(s) for s in (step_spec, readers))
  assert half == ring / 2
  want, got = roofline.decode(step_spec, ring), roofline.decode(readers, half)
  assert got.cache_bytes == want.cache_bytes and got.prompt_cache_bytes == want.prompt_cache_bytes


def test_an_unknown_chip_has_bytes_and_no_seconds():
  report = roofline.report(spec(dict(data=1, fsdp=4, tensor=2)))
  assert report['device_kind'] == 'cpu' and report['chip'] is None and report['devices'] == 8
  assert report['update']['flops'] > 0 and report['round']['bytes'] > 0
  assert all('seconds' not in report[name] for name in ('update', 'round', 'prefill'))


def test_bytes_of_one_device():
  step_spec = spec(dict(data=1, fsdp=4, tensor=2))
  tree = [jax.ShapeDtypeStruct((16, 3), 'bfloat16', sharding=sharding.rows(step_spec.layout.mesh))]
  assert device_memory.tree_bytes(tree) == 4 * 3 * 2

"""The step at best: the numbers of a compiled step's roofline, and those of a count by hand."""

from __future__ import annotations

import jax
import pytest

from jaxrl_llm.commands import compile_report
from jaxrl_llm.config import loading as configs
from jaxrl_llm.distributed import hardware, sharding
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
        learner=dict(microbatch_rollouts=8),
        prompt_tokens=16,
        completion_tokens=24,
        mesh=mesh,
      )
      | changes
    )
  return compile_report.make(config, jax.devices())


@pytest.mark.parametrize('slots', [0, 8])
def test_a_round_is_that_of_the_roofline(monkeypatch, slots):
  monkeypatch.setitem(hardware.CHIPS, jax.devices()[0].device_kind, CHIP)
  made = spec(dict(data=1, fsdp=4, tensor=2), rollout=dict(slots=slots))
  ring = (
    2
    * 2
    * ((slots or 16) // 4)
    * 1
    * 24
    * 64
    * 4
    / (2 if made.rollout.decode.cache_dtype == 'bfloat16' else 1)
  )
  assert (
    roofline.ring_bytes(made) == ring
  )  # keys and values, 2 layers, rows and heads of a device, float32
  told = roofline.report(made)
  decode = dict(cache_bytes=ring, cache_shape=(1,), wire_bytes=0)
  roof = compile_report.roofline(made, decode)
  assert told['round']['rows'] == roof['rows'] == (slots or 16)
  assert told['round']['seconds'] == pytest.approx(roof['rows'] / roof['tokens_per_s'])
  assert told['round']['bytes'] == roof['weight_bytes'] + ring + roof['prompt_cache_bytes']
  assert told['update']['seconds'] == hlo_update.update_flops(made).executed / 8 / 1e9
  assert (
    told['prefill']['seconds']
    == 2 * hlo_update.weights_per_token(made.model.config) * 4 * 16 / 8 / 1e9
  )


def test_of_a_chip_that_nobody_knows_there_are_bytes_and_no_seconds():
  told = roofline.report(spec(dict(data=1, fsdp=4, tensor=2)))
  assert told['device_kind'] == 'cpu' and told['chip'] is None and told['devices'] == 8
  assert told['update']['flops'] > 0 and told['round']['bytes'] > 0
  assert all('seconds' not in told[name] for name in ('update', 'round', 'prefill'))


def test_bytes_of_one_device():
  made = spec(dict(data=1, fsdp=4, tensor=2))
  tree = [jax.ShapeDtypeStruct((16, 3), 'bfloat16', sharding=sharding.rows(made.layout.mesh))]
  assert roofline.bytes_per_device(tree) == 4 * 3 * 2

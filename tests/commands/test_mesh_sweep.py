"""Which layouts are tried, which microbatches of the update, and which of them is called the fastest."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from jaxrl_llm import main, models
from jaxrl_llm.commands import compile_report, mesh_sweep, sharding_report
from jaxrl_llm.config import loading as configs
from jaxrl_llm.distributed import hardware
from jaxrl_llm.runner import validate
from jaxrl_llm.types import UserError

DEVICES = [sharding_report.Device(i, device_kind='TPU v5 lite') for i in range(16)]
EMPTY = dict(argument_bytes=0, alias_bytes=0, temp_bytes=0, code_bytes=0, compile_s=1.0, compile_cpu_s=1.0)  # fmt: skip


def config(**changes):
  made = configs.default()
  with made.ignore_type():
    made.update(
      dict(
        model='scratch',
        scratch=dict(width=128, layers=2, heads=4, kv_heads=2, mlp=256, max_tokens=1024),
        prompts=16,
        rollouts=8,
        prompt_tokens=400,
        completion_tokens=113,
      )
      | changes
    )
  return made


def shape(**changes):
  return dataclasses.replace(models.read_config('scratch', scratch=config().scratch), **changes)


def test_layouts_use_every_chip_and_cut_heads_and_experts_evenly():
  for kv_heads, mlp, experts in ((2, 256, None), (8, 96, None), (4, 768, 128), (1, 256, 4)):
    found = mesh_sweep.layouts(shape(kv_heads=kv_heads, mlp=mlp, experts=experts), 256)
    assert len({tuple(m.items()) for m in found}) == len(found)
    assert all(math.prod(m.values()) == 256 for m in found)
    tensors = {m['tensor'] for m in found}
    assert tensors == {n for n in (1, 2, 4, 8) if kv_heads % n == 0 and mlp % n == 0}
    assert {m['decode'] for m in found} == ({1} if kv_heads % 4 or mlp % 4 else {1, 4})
    assert {m['expert'] for m in found} == {n for n in (1, 4, 8, 16) if (experts or 1) % n == 0}
    assert {m['fsdp'] for m in found if m['tensor'] == m['decode'] == m['expert'] == 1} == {
      16,
      64,
      256,
    }


BIN = 400 + 113 - 1  # tokens of the longest row: each has a bin of its own


def bins(spec) -> int:
  assert spec.update.packing.tokens == BIN
  return spec.update.packing.bins


def sampling(tokens_per_s: float) -> dict:
  """The roofline of 128 rows."""
  ms = dict(weights=1e3 * 128 / tokens_per_s, cache=0.0, links=0.0, compute=0.0)
  return dict(tokens_per_s=tokens_per_s, ms_per_token=ms)


class Compiler:
  """Stands for libtpu: a program fits where its microbatch has few enough bins."""

  def __init__(self, monkeypatch, fits: int):
    self.fits, self.built = fits, []
    monkeypatch.setattr(compile_report, 'build', self.build)
    monkeypatch.setattr(compile_report, 'loops', lambda *_: ['loop'])
    loop = dict(cache_bytes=1, copied_bytes=0, weight_collectives=0, wire_bytes=0)
    monkeypatch.setattr(compile_report, 'decode_report', lambda _: loop)
    monkeypatch.setattr(compile_report, 'roofline', lambda *_: sampling(1000.0))
    monkeypatch.setattr(
      compile_report, 'update_report', lambda spec, *_: dict(best_s=800 / bins(spec), mfu=0.5)
    )
    monkeypatch.setattr(mesh_sweep.programs, 'compile_sample', lambda spec: ('generate', spec))
    monkeypatch.setattr(mesh_sweep.programs, 'compile_update', lambda spec: ('update', spec))

  def build(self, named, *_):
    name, spec = named
    self.built.append((name, bins(spec)))
    oom = 'too much' if name == 'update' and bins(spec) > self.fits else ''
    return compile_report.Part(**EMPTY, peak_bytes=2**30, oom=oom, text='')


def test_microbatches_are_halved_until_they_fit_and_generation_is_compiled_once(monkeypatch):
  compiler = Compiler(monkeypatch, fits=5)
  mesh = dict(data=1, fsdp=8, context=1, expert=1, decode=1, tensor=2)
  found = mesh_sweep.try_mesh(config(), DEVICES, mesh)
  # From the 16 rows of a shard down.
  assert compiler.built == [('generate', 16), ('update', 16), ('update', 8), ('update', 4)]
  assert [one.get('oom', '')[:10] for one in found] == ['the update', 'the update', '']
  # 128 rollouts of 113 tokens at 1000 a second, then the update.
  assert found[-1]['step_s'] == pytest.approx(128 * 113 / 1000 + 800 / 4)
  assert found[-1]['microbatch_tokens'] == 4 * BIN and found[-1]['mesh']['tensor'] == 2


def test_what_can_never_fit_is_not_compiled(monkeypatch):
  compiler = Compiler(monkeypatch, fits=10**9)
  monkeypatch.setitem(hardware.HBM_GIB, 'TPU v5 lite', 1e-6)
  (one,) = mesh_sweep.try_mesh(config(), DEVICES, dict(data=1, fsdp=16, tensor=1))
  assert compiler.built == [] and 'optimizer alone' in one['oom']
  monkeypatch.undo()
  compiler = Compiler(monkeypatch, fits=0)
  found = mesh_sweep.try_mesh(config(), DEVICES, dict(data=1, fsdp=16, tensor=1))
  # Down to a bin on each device.
  assert [bins for name, bins in compiler.built if name == 'update'] == [8, 4, 2, 1]
  assert all('oom' in one for one in found)


def test_the_fastest_is_named_with_the_flags_that_set_it(monkeypatch, tmp_path, capsys):
  compiler = Compiler(monkeypatch, fits=8)
  monkeypatch.setattr(compile_report, 'prepare', lambda: None)
  monkeypatch.setattr(compile_report, 'devices', lambda topology: DEVICES)
  rate = lambda spec, *_: sampling(1e3 * spec.layout.mesh.shape['tensor'])  # noqa: E731
  monkeypatch.setattr(compile_report, 'roofline', rate)
  path = tmp_path / 'report.json'
  assert mesh_sweep.run(config(), 'v5e-16', str(path)) == 0
  output = capsys.readouterr().out
  assert (
    f'--config.mesh.fsdp=8 --config.mesh.tensor=2 --config.learner.microbatch_tokens={8 * BIN}'
    in output
  )
  tried = json.loads(path.read_text())['tried']
  seconds = [one['step_s'] for one in tried if 'step_s' in one]
  assert len(seconds) == 2 and seconds == sorted(seconds) and len(tried) == 3
  compiler.fits = 0
  assert mesh_sweep.run(config(), 'v5e-16') == 1
  assert 'fastest' not in capsys.readouterr().out


def test_the_command_reaches_it(monkeypatch):
  given = []
  monkeypatch.setattr(mesh_sweep, 'run', lambda config, *more: given.append(more) or 0)
  assert main.main(['--mode=compile', '--sweep', '--topology=v6e-64', '--report=x.json']) == 0
  assert given == [('v6e-64', 'x.json', '')]


@pytest.mark.parametrize(
  'preset, more, count, sizes',
  [
    ('one', {}, 8, dict()),
    ('v5e-16', {}, 16, dict(fsdp=16)),
    ('v5e-16', dict(tensor=4), 16, dict(fsdp=4, tensor=4)),
    ('v5e-256', {}, 256, dict(data=4, fsdp=64)),
    ('v5e-256', dict(tensor=2), 256, dict(data=2, fsdp=64, tensor=2)),
    ('gpu-node', {}, 32, dict(data=4, fsdp=8)),
  ],
)
def test_a_preset_says_how_rows_are_shared(preset, more, count, sizes):
  c = config(prompts=256, mesh=dict(preset=preset) | more)
  devices = [sharding_report.Device(i) for i in range(count)]
  shape = compile_report.make(c, devices).layout.mesh.shape
  assert {axis: n for axis, n in shape.items() if n > 1} == sizes


@pytest.mark.parametrize(
  'mesh, words',
  [
    (dict(preset='v5e-17'), "config.mesh.preset='v5e-17' is unknown; choose one of: one, gpu-node"),
    (dict(preset='v5e-16', fsdp=4), 'does not go with config.mesh.fsdp=4'),
  ],
)
def test_a_preset_that_is_none_or_is_contradicted_is_told(mesh, words):
  with pytest.raises(UserError, match=words):
    validate.validate(config(mesh=mesh))


@pytest.mark.parametrize('name', ['v5e-16', 'v5litepod-16', 'v5e:4x4', '16'])
def test_slices_have_the_vendors_names(name):
  assert len(sharding_report.devices(name)) == 16

"""States that do not fit are refused before compilation, and programs that do not fit with settings that need less."""

from __future__ import annotations

import jax
import pytest
import tpu_specs

from jaxrl_llm import train
from jaxrl_llm.commands import compile_report, fitting_flags, sharding_report
from jaxrl_llm.config import loading as configs
from jaxrl_llm.config import schema
from jaxrl_llm.distributed import hardware
from jaxrl_llm.learner import device_memory
from jaxrl_llm.runner import memory
from jaxrl_llm.types import UserError

MESSAGE = 'RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used {}G of 15.75G hbm.'


def make(**changes):
  return tpu_specs.make(**dict(prompt_tokens=400, completion_tokens=113) | changes)


def refusal(config, spec) -> str:
  with pytest.raises(UserError) as error:
    memory.check_state(config, spec)
  return str(error.value)


def typed(text: str) -> list[str]:
  return [word.rstrip('.;') for word in text.split() if word.startswith('--config.')]


def again(config, flags, chips=16):
  """The step with the flags of a message."""
  changes = dict(flag.removeprefix('--config.').split('=') for flag in flags)
  values = {n: int(v) if v.lstrip('-').isdigit() else v for n, v in changes.items()}
  config = schema.replace(config, values)
  devices = [sharding_report.Device(i, device_kind=tpu_specs.V5E) for i in range(chips)]
  return config, compile_report.make(config, devices)


def test_a_state_that_does_not_fit_names_a_mesh_that_holds_it(monkeypatch):
  config, spec, _ = make(mesh=dict(data=16, fsdp=1))
  memory.check_state(config, spec)
  whole = device_memory.state_bytes(spec)
  monkeypatch.setitem(hardware.HBM_GIB, tpu_specs.V5E, 0.2 * whole / 2**30)
  text = refusal(config, spec)
  assert '(config.mesh: data 16), and a TPU v5 lite has' in text
  fits = again(config, typed(text))
  assert device_memory.state_bytes(fits[1]) < 0.2 * whole
  memory.check_state(*fits)


def test_a_preset_that_does_not_fit_names_a_larger_slice(monkeypatch):
  config, spec, _ = make(mesh=dict(preset='v5e-16'))
  parts = device_memory.state_bytes(spec)
  monkeypatch.setitem(hardware.HBM_GIB, tpu_specs.V5E, 0.5 * parts / 2**30)
  text = refusal(config, spec)
  assert 'no mesh of them has room, but v5e-64 has: type --topology=v5e-64' in text
  memory.check_state(*again(config, typed(text), 64))
  monkeypatch.setitem(hardware.HBM_GIB, tpu_specs.V5E, 1e-9)
  assert 'type --config.lora.rank=16' in refusal(config, spec)


def test_a_run_refuses_it_before_anything_is_compiled(monkeypatch, tmp_path):
  compiled = []
  monkeypatch.setitem(hardware.HBM_GIB, 'cpu', 1e-6)
  monkeypatch.setattr(train, '_compile', lambda context: compiled.append(context))
  with pytest.raises(UserError, match='weights and optimizer take'):
    train.run(_tiny(), str(tmp_path))
  assert not compiled and not list(tmp_path.iterdir())


def test_a_step_that_runs_out_of_memory_names_what_to_type(monkeypatch, tmp_path):
  def call(*_):
    raise jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.\nmore')

  monkeypatch.setattr(train, '_compile', lambda context: call)
  with pytest.raises(UserError) as error:
    train.run(_tiny(), str(tmp_path))
  text = str(error.value)
  assert 'Out of memory allocating 9 bytes.)' in text and 'more)' not in text
  assert 'the update needs less with --config.learner.remat=True' in text
  assert 'sampling with --config.rollout.slots=8, --config.rollout.cache_dtype=int8' in text


def _tiny():
  config = configs.default()
  with config.ignore_type():
    config.update(
      dict(
        model='scratch',
        scratch=dict(width=32, layers=1, heads=2, kv_heads=2, mlp=32, max_tokens=96),
        prompts=8, rollouts=2, prompt_tokens=80, completion_tokens=4, steps=1,
        evaluation=dict(prompts=2, samples=0), monitoring=dict(console='quiet'),
      )
    )  # fmt: skip
  return config


class Compiler:
  """Stands for libtpu: programs fit with few enough bins, slots or bytes of a key."""

  def __init__(self, monkeypatch, fits):
    self.built = []

    def build(name, spec):
      self.built.append(name)
      oom = '' if fits(name, spec) else MESSAGE.format(40)
      return compile_report.Part(0, 0, 0, 0, 2**30, 1.0, 1.0, oom, '')

    monkeypatch.setattr(fitting_flags, '_build', build)
    monkeypatch.setattr(fitting_flags.steps, 'compile_step', lambda spec: spec)
    monkeypatch.setattr(compile_report, 'build', lambda spec, *_: build('fused', spec))


def parts(**messages):
  names = ('update', 'generate', 'fused')
  return {name: dict(oom=messages.get(name, '')) for name in names}


def test_flags_that_fit_are_the_mildest_that_compile(monkeypatch):
  config, spec, devices = make(rollout=dict(slots=512))
  bins = spec.update.packing.bins
  compiler = Compiler(
    monkeypatch,
    lambda name, s: (
      (name == 'generate' or s.update.packing.bins <= bins // 4)
      and (name == 'update' or s.rollout.decode.slots <= 128)
    ),
  )
  text = fitting_flags.find(config, devices, parts(update='?', generate='?', fused='?'))
  tokens = bins // 4 * spec.update.packing.tokens
  flags = f'--config.learner.microbatch_tokens={tokens} --config.rollout.slots=128'
  assert text == f'it fits, with a peak of 1.00 GiB, if you type {flags}.'
  assert compiler.built == ['update', 'update', 'generate', 'generate', 'fused']
  # What is surely too large by the compiler's own figures is not compiled.
  compiler.built.clear()
  fitting_flags.find(config, devices, parts(update=MESSAGE.format(60), fused='?'))
  assert compiler.built[:2] == ['update', 'fused']
  assert fitting_flags.find(config, devices, parts()) == ''


def test_a_step_without_flags_that_fit(monkeypatch):
  config, spec, devices = make()
  compiler = Compiler(monkeypatch, lambda name, s: s.update.attention is not None)
  found = fitting_flags.find(config, devices, parts(update='?'))
  assert '--config.learner.attention=splash' in found
  whole = device_memory.state_bytes(spec)
  Compiler(monkeypatch, lambda name, s: device_memory.state_bytes(s) < 0.7 * whole)
  # The state alone exceeds this limit with float32 moments.
  sizes = f'Used {1.1 * whole / 2**20:.6f}M of {0.9 * whole / 2**20:.6f}M hbm.'
  found = fitting_flags.find(config, devices, parts(update=sizes))
  assert found.endswith(' --config.optimizer.moments_dtype=bfloat16.')
  compiler = Compiler(monkeypatch, lambda name, s: name == 'update')
  assert 'fits with no smaller setting' in fitting_flags.find(config, devices, parts(generate='?'))
  # Slots by halves, then rounded keys, then weights cut over tensor.
  assert len(compiler.built) == 5 + 1 + 2
  compiler = Compiler(monkeypatch, lambda name, s: name != 'fused')
  one_by_one = fitting_flags.find(config, devices, parts(fused='?'))
  assert one_by_one.endswith('type --config.mode=split.')

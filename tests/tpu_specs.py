"""The step of a small decoder on a TPU slice that is only described, for tests that read its sizes."""

from __future__ import annotations

from jaxrl_llm.commands import compile_report, sharding_report
from jaxrl_llm.config import loading as configs
from jaxrl_llm.config import validation
from jaxrl_llm.config.schema import Config
from jaxrl_llm.learner.step_spec import StepSpec

V5E = 'TPU v5 lite'
Described = tuple[Config, StepSpec, list[sharding_report.Device]]


def make(chips: int = 16, kind: str = V5E, **changes) -> Described:
  """(config, step, devices) of a decoder of 2 layers, width 128, with `changes` of the default configuration."""
  config = configs.default()
  with config.ignore_type():
    config.update(
      dict(
        model='scratch',
        scratch=dict(width=128, layers=2, heads=4, kv_heads=4, mlp=256, max_tokens=1024),
        prompts=64, rollouts=8,
      )
      | changes
    )  # fmt: skip
  devices = [sharding_report.Device(i, device_kind=kind) for i in range(chips)]
  config = validation.sized(config, devices)
  return config, compile_report.make(config, devices), devices

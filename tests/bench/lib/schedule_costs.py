"""Costs of a step for the simulated schedules, by the functions of jaxrl_llm.profiling; nothing is compiled."""

from __future__ import annotations

from typing import NamedTuple

from jaxrl_llm.commands import compile_report, sharding_report
from jaxrl_llm.config import loading as configs
from jaxrl_llm.config import validation
from jaxrl_llm.distributed import hardware, sharding
from jaxrl_llm.learner import device_memory
from jaxrl_llm.learner.step_spec import StepSpec
from jaxrl_llm.models import decode_attention, decoder
from jaxrl_llm.profiling import hlo_update, lengths, roofline
from tests.bench.lib.schedule_jobs import Costs


class Machine(NamedTuple):
  """A model on a slice, with the mesh of results/slices_update.md."""

  name: str
  kind: str
  chips: int
  model: str
  tensor: int
  groups: int  # of 8 rollouts, in a batch
  link_bytes: float  # that a chip receives in a decode iteration for one row of its shard
  mfu: float  # of the compiled update, its products and its exchanges one after the other


# Link bytes: 29.2 MB for 32 rows a shard (slices_update.md). MFU: from the same tables, 1 / (1 / best + 4 / 3) where
# exchanges take the longer time, and 26.5 of 34.5 s of a pass of which 3 / 4 are the model's operations.
MACHINES = (
  Machine('8B, v5e-256', 'TPU v5 lite', 256, 'Qwen/Qwen3-8B', 4, 256, 29.2e6 / 32, 0.20),
  Machine('8B, v6e-64', 'TPU v6 lite', 64, 'Qwen/Qwen3-8B', 4, 64, 29.2e6 / 32, 0.11),
  Machine('1.7B, v5e-16', 'TPU v5 lite', 16, 'Qwen/Qwen3-1.7B', 1, 64, 0.0, 0.58),
)
ROLLOUTS = 8


class Lengths(NamedTuple):
  """Tokens of prompts and completions; the mean is before the cut."""

  prompt: int
  cap: int
  mean: float
  sigma: float


def make_spec(machine: Machine, tokens: Lengths) -> StepSpec:
  """The step of a machine, without weights."""
  config = configs.load('dapo')
  config.update(
    dict(
      model=machine.model, prompts=machine.groups, rollouts=ROLLOUTS, prompt_tokens=tokens.prompt,
      completion_tokens=tokens.cap,
      mesh=dict(data=1, fsdp=machine.chips // machine.tensor, tensor=machine.tensor),
    )
  )  # fmt: skip
  devices = [sharding_report.Device(i, device_kind=machine.kind) for i in range(machine.chips)]
  return compile_report.make(validation.sized(config, devices), devices)


def costs(machine: Machine, tokens: Lengths, mfu: float) -> Costs:
  """Seconds as the compile reports count them; `mfu` of update, prefill and encoding, whose peak no program reaches."""
  spec = make_spec(machine, tokens)
  chip, shards = hardware.CHIPS[machine.kind], sharding.rows_shards(spec.layout.mesh)
  iteration = roofline.decode(spec, device_memory.ring_bytes(spec))
  rows = iteration.rows / shards
  column_bytes = iteration.cache_bytes / rows / tokens.cap
  survival_T = lengths.log_normal(tokens.cap, tokens.mean, tokens.sigma)
  learned = spec.layout.prompts * spec.layout.group * lengths.mean(survival_T)
  flops_s = chip.flops * mfu * machine.chips
  update_flops = hlo_update.update_flops(spec, survival_T).model
  slots = most_slots(spec)
  more = device_memory.state_bytes(spec) / (device_memory.ring_bytes(spec) / rows)
  return Costs(
    chips=machine.chips,
    shards=shards,
    slots=slots,
    sampler_slots=slots + int(more) * shards,
    weights_s=iteration.weight_bytes / chip.memory_bandwidth,
    column_s=column_bytes / chip.memory_bandwidth,
    block_tokens=block_tokens(spec),
    prompt_s=column_bytes * tokens.prompt / chip.memory_bandwidth,
    compute_s=float(iteration.flops) / rows / chip.flops,
    links_s=machine.link_bytes / chip.link_bandwidth,
    prefill_s=roofline.prefill_flops(spec) / spec.layout.prompts / flops_s,
    # A forward pass is a third of an update.
    encode_s=update_flops / 3 / learned / flops_s,
    update_s=update_flops / learned / flops_s,
    push_s=device_memory.sampling_weight_bytes(spec) / chip.link_bandwidth,
  )


def most_slots(spec: StepSpec) -> int:
  """Slots whose caches fit beside the weights, at most four for each row of a batch; more prompts leave less room."""
  decode = spec.rollout.decode._replace(slots=0)
  spec = spec._replace(rollout=spec.rollout._replace(decode=decode))
  fitting = []
  for batches in (1, 2, 4):
    layout = spec.layout._replace(prompts=batches * spec.layout.prompts)
    fitted = device_memory.with_slots_that_fit(spec._replace(layout=layout))
    fitting.append(fitted.rollout.decode.slots or layout.prompts * decode.rollouts)
  return max(fitting)


def block_tokens(spec: StepSpec) -> int:
  """Tokens that the decode kernel reads beyond those of a row, as `step_estimate.ring_share` counts them."""
  decode = spec.rollout.decode
  assert decode.attend is not None, 'attention without the kernel reads whole rings'
  heads, size = decoder.cached_sizes(spec.model.config)[0][0]
  local_heads = -(-heads // spec.layout.mesh.shape['tensor'])
  itemsize = 2  # of bfloat16
  return decode_attention.block_columns(decode.max_tokens, local_heads * size * itemsize) - 1

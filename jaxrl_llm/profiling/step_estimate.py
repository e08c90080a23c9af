"""Seconds of a step from rooflines: its decode iterations, prefill and update, serial and overlapped."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from jaxrl_llm.distributed import hardware, sharding
from jaxrl_llm.learner.step_spec import StepSpec
from jaxrl_llm.models import decode_attention, decoder
from jaxrl_llm.profiling import lengths, roofline
from jaxrl_llm.rollout import ring_decode, slot_loop
from jaxrl_llm.types import JsonObject


def estimate(
  spec: StepSpec,
  roof: JsonObject | None,
  learn: JsonObject | None,
  survival_T: np.ndarray | None = None,
) -> JsonObject | None:
  """Seconds of a step from below: `serial_s`, one resource after the other, and `overlapped_s`, the slowest alone.

  `roof`: of `compile_report.roofline`; `learn`: of `hlo_update.report`; None where either has no times. `survival_T`:
  expected lengths, as in `lengths`; default: all tokens. Prefill has no collectives here.
  """
  if not roof or not learn or 'best_s' not in learn:
    return None
  T = spec.rollout.decode.max_tokens
  survival_T = lengths.at_cap(T) if survival_T is None else survival_T
  seconds = {name: ms / 1e3 for name, ms in roof['ms_per_token'].items()}
  phases = decode_phases(spec, survival_T)
  serial_s, overlapped_s = (
    sum(n * iteration_seconds(seconds, share)[kind] for share, n in phases) for kind in (0, 1)
  )
  device = spec.layout.mesh.devices.flat[0]
  chip = hardware.CHIPS.get(device.device_kind)
  prefill_s = roofline.prefill_flops(spec) / spec.layout.mesh.size / chip.flops if chip else 0.0
  return dict(
    completion_tokens=T,
    expected_tokens=lengths.mean(survival_T),
    iterations=sum(n for _, n in phases),
    decode_serial_s=serial_s,
    decode_overlapped_s=overlapped_s,
    prefill_s=prefill_s,
    serial_s=serial_s + prefill_s + learn.get('serial_s', learn['best_s']),
    overlapped_s=overlapped_s + prefill_s + learn['best_s'],
  )


def iteration_seconds(seconds: Mapping[str, float], share: float = 1.0) -> tuple[float, float]:
  """(serial, overlapped) seconds of one decode iteration with a share of its slots.

  `seconds` of weights, cache, links, compute and dcn with all slots; all but weights shrink with the slots. Reads and
  products overlap in both, exchanges only in the second.
  """
  memory = seconds['weights'] + share * seconds['cache']
  compute = share * seconds['compute']
  exchange = share * (seconds['links'] + seconds.get('dcn', 0.0))
  return max(memory, compute) + exchange, max(memory, compute, exchange)


def ring_share(spec: StepSpec, survival_T: np.ndarray) -> float:
  """Which share of the ring a decode iteration reads, in the mean of a rollout: 1 where attention reads all of it.

  A kernel reads what each row has said so far: on GPUs those columns, else blocks of which two are partly its own. Idle
  slots are left out.
  """
  settings, layout = spec.rollout.decode, spec.layout
  if settings.attend is None:
    return 1.0
  rows = layout.prompts * settings.rollouts
  slots, said_T = settings.slots or rows, np.arange(1, len(survival_T) + 1)
  model, is_gpu = spec.model.config, layout.mesh.devices.flat[0].platform == 'gpu'
  reads, columns = 0.0, 0.0
  widths = slot_loop.ring_widths(model, settings.max_tokens)
  for sizes, width in zip(decoder.read_sizes(model), widths, strict=True):
    if not sizes:  # a recurrent layer has no columns
      continue
    heads, size = sizes[0]
    local_heads = -(-heads // sharding.rows_shards(layout.mesh, sharding.SAMPLED_FEATURES))
    column_bytes = local_heads * size * np.dtype(settings.cache_dtype).itemsize
    block = 1 if is_gpu else decode_attention.block_columns(width, column_bytes)
    reads += rows * float((survival_T * np.minimum(said_T + block - 1, width)).sum())
    columns += slots * width
  iterations = sum(share * n for share, n in decode_phases(spec, survival_T))
  return float(min(reads / (columns * iterations), 1.0))


def decode_phases(spec: StepSpec, survival_T: np.ndarray) -> list[tuple[float, float]]:
  """(share of the slots, expected decode iterations) of the loops of a rollout, without stop rules or drafts.

  While rows wait, all slots are busy. The last rows begin together, and their loop goes on, where the settings say so,
  with half and then a quarter of the slots once these suffice, until the longest row ends.
  """
  settings, layout = spec.rollout.decode, spec.layout
  rows = layout.prompts * settings.rollouts
  slots = settings.slots or rows
  queued = (rows / slots - 1) * lengths.mean(survival_T)
  longest = lengths.longest(survival_T, slots)
  local = slots // sharding.rows_shards(layout.mesh)
  fewer = ring_decode.fewer_slots(settings, layout.prompt_tokens, local)
  shares = [1.0, *(count / local for count in fewer if not spec.rollout.carried_calls)]
  # Iterations after which at most the next share of the slots is busy.
  ends = [min(float((survival_T > share).sum()), longest) for share in shares[1:]] + [longest]
  counts = np.diff([0.0, *ends])
  return [(share, n + queued * (share == 1.0)) for share, n in zip(shares, counts, strict=True)]

"""Rooflines of update, prefill and decoding from a chip's peak arithmetic and memory bandwidth, without links."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxrl_llm.distributed import hardware, sharding
from jaxrl_llm.learner import device_memory
from jaxrl_llm.learner.step_spec import StepSpec
from jaxrl_llm.models import decoder
from jaxrl_llm.profiling import hlo_update
from jaxrl_llm.rollout import slot_loop
from jaxrl_llm.types import JsonObject


class DecodeIteration(NamedTuple):
  """One iteration of the decode loop on one device: one token for each of its rows."""

  rows: int  # on all devices
  weight_bytes: float  # in the sampler's dtype and the layout for decoding
  cache_bytes: float  # the full ring, as often as layers read it
  prompt_cache_bytes: float
  flops: float


def decode(spec: StepSpec, cache_bytes: float) -> DecodeIteration:
  """Memory reads and operations of one decode iteration, with a ring of `cache_bytes` on a device."""
  model, settings, layout = spec.model.config, spec.rollout.decode, spec.layout
  rows = settings.slots or layout.prompts * settings.rollouts
  # An iteration reads only a few rows of an embedding that is not the head, too.
  unread = ('layer_embed',) if model.tied else ('layer_embed', 'embed')
  weight_bytes = device_memory.sampling_weight_bytes(spec, unread)
  weights = hlo_update.weights_per_token(model) + model.vocab * model.width
  parts = sharding.rows_shards(layout.mesh, sharding.SAMPLED_FEATURES)
  used = weights / parts
  # If all rows of a prompt have slots, its cache is read once; otherwise once for each slot.
  prompts = layout.prompts if rows == layout.prompts * settings.rollouts else rows
  # A column has the same size in the ring and in a prompt's cache, where sliding layers keep all columns. Some layers
  # read the cache of another.
  cached_N, read_N = (
    [sum(K * d for K, d in sizes) for sizes in sizes_N]
    for sizes_N in (decoder.cached_sizes(model), decoder.read_sizes(model))
  )
  width_N = slot_loop.ring_widths(model, settings.max_tokens)
  ring = rows * np.dot(cached_N, width_N)
  prompt_cache_bytes = cache_bytes * layout.prompt_tokens * sum(read_N) * prompts / ring
  cache_bytes *= np.dot(read_N, width_N) / np.dot(cached_N, width_N)
  # A token attends to its prompt and to half of the longest completion, on average.
  positions = layout.prompt_tokens + np.arange(settings.max_tokens)
  keys = hlo_update.attended_keys(model, positions).mean() / parts
  attention = hlo_update.attention_flops(model, cached=True) * keys
  flops = (2 * used + attention) * (rows // sharding.rows_shards(layout.mesh))
  return DecodeIteration(rows, weight_bytes, cache_bytes, prompt_cache_bytes, flops)


def prefill_flops(spec: StepSpec) -> float:
  """Operations of encoding every prompt of a step once, and what they have in common once for each shard of rows."""
  model, layout = spec.model.config, spec.layout
  shared = layout.prefix_tokens
  own = np.arange(shared, layout.prompt_tokens)
  shards = sharding.rows_shards(layout.mesh)
  tokens = layout.prompts * len(own) + shards * shared
  attended = layout.prompts * hlo_update.attended_keys(model, own).sum()
  attended += shards * hlo_update.attended_keys(model, np.arange(shared)).sum()
  weights = 2 * hlo_update.weights_per_token(model) * tokens
  return weights + hlo_update.attention_flops(model) * float(attended)


def report(spec: StepSpec) -> JsonObject:
  """Operations and bytes of one step on one device, as JSON, with minimum times for known chips.

  update: operations ÷ peak. round, one decode iteration: max((weights + caches) ÷ bandwidth, operations ÷ peak).
  prefill: operations ÷ peak. Empty rows count, because they are computed.
  """
  device, size = spec.layout.mesh.devices.flat[0], spec.layout.mesh.size
  chip, update = hardware.CHIPS.get(device.device_kind), hlo_update.update_flops(spec)
  iteration = decode(spec, device_memory.ring_bytes(spec))
  read_bytes = iteration.weight_bytes + iteration.cache_bytes + iteration.prompt_cache_bytes
  prefill = prefill_flops(spec) / size
  result = dict(
    device_kind=device.device_kind,
    devices=size,
    chip=None if chip is None else chip._asdict(),
    update=dict(flops=update.executed / size, model_flops=update.model / size),
    round=dict(flops=iteration.flops, bytes=read_bytes, rows=iteration.rows),
    prefill=dict(flops=prefill),
  )
  if chip is not None:
    result['update']['seconds'] = update.executed / size / chip.flops
    result['round']['seconds'] = max(
      read_bytes / chip.memory_bandwidth, iteration.flops / chip.flops
    )
    result['prefill']['seconds'] = prefill / chip.flops
  return result

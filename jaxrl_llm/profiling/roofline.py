"""What the two halves of a step take at best on devices whose figures are known: arithmetic and memory, no links."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm.distributed import hardware, sharding
from jaxrl_llm.learner import state as train_state
from jaxrl_llm.learner.step_spec import StepSpec
from jaxrl_llm.models import quantized
from jaxrl_llm.profiling import hlo_update
from jaxrl_llm.rollout import carried_kv, slot_loop


class DecodeIteration(NamedTuple):
  """One iteration of the decode loop on one device: a token for each of its rows."""

  rows: int  # on all devices
  weight_bytes: float  # as stored and laid out for decoding
  cache_bytes: float  # the whole ring
  prompt_cache_bytes: float
  flops: float


def decode(spec: StepSpec, cache_bytes: float) -> DecodeIteration:
  """What one iteration reads and multiplies, with a ring of `cache_bytes` on a device."""
  decode_settings, shards = spec.rollout.decode, sharding.rows_shards(spec.layout.mesh)
  rows = decode_settings.slots or spec.layout.prompts * decode_settings.rollouts
  params = train_state.abstract_sampling_weights(spec)
  if not spec.model.config.tied:
    params.pop('embed')  # a few rows of it
  read = functools.partial(
    quantized.quantize_params, kernels=spec.model.weights_dtype, others=decode_settings.dtype
  )
  weights = bytes_per_device(_placed(jax.eval_shape(read, params), spec))
  model = spec.model.config
  used = (hlo_update.weights_per_token(model) + model.vocab * model.width) / spec.layout.mesh.shape[
    'tensor'
  ]
  # Of a prompt whose rows all have slots one copy is read, else one for each slot.
  prompts = spec.layout.prompts if rows == spec.layout.prompts * decode_settings.rollouts else rows
  # A column of a row is as large in the ring as in a prompt, of which sliding layers keep all.
  columns = rows * sum(slot_loop.ring_widths(model, decode_settings.max_tokens))
  shared = cache_bytes * spec.layout.prompt_tokens * model.layers * prompts / columns
  return DecodeIteration(rows, weights, cache_bytes, shared, 2 * used * (rows // shards))


def ring_bytes(spec: StepSpec) -> float:
  """Keys and values of all slots' rows on one device."""
  decode_settings = spec.rollout.decode
  held = jax.eval_shape(
    lambda: carried_kv.empty(spec.model.config, decode_settings, spec.layout.prompts).cache
  )
  laid = sharding.cache_layout(held, spec.layout.mesh)
  whole = bytes_per_device(_with(held, laid))
  rows = spec.layout.prompts * decode_settings.rollouts
  return whole * (decode_settings.slots or rows) / rows


def report(spec: StepSpec) -> dict[str, Any]:
  """Of one step on one device, ready for JSON: operations, bytes, and seconds at best where the chip is known.

  update: operations ÷ peak. round, an iteration of the decode loop: max((weights + caches) ÷ bandwidth, operations ÷
  peak). prefill: operations ÷ peak. Empty rows count, as they are computed.
  """
  device, size = spec.layout.mesh.devices.flat[0], spec.layout.mesh.size
  chip, work = hardware.CHIPS.get(device.device_kind), hlo_update.update_flops(spec)
  each = decode(spec, ring_bytes(spec))
  read = each.weight_bytes + each.cache_bytes + each.prompt_cache_bytes
  tokens = spec.layout.prompts * spec.layout.prompt_tokens
  prefill = 2 * hlo_update.weights_per_token(spec.model.config) * tokens / size
  found = dict(
    device_kind=device.device_kind,
    devices=size,
    chip=None if chip is None else chip._asdict(),
    update=dict(flops=work.done / size, model_flops=work.model / size),
    round=dict(flops=each.flops, bytes=read, rows=each.rows),
    prefill=dict(flops=prefill),
  )
  if chip is not None:
    found['update']['seconds'] = work.done / size / chip.flops
    found['round']['seconds'] = max(read / chip.memory_bandwidth, each.flops / chip.flops)
    found['prefill']['seconds'] = prefill / chip.flops
  return found


def bytes_per_device(tree: Any) -> int:
  """Bytes of a tree of ShapeDtypeStructs with shardings, on each device."""
  return sum(
    int(np.prod(x.sharding.shard_shape(x.shape), dtype=np.int64)) * x.dtype.itemsize
    for x in jax.tree.leaves(tree)
  )


def _placed(params: Any, spec: StepSpec) -> Any:
  return _with(params, sharding.decode_layout(params, spec.layout.mesh, spec.layout.rules))


def _with(shapes: Any, shardings: Any) -> Any:
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
  )

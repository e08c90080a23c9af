"""Bytes that a step keeps on each device, and how many slots their memory has room for."""

from __future__ import annotations

import functools

import jax
import numpy as np

from jaxrl_llm.distributed import hardware, sharding
from jaxrl_llm.learner import state as train_state
from jaxrl_llm.learner.step_spec import StepSpec
from jaxrl_llm.models import linear
from jaxrl_llm.rollout import slot_loop
from jaxrl_llm.types import Params

# Of the memory, for what stays while rows decode. The rest is for logits, activations and the program.
_SHARE = 0.85
_ALIGNED = 8  # slots of a device: a TPU computes that many rows in the time of one


def tree_bytes(tree: Params) -> int:
  """Bytes on each device of a tree of ShapeDtypeStructs with shardings."""
  return sum(
    int(np.prod(x.sharding.shard_shape(x.shape), dtype=np.int64)) * x.dtype.itemsize
    for x in jax.tree.leaves(tree)
  )


def state_bytes(spec: StepSpec) -> int:
  """Bytes of weights, optimizer and the rest of the train state."""
  return tree_bytes(train_state.abstract_state(spec))


def sampling_weight_bytes(spec: StepSpec, without: tuple[str, ...] = ()) -> int:
  """Bytes of the weights in the sampler's dtype and the layout for decoding, but those of the parts `without`."""
  params = train_state.abstract_sampling_weights(spec)
  params = {name: part for name, part in params.items() if name not in without}
  quantize = functools.partial(
    linear.for_decoding, kernels=spec.model.weights_dtype, others=spec.rollout.decode.dtype
  )
  quantized = jax.eval_shape(quantize, params)
  layout = spec.layout
  return tree_bytes(
    _with_shardings(quantized, sharding.decode_layout(quantized, layout.mesh, layout.rules))
  )


def ring_bytes(spec: StepSpec) -> float:
  """Bytes of the keys and values of all slots."""
  decode, rows = spec.rollout.decode, spec.layout.prompts * spec.rollout.decode.rollouts
  widths = slot_loop.ring_widths(spec.model.config, decode.max_tokens)
  return _cache_bytes(spec, rows, widths) * (decode.slots or rows) / rows


def prompt_cache_bytes(spec: StepSpec) -> float:
  """Bytes of the keys and values of all prompts, each once."""
  widths = [spec.layout.prompt_tokens] * spec.model.config.layers
  return _cache_bytes(spec, spec.layout.prompts, widths)


def _cache_bytes(spec: StepSpec, rows: int, width_N: list[int]) -> int:
  make = functools.partial(
    slot_loop.empty_cache, spec.model.config, rows, width_N, spec.rollout.decode.cache_dtype
  )
  cache = jax.eval_shape(make)
  return tree_bytes(_with_shardings(cache, sharding.cache_layout(cache, spec.layout.mesh)))


def with_slots_that_fit(spec: StepSpec) -> StepSpec:
  """The step with fewer slots than rows, where `slots` is 0 and caches of all rows do not fit beside the weights.

  On devices of unknown memory, such as CPUs, and where every row needs a slot, the step stays as it is.
  """
  rollout, layout = spec.rollout, spec.layout
  limit = hardware.memory_bytes(layout.mesh.devices.flat[0])
  needs_all = rollout.tree is not None or rollout.pruning is not None or rollout.carried_calls
  if limit is None or rollout.decode.slots or needs_all:
    return spec
  shards = sharding.rows_shards(layout.mesh)
  rows = layout.prompts * rollout.decode.rollouts // shards
  prompts = prompt_cache_bytes(spec)
  free = _SHARE * limit - state_bytes(spec) - sampling_weight_bytes(spec) - prompts
  row = ring_bytes(spec) / rows
  if rows * row <= free:
    return spec
  # With fewer slots than rows, XLA's attention reads a copy of its prompt's keys for each slot.
  copy = 0 if rollout.decode.attend else prompts * shards / layout.prompts
  slots = max(int(free / (row + copy)), 1)
  slots -= slots % _ALIGNED if slots > _ALIGNED else 0
  decode = rollout.decode._replace(slots=min(slots, rows) * shards)
  return spec._replace(rollout=rollout._replace(decode=decode))


def _with_shardings(shapes: Params, shardings: Params) -> Params:
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
  )

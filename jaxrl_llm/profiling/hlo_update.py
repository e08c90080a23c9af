"""Collectives of a compiled update per mesh axis, its floating-point operations, and a lower bound of its time."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

import jax
import numpy as np

from jaxrl_llm.distributed import hardware, sharding
from jaxrl_llm.learner.step_spec import StepSpec, full_bins
from jaxrl_llm.models import decoder
from jaxrl_llm.profiling import hlo, hlo_decode
from jaxrl_llm.types import JsonObject, ModelConfig


class UpdateFlops(NamedTuple):
  """Floating-point operations of one update, on all devices together."""

  model: float  # forward and backward passes
  executed: float  # with the recomputation of activations


def collective_bytes(text: str, sizes: Mapping[str, int], data_trips: int = 1) -> dict[str, float]:
  """Bytes that a device receives in one run of a program, by the mesh axes of the groups ('fsdp', 'fsdp·tensor').

  `sizes`: those of the mesh, in its order. The body of a loop counts once per iteration, and `data_trips` times where
  their number depends on data.
  """
  bytes_by_axes: dict[str, float] = {}
  for collective in hlo_decode.all_collectives(text, data_trips):
    axes = mesh_axes(collective.attributes, sizes)
    bytes_by_axes[axes] = bytes_by_axes.get(axes, 0.0) + collective.wire_bytes * collective.times
  return dict(sorted(bytes_by_axes.items(), key=lambda pair: -pair[1]))


def mesh_axes(attributes: str, sizes: Mapping[str, int]) -> str:
  """The mesh axes along which the devices of a collective differ, from its replica groups or pairs."""
  groups = hlo.replica_groups(attributes, math.prod(sizes.values()))
  positions = np.stack(
    np.unravel_index(groups, tuple(sizes.values())), -1
  )  # [groups, members, axes]
  differs = (positions != positions[:, :1]).any((0, 1))
  return '·'.join(axis for axis, moves in zip(sizes, differs, strict=True) if moves)


def update_flops(spec: StepSpec) -> UpdateFlops:
  """Operations of one update: 2 per weight and token, and 4·H·d per key that a token attends to.

  Backward counts twice forward; `executed` counts forward twice if activations are recomputed. The head counts
  completion tokens only. arXiv:2001.08361 (2 N per token), arXiv:2205.05198 (attention).
  """
  model, L, T = spec.model.config, spec.layout.prompt_tokens, spec.rollout.decode.max_tokens
  P, B = spec.layout.prompts, spec.layout.prompts * spec.layout.group
  attended_keys = P * L * (L / 2) + B * T * (L + T / 2)
  forward = 2 * weights_per_token(model) * (P * L + B * T) + 2 * model.vocab * model.width * B * T
  forward += 4 * model.layers * model.heads * model.head_dim * attended_keys
  return UpdateFlops(3 * forward, (4 if spec.update.remat else 3) * forward)


def weights_per_token(model: ModelConfig) -> float:
  """The number of weights of all layers that one token is multiplied with; of experts, the active ones."""
  layers = decoder.abstract_params(model)['layers']
  leaves = jax.tree_util.tree_leaves_with_path(layers)
  sizes = {sharding.path_name(path): math.prod(x.shape) for path, x in leaves if len(x.shape) > 1}
  active = model.experts_per_token / model.experts if model.experts else 1.0
  is_expert = re.compile(r'experts/(gate|up|down)/')
  return sum(size * (active if is_expert.search(name) else 1.0) for name, size in sizes.items())


def report(spec: StepSpec, text: str, chip: hardware.Chip | None) -> JsonObject:
  """Collectives by mesh axis, and a lower bound of an update's time: the longer of computation and communication.

  Without `chip` there are no times. One link in one direction carries the traffic of one axis; the times of axes add
  up. All rows are taken to be learned and to have all their tokens.
  """
  mesh = spec.layout.mesh
  microbatches = -(-full_bins(spec) // spec.update.packing.bins)
  wire_bytes, flops = collective_bytes(text, mesh.shape, microbatches), update_flops(spec)
  result: JsonObject = dict(
    wire_bytes=wire_bytes, model_flops=flops.model, done_flops=flops.executed
  )
  if chip is None:
    return result
  compute_s = flops.executed / mesh.size / chip.flops
  links_s = sum(wire_bytes.values()) / chip.link_bandwidth
  best_s = max(compute_s, links_s)
  mfu = flops.model / mesh.size / chip.flops / best_s
  return result | dict(compute_s=compute_s, links_s=links_s, best_s=best_s, mfu=mfu)


def report_lines(result: JsonObject) -> list[str]:
  """The result of `report` as lines of text."""
  traffic = ', '.join(f'{axes} {size / 1e9:.3f}' for axes, size in result['wire_bytes'].items())
  first = (
    f'update: {result["model_flops"]:.3g} operations; over links, GB a device: {traffic or "none"}'
  )
  if 'best_s' not in result:
    return ['', first]
  return [
    '',
    first,
    f'at best {result["best_s"]:.2f} s, {100 * result["mfu"]:.0f} % of peak (computation {result["compute_s"]:.2f} s '
    f'with recomputed activations, links {result["links_s"]:.2f} s in parallel)',
  ]

"""Collectives of a compiled update per mesh axis, its floating-point operations, and a lower bound of its time."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import jax
import numpy as np

from jaxrl_llm.distributed import hardware, sharding
from jaxrl_llm.learner.step_spec import StepSpec, full_bins, prompt_copies
from jaxrl_llm.models import decoder, token_exchange
from jaxrl_llm.profiling import hlo, hlo_decode, lengths
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
  return _bytes_by_axes(hlo_decode.all_collectives(text, data_trips), sizes)


def _bytes_by_axes(
  collectives: Iterable[hlo_decode.Collective], sizes: Mapping[str, int]
) -> dict[str, float]:
  """Bytes over the links of a slice, by axes. Rounds for tokens that chose experts unevenly do not count."""
  bytes_by_axes: dict[str, float] = {}
  for c in collectives:
    if token_exchange.LATER_ROUNDS in c.source:
      continue
    link_bytes = (c.wire_bytes - c.dcn_bytes) * c.times
    if link_bytes or not c.dcn_bytes:
      axes = mesh_axes(c.attributes, sizes)
      bytes_by_axes[axes] = bytes_by_axes.get(axes, 0.0) + link_bytes
  return dict(sorted(bytes_by_axes.items(), key=lambda pair: -pair[1]))


def mesh_axes(attributes: str, sizes: Mapping[str, int]) -> str:
  """The mesh axes along which the devices of a collective differ, from its replica groups or pairs."""
  groups = hlo.replica_groups(attributes, math.prod(sizes.values()))
  positions = np.stack(
    np.unravel_index(groups, tuple(sizes.values())), -1
  )  # [groups, members, axes]
  differs = (positions != positions[:, :1]).any((0, 1))
  return '·'.join(axis for axis, moves in zip(sizes, differs, strict=True) if moves)


def update_flops(spec: StepSpec, survival_T: np.ndarray | None = None) -> UpdateFlops:
  """Operations of one update: 2 per weight and token, and `attention_flops` per key that a token attends to.

  Backward counts twice forward; `executed` counts forward twice if activations are recomputed. The head counts
  completion tokens only. A prompt counts once for each copy in a bin, and everything once for each pass over the
  batch. `survival_T` as in `lengths`; default: every completion has all its tokens. Attention counts the keys up to
  a token, which is half of the square, and no more than a window. arXiv:2001.08361 (2 N per token), arXiv:2205.05198.
  """
  model, L, T = spec.model.config, spec.layout.prompt_tokens, spec.rollout.decode.max_tokens
  survival_T = lengths.at_cap(T) if survival_T is None else survival_T
  tokens = lengths.mean(survival_T)
  B = spec.layout.slots * spec.layout.group
  prompts = spec.layout.slots * prompt_copies(spec, tokens)
  attended = prompts * attended_keys(model, np.arange(L)).sum()
  attended += B * (survival_T * attended_keys(model, L + np.arange(T))).sum()
  forward = 2 * weights_per_token(model) * (prompts * L + B * tokens)
  forward += 2 * model.vocab * model.width * B * tokens + attention_flops(model) * attended
  forward *= spec.update.passes
  return UpdateFlops(3 * forward, (4 if spec.update.remat else 3) * forward)


def attended_keys(model: ModelConfig, position: np.ndarray) -> np.ndarray:
  """Keys that tokens at these positions attend to, of all layers together; their own counts half.

  Where layers that do not slide have wider heads, their keys count as more.
  """
  sliding = sum(model.slides)
  keys = position + 0.5
  window = np.minimum(keys, model.window) if sliding else keys
  attending = model.layers - sliding - sum(model.recurrent_layers)
  wider = model.of_layers(slides=False).head_dim / model.head_dim
  return attending * wider * keys + sliding * window


def attention_flops(model: ModelConfig, cached: bool = False) -> int:
  """Operations of one query of each head with one key and value, which may be `cached` ones of a decode loop."""
  if not model.latent:
    return 4 * model.heads * model.head_dim
  if cached:
    return 2 * model.heads * (2 * model.latent + model.rotary_dim)
  return 2 * model.heads * (model.head_dim + model.value_dim)


def weights_per_token(model: ModelConfig) -> float:
  """The number of weights of all layers that one token is multiplied with; of experts, the active ones."""
  params = decoder.abstract_params(model)
  parts = [params[name] for name in ('layers', 'layer_proj') if name in params]
  leaves = jax.tree_util.tree_leaves_with_path(parts)
  sizes = {sharding.path_name(path): math.prod(x.shape) for path, x in leaves if len(x.shape) > 1}
  active = model.experts_per_token / model.experts if model.experts else 1.0
  is_expert = re.compile(r'experts/(gate|up|down)/')
  return sum(size * (active if is_expert.search(name) else 1.0) for name, size in sizes.items())


def report(
  spec: StepSpec, text: str, chip: hardware.Chip | None, survival_T: np.ndarray | None = None
) -> JsonObject:
  """Collectives by mesh axis, and two estimates of an update's time from below.

  `best_s`: computation and communication overlap fully, the longer counts; `serial_s`: one after the other. Without
  `chip` there are no times. One link in one direction carries the traffic of one axis; the times of axes add up, and
  so does the network between slices (DCN). All rows are taken to be learned. `survival_T`: see `update_flops`.
  """
  mesh = spec.layout.mesh
  microbatches = microbatches_of(spec, survival_T)
  collectives = hlo_decode.all_collectives(text, microbatches, slice_size(spec))
  sizes = dict(mesh.shape)
  if hlo_decode.device_count(text) < mesh.size:  # the program of one slice
    sizes['data'] //= spec.layout.slices
  wire_bytes, flops = _bytes_by_axes(collectives, sizes), update_flops(spec, survival_T)
  dcn_bytes = sum(c.dcn_bytes * c.times for c in collectives)
  result: JsonObject = dict(
    wire_bytes=wire_bytes,
    dcn_bytes=dcn_bytes,
    microbatches=microbatches,
    model_flops=flops.model,
    done_flops=flops.executed,
  )
  if chip is None:
    return result
  compute_s = flops.executed / mesh.size / chip.flops
  links_s = sum(wire_bytes.values()) / chip.link_bandwidth
  dcn_s = hardware.dcn_seconds(mesh.devices.flat[0].device_kind, dcn_bytes)
  exchange_s = links_s + (dcn_s or 0.0)
  best_s = max(compute_s, exchange_s)
  mfu = flops.model / mesh.size / chip.flops / best_s
  return result | dict(
    compute_s=compute_s,
    links_s=links_s,
    dcn_s=dcn_s,
    best_s=best_s,
    serial_s=compute_s + exchange_s,
    mfu=mfu,
  )


def slice_size(spec: StepSpec) -> int:
  """Devices of a slice; 0 where there is one slice."""
  return spec.layout.mesh.size // spec.layout.slices if spec.layout.slices > 1 else 0


def microbatches_of(spec: StepSpec, survival_T: np.ndarray | None = None) -> int:
  """Microbatches of a minibatch, if all rows are learned: with all their tokens, or their expected ones."""
  share = 1.0
  if survival_T is not None:
    tokens, L, group = lengths.mean(survival_T), spec.layout.prompt_tokens, spec.layout.group
    at_cap = spec.rollout.decode.max_tokens
    expected = prompt_copies(spec, tokens) * L + group * tokens
    share = expected / (prompt_copies(spec, at_cap) * L + group * at_cap)
  return max(1, math.ceil(share * full_bins(spec) / spec.update.packing.bins - 1e-9))


def report_lines(result: JsonObject) -> list[str]:
  """The result of `report` as lines of text."""
  traffic = ', '.join(f'{axes} {size / 1e9:.3f}' for axes, size in result['wire_bytes'].items())
  dcn = f'; between slices (DCN) {result["dcn_bytes"] / 1e9:.3f}' if result['dcn_bytes'] else ''
  first = f'update: {result["model_flops"]:.3g} operations; over links, GB a device: {traffic or "none"}{dcn}'
  if 'best_s' not in result:
    return ['', first]
  dcn = f', DCN {result["dcn_s"]:.2f} s' if result['dcn_s'] else ''
  return [
    '',
    first,
    f'at best {result["best_s"]:.2f} s, {100 * result["mfu"]:.0f} % of peak, if communication is hidden; one after the '
    f'other {result["serial_s"]:.2f} s (computation {result["compute_s"]:.2f} s with recomputed activations, links '
    f'{result["links_s"]:.2f} s{dcn})',
  ]

"""What a compiled update exchanges along each axis of the mesh, and how long it takes at best."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm.distributed import sharding
from jaxrl_llm.learner.step_spec import StepSpec
from jaxrl_llm.models import decoder
from jaxrl_llm.profiling import hlo, hlo_decode
from jaxrl_llm.types import ModelConfig


class UpdateFlops(NamedTuple):
  """Of one update on all devices together, in floating-point operations."""

  model: float  # forward and backward: what the method asks for
  done: float  # with what is computed a second time instead of kept


def collective_bytes(text: str, sizes: Mapping[str, int]) -> dict[str, float]:
  """Bytes that a device receives in one run of the program, by the axes that they go along ('fsdp', 'fsdp·tensor').

  `sizes` are those of the mesh, in its order. A loop counts as often as it runs.
  """
  found: dict[str, float] = {}
  for exchange in hlo_decode.all_collectives(text):
    axes = mesh_axes(exchange.attributes, sizes)
    found[axes] = found.get(axes, 0.0) + exchange.wire_bytes * exchange.times
  return dict(sorted(found.items(), key=lambda pair: -pair[1]))


def mesh_axes(attributes: str, sizes: Mapping[str, int]) -> str:
  """The axes of a mesh along which the devices of an exchange differ: of its replica groups, or its pairs."""
  groups = hlo.replica_groups(attributes, math.prod(sizes.values()))
  places = np.stack(np.unravel_index(groups, tuple(sizes.values())), -1)  # [groups, members, axes]
  differ = (places != places[:, :1]).any((0, 1))
  return '·'.join(axis for axis, moves in zip(sizes, differ, strict=True) if moves)


def update_flops(spec: StepSpec) -> UpdateFlops:
  """Operations of one update: 2 for each weight that a token goes through, and 4·H·d for each key that it looks at.

  Backward is twice forward; where activations are computed again, forward counts twice in what is done. The head of
  prompts but for their last token is left out. Source: arXiv:2001.08361 (2 N a token), arXiv:2205.05198 (attention).
  """
  model, L, T = spec.model.config, spec.layout.prompt_tokens, spec.rollout.decode.max_tokens
  P, B = spec.layout.prompts, spec.layout.prompts * spec.layout.group
  looks = P * L * (L / 2) + B * T * (L + T / 2)
  forward = 2 * weights_per_token(model) * (P * L + B * T) + 2 * model.vocab * model.width * B * T
  forward += 4 * model.layers * model.heads * model.head_dim * looks
  return UpdateFlops(3 * forward, (4 if spec.update.remat else 3) * forward)


def weights_per_token(model: ModelConfig) -> float:
  """Weights of all layers that one token is multiplied with: of experts, the ones that it chooses."""
  layers = decoder.abstract_params(model)['layers']
  leaves = jax.tree_util.tree_leaves_with_path(layers)
  each = {sharding.path_name(path): math.prod(x.shape) for path, x in leaves if len(x.shape) > 1}
  used = model.experts_per_token / model.experts if model.experts else 1.0
  mixed = re.compile(r'experts/(gate|up|down)/')
  return sum(size * (used if mixed.search(name) else 1.0) for name, size in each.items())


def report(spec: StepSpec, text: str, chip: Any) -> dict[str, Any]:
  """Exchanges by axis, and the time of an update at best: as long as the longer of computing and exchanging.

  `chip` has flops and link_bandwidth, or is None where they are not known. One link in one direction carries what
  goes along one axis; axes are taken one after the other.
  """
  wire, told = collective_bytes(text, spec.layout.mesh.shape), update_flops(spec)
  found: dict[str, Any] = dict(wire_bytes=wire, model_flops=told.model, done_flops=told.done)
  if chip is None:
    return found
  compute_s = told.done / spec.layout.mesh.size / chip.flops
  links_s = sum(wire.values()) / chip.link_bandwidth
  best_s = max(compute_s, links_s)
  mfu = told.model / spec.layout.mesh.size / chip.flops / best_s
  return found | dict(compute_s=compute_s, links_s=links_s, best_s=best_s, mfu=mfu)


def report_lines(found: dict[str, Any]) -> list[str]:
  """As text."""
  told = ', '.join(f'{axes} {size / 1e9:.3f}' for axes, size in found['wire_bytes'].items())
  first = (
    f'update: {found["model_flops"]:.3g} operations; over links, GB a device: {told or "none"}'
  )
  if 'best_s' not in found:
    return ['', first]
  return [
    '',
    first,
    f'at best {found["best_s"]:.2f} s, {100 * found["mfu"]:.0f} % of peak (computing {found["compute_s"]:.2f} s '
    f'with what is computed again, links {found["links_s"]:.2f} s beside it)',
  ]

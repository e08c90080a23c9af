"""The compiled programs of turns that are batched as they come; see `rollout.turn_decode`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax

from jaxrl_llm.distributed import hardware, sharding
from jaxrl_llm.learner.generate import decode_weights
from jaxrl_llm.learner.step_spec import StepSpec
from jaxrl_llm.rollout import turn_decode
from jaxrl_llm.rollout.decode_records import DecodeInputs


class TurnPrograms(NamedTuple):
  """Programs of one device, compiled when first called."""

  weights: Callable  # state → the weights as decoding reads them
  begin: Callable  # (weights, seed, version, prompts, rollout, cap) → (rollout, TurnCache)
  # (weights, seed, version, prompts, rollout, cap, TurnCache, row_S, CallLimits) → (rollout, TurnCache, CallCounts)
  advance: Callable


def compile_turns(spec: StepSpec) -> TurnPrograms:
  """The programs of `spec`; `advance` donates the cache."""
  model, settings = spec.model.config, spec.rollout.decode
  options = hardware.compiler_options(spec.layout.mesh.devices.flat[0])
  compiled = functools.partial(jax.jit, compiler_options=options)

  def inputs(params, seed, version, prompts, rollout, cap) -> DecodeInputs:
    return DecodeInputs(params, prompts, jax.random.key(seed), version, continued=rollout, cap=cap)

  @sharding.on_mesh
  def begin(_, *arrays):
    return turn_decode.begin(model, settings, inputs(*arrays))

  @sharding.on_mesh
  def advance(_, *arrays):
    *arrays, cache, row_S, limits = arrays
    return turn_decode.advance(model, settings, inputs(*arrays), cache, row_S, limits)

  return TurnPrograms(
    compiled(functools.partial(sharding.on_mesh(decode_weights), spec)),
    compiled(functools.partial(begin, spec)),
    compiled(functools.partial(advance, spec), donate_argnums=6),
  )

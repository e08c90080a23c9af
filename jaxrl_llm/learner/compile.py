"""The step and its halves as compiled programs: shardings of arguments and results, and what is donated."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax

from jaxrl_llm.distributed import hardware, sharding
from jaxrl_llm.learner.generate import encode_prompts, generate, predict_success
from jaxrl_llm.learner.hint_reliance import hint_reliance
from jaxrl_llm.learner.state import abstract_sampling_weights, abstract_state, sampling_state
from jaxrl_llm.learner.step_spec import StepSpec
from jaxrl_llm.learner.update import update


def compile_fused(spec: StepSpec, step: Callable) -> Callable:
  """One program of (state, batch, prompts, begun, draft, cap); state and batch are donated."""
  state = _state_shardings(spec)
  rows, everywhere = _shardings(spec)
  arguments = (state, rows, rows, rows, rows, everywhere)
  return _compiled(spec, step, arguments, (state, rows, everywhere), donated=(0, 1))


def compile_split(spec: StepSpec) -> Callable:
  """A function like `compile_fused` that calls two programs: they compile faster, but do not overlap."""
  learn, sample = compile_update(spec), compile_sample(spec)

  def call(state, batch, *sampling_arguments):
    state, metrics = learn(state, batch)
    rollout, counts, carried = sample(
      state._replace(carried=()), state.carried, *sampling_arguments
    )
    return state._replace(carried=carried), rollout, metrics | counts

  return call


def compile_update(spec: StepSpec) -> Callable:
  """The update: (state, batch), both donated → (state, metrics)."""
  state = _state_shardings(spec)
  rows, everywhere = _shardings(spec)
  run = functools.partial(update, spec)
  return _compiled(spec, run, (state, rows), (state, everywhere), donated=(0, 1))


def compile_sample(spec: StepSpec) -> Callable:
  """Sampling: (state without `carried`, carried, prompts, begun, draft, cap) → (rollout, metrics, carried).

  The argument `carried` is donated.
  """
  state = _state_shardings(spec)
  rows, everywhere = _shardings(spec)

  def sample(state, carried, *sampling_arguments):
    return generate(spec, state._replace(carried=carried), *sampling_arguments)

  arguments = (state._replace(carried=()), state.carried, rows, rows, rows, everywhere)
  return _compiled(spec, sample, arguments, (rows, everywhere, state.carried), donated=(1,))


def compile_encode(spec: StepSpec) -> Callable:
  """`encode_prompts`: (state without `carried`, prompts, answers or None) → [P, D] or [P, D + 1]."""
  rows, _ = _shardings(spec)
  state = _state_shardings(spec)._replace(carried=())
  return _compiled(spec, functools.partial(encode_prompts, spec), (state, rows, rows), rows)


def compile_hint_reliance(spec: StepSpec) -> Callable:
  """Reliance on hints: (state without `carried`, prompts without and with hints, rollout) → float32 [B]."""
  rows, _ = _shardings(spec)
  state = _state_shardings(spec)._replace(carried=())
  return _compiled(spec, functools.partial(hint_reliance, spec), (state, rows, rows, rows), rows)


def compile_generate(spec: StepSpec) -> Callable:
  """Sampling for evaluation: (weights, prompts, seed, begun or None) → Rollout."""
  params = _weight_shardings(spec)
  rows, everywhere = _shardings(spec)

  def run(params, prompts, seed, begun):
    return generate(spec, sampling_state(params, seed=seed), prompts, begun)[0]

  return _compiled(spec, run, (params, rows, everywhere, rows), rows)


def compile_predict_success(spec: StepSpec) -> Callable:
  """The correctness head for evaluation: (weights, head, prompts, their rollout) → p_B."""
  params = _weight_shardings(spec)
  rows, everywhere = _shardings(spec)

  def run(params, head, prompts, rollout):
    state = sampling_state(params)._replace(rollout_head=head)
    return predict_success(spec, state, prompts, rollout)

  return _compiled(spec, run, (params, everywhere, rows, rows), rows)


def _state_shardings(spec: StepSpec) -> Any:
  return jax.tree.map(lambda x: x.sharding, abstract_state(spec))


def _weight_shardings(spec: StepSpec) -> Any:
  return jax.tree.map(lambda x: x.sharding, abstract_sampling_weights(spec))


def _shardings(spec: StepSpec) -> tuple[jax.sharding.NamedSharding, jax.sharding.NamedSharding]:
  """Of rows, cut over the mesh, and of arrays that every device holds."""
  return sharding.rows(spec.layout.mesh), sharding.replicated(spec.layout.mesh)


def options(spec: StepSpec) -> dict[str, str | bool]:
  """XLA's options for the programs of a step."""
  chosen: dict[str, str | bool] = {**hardware.compiler_options(spec.layout.mesh.devices.flat[0])}
  if spec.model.config.is_exact:  # else which values are rounded depends on what is fused
    chosen['xla_allow_excess_precision'] = False
  return chosen


def _compiled(
  spec: StepSpec,
  run: Callable,
  arguments: tuple,
  results: Any,
  donated: tuple[int, ...] = (),
) -> Callable:
  """`run` as a program for the mesh, with the shardings of its arguments and results.

  With several processes jit accepts only arrays of the whole mesh, so arguments from the host are put there first.
  """
  # The prompts of a donated batch have no result of their shape to reuse their memory, which jax warns of.
  warnings.filterwarnings('ignore', message='Some donated buffers were not usable')
  compiled = jax.jit(
    run,
    donate_argnums=donated,
    in_shardings=arguments,
    out_shardings=results,
    compiler_options=options(spec),
  )
  if jax.process_count() == 1:
    return compiled
  return lambda *args: compiled(*sharding.put(args, arguments))

"""The compiled program of a step: update on the rollouts just graded, then sample with the new weights."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax

from jaxrl_llm.learner import compile as programs
from jaxrl_llm.learner.generate import generate
from jaxrl_llm.learner.step_spec import StepSpec
from jaxrl_llm.learner.update import update
from jaxrl_llm.types import Batch, Prompts, Rollout, TrainState


def step(
  spec: StepSpec,
  state: TrainState,
  batch: Batch,
  prompts: Prompts,
  begun: Rollout | None = None,
  draft: Rollout | None = None,
  cap: jax.Array | None = None,
) -> tuple[TrainState, Rollout, dict[str, jax.Array]]:
  """Updates on `batch`, then samples G completions of each prompt with the new weights.

  `begun` holds completions that earlier steps left unfinished, `draft` earlier completions of rows that begin, and
  `cap` is the largest number of tokens of a row in this step, at most T.
  """
  state, metrics = update(spec, state, batch)
  rollout, counts, carried = generate(spec, state, prompts, begun, draft, cap)
  return state._replace(carried=carried), rollout, metrics | counts


def compile_step(spec: StepSpec) -> Callable:
  """`step` as one program of (state, batch, prompts, begun, draft, cap); state and batch are donated."""
  return programs.compile_fused(spec, functools.partial(step, spec))

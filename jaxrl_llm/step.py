"""The one compiled program of a step: learn from the rollouts just graded, then sample with the new weights."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import shard
from jaxrl_llm.generate import judge
from jaxrl_llm.models import decoder
from jaxrl_llm.program import Program
from jaxrl_llm.rollout import generate
from jaxrl_llm.types import Batch, Prompts, Rollout, TrainState
from jaxrl_llm.update import update

# A donated batch frees its rollouts; its prompts have no output of their shape to live on in, which jax reports.
warnings.filterwarnings('ignore', message='Some donated buffers were not usable')


def step(
  program: Program,
  state: TrainState,
  batch: Batch,
  prompts: Prompts,
  begun: Rollout | None = None,
  draft: Rollout | None = None,
  cap: jax.Array | None = None,
) -> tuple[TrainState, Rollout, dict[str, jax.Array]]:
  """One step: update on `batch`, then G rollouts of each of `prompts` with the new weights.

  `begun` holds rollouts of these prompts that earlier steps left unfinished, `draft` answers from an
  earlier visit for rows that begin, `cap` the most tokens a row may take now (at most T). Source: none.
  """
  state, metrics = update(program, state, batch)
  rollout, sampled = generate(program, state, prompts, begun, draft, cap)
  return state, rollout, metrics | sampled


def init_state(program: Program, params: Any) -> TrainState:
  """A TrainState on the mesh, from parameters anywhere. Source: none."""
  params = jax.device_put(params, shard.layout(params, program.mesh))
  make = functools.partial(_fresh, program)
  shardings = shard.layout(jax.eval_shape(make, params), program.mesh)
  return jax.jit(make, out_shardings=shardings)(params)


def _fresh(program: Program, params: Any) -> TrainState:
  judging = judge.init(program.features, program.seed) if program.prune else None
  reference = jax.tree.map(jnp.copy, params) if program.method.needs_reference else None
  opt_state, zero = program.optimizer.init(params), jnp.int32(0)
  return TrainState(params, opt_state, zero, zero, judging, reference)


def abstract_state(program: Program) -> TrainState:
  """The shapes and shardings of `init_state`, nothing allocated. Source: none."""
  shapes = jax.eval_shape(
    functools.partial(_fresh, program), decoder.abstract_params(program.model)
  )
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    shapes,
    shard.layout(shapes, program.mesh),
  )


def empty_rollout(program: Program) -> Rollout:
  """No tokens in any row: host arrays. Source: none."""
  B, T = program.prompts * program.generate.rollouts, program.generate.max_tokens
  zeros = lambda *shape: np.zeros(shape, np.int32)  # noqa: E731
  return Rollout(
    tokens_BxT=zeros(B, T),
    logp_BxT=np.zeros((B, T), np.float32),
    length_B=zeros(B),
    reason_B=np.zeros(B, np.int8),
    version_BxT=zeros(B, T),
    weight_B=np.ones(B, np.float32),
    feature_BxF=np.zeros((B, program.features), np.float32),
  )


def empty_batch(program: Program) -> Batch:
  """A batch of no rollouts, to start with: host arrays. Source: none."""
  P, L, B = program.prompts, program.prompt_tokens, program.prompts * program.group
  zeros = lambda *shape: np.zeros(shape, np.int32)  # noqa: E731
  prompts = Prompts(zeros(P, L), zeros(P), zeros(P), zeros(P), np.zeros(P, np.float32))
  rollout = empty_rollout(
    program._replace(generate=program.generate._replace(rollouts=program.group))
  )
  replayed_B = np.zeros(B, np.float32) if program.group > program.generate.rollouts else None
  return Batch(prompts, rollout, np.zeros(B, np.float32), np.zeros(B, np.float32), replayed_B)


def compile_step(program: Program) -> Callable:
  """`step` as one jit: (state, batch, prompts, begun, draft, cap), state and batch donated.

  Source: none.
  """
  state = jax.tree.map(lambda x: x.sharding, abstract_state(program))
  rows, whole = shard.rows(program.mesh), shard.replicated(program.mesh)
  return jax.jit(
    functools.partial(step, program),
    donate_argnums=(0, 1),
    in_shardings=(state, rows, rows, rows, rows, whole),
    out_shardings=(state, rows, whole),
  )


def compile_split(program: Program) -> Callable:
  """What `compile_step` returns, as two programs one after the other: they compile faster, and waste the overlap.

  Source: none.
  """
  learn = compile_update(program)
  rows, whole = shard.rows(program.mesh), shard.replicated(program.mesh)
  state = jax.tree.map(lambda x: x.sharding, abstract_state(program))
  sample = jax.jit(
    functools.partial(generate, program),
    in_shardings=(state, rows, rows, rows, whole),
    out_shardings=(rows, whole),
  )

  def call(state, batch, *asked):
    state, metrics = learn(state, batch)
    rollout, sampled = sample(state, *asked)
    return state, rollout, metrics | sampled

  return call


def compile_generate(program: Program) -> Callable:
  """`generate` alone, for evaluation: (params, prompts) → Rollout. Source: none."""
  params = jax.tree.map(lambda x: x.sharding, abstract_state(program).params)
  rows = shard.rows(program.mesh)
  return jax.jit(
    lambda params, prompts: generate(program, frozen(params), prompts)[0],
    in_shardings=(params, rows),
    out_shardings=rows,
  )


def frozen(params: Any, version: int = 0) -> TrainState:
  """Weights to sample with and not to learn with. Source: none."""
  return TrainState(params, (), jnp.int32(version), jnp.int32(0))


def compile_update(program: Program) -> Callable:
  """`update` alone, for a supervised warm start: (state, batch), both donated. Source: none."""
  state = jax.tree.map(lambda x: x.sharding, abstract_state(program))
  rows, whole = shard.rows(program.mesh), shard.replicated(program.mesh)
  return jax.jit(
    lambda state, batch: update(program, state, batch),
    donate_argnums=(0, 1),
    in_shardings=(state, rows),
    out_shardings=(state, whole),
  )

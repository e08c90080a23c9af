"""What is fixed when a step is compiled, read from a validated config."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax

from jaxrl_llm import objective, shard
from jaxrl_llm.config import pick
from jaxrl_llm.generate import engine, order, speculate, stopping
from jaxrl_llm.optimizer import make_optimizer
from jaxrl_llm.types import ModelConfig, UserError


class Program(NamedTuple):
  """What is fixed when a step is compiled."""

  model: ModelConfig
  mesh: jax.sharding.Mesh
  method: objective.Method
  optimizer: optax.GradientTransformation
  schedule: Callable
  generate: engine.Spec
  verify: Callable | None  # which tokens of a draft stay; None: there are no drafts
  lockstep: bool  # all shards of rows run the decode loop equally often
  same_noise: bool  # a prompt meets the same noise at every visit
  seed: int
  prompts: int  # P
  prompt_tokens: int  # L
  minibatches: int  # optimizer steps per batch
  slice_groups: int  # prompts per gradient-accumulation slice
  slice_rollouts: int  # rows of each of them; fewer than G repeats the prompt
  head_chunk_tokens: int
  remat: bool


def check_rows(config: Any, mesh: jax.sharding.Mesh) -> None:
  """Raises UserError where the prompts of a minibatch cannot be cut over the mesh. Source: none."""
  if config.prompts // config.updates_per_rollout % shard.rows_shards(mesh):
    raise UserError(
      f'config.prompts={config.prompts} (over updates_per_rollout={config.updates_per_rollout}) is '
      f'not a multiple of data × fsdp = {shard.rows_shards(mesh)} devices; change one of them.'
    )


def make_program(
  config: Any, model: ModelConfig, end_ids: tuple[int, ...], mesh: jax.sharding.Mesh
) -> Program:
  """Reads a validated config. Raises UserError for a function that does not exist. Source: none."""
  cpu = mesh.devices.flat[0].platform == 'cpu'
  dtype = ('float32' if cpu else 'bfloat16') if config.dtype == 'auto' else config.dtype
  rows = config.prompts * config.rollouts // config.updates_per_rollout
  rows = min(rows, config.microbatch_rollouts or rows)
  slice_rollouts = min(config.rollouts, max(1, rows // shard.rows_shards(mesh)))
  slots, shards = config.generate.slots, shard.rows_shards(mesh)
  if slots % shards or slots > config.prompts * config.rollouts:
    raise UserError(
      f'config.generate.slots={slots} must be a multiple of data × fsdp = {shards} devices and at most '
      f'prompts × rollouts = {config.prompts * config.rollouts}; 0 stands for all of them.'
    )
  if not config.generate.lockstep and mesh.shape['tensor'] > 1:
    raise UserError(
      f'config.generate.lockstep=False needs config.mesh.tensor=1, not {mesh.shape["tensor"]}: shards of '
      'rows that end apart wait for each other in the sums over tensor for ever.'
    )
  draft = pick(speculate, config.generate.draft, 'generate.draft')
  optimizer, schedule = make_optimizer(config.optimizer, config.steps)
  return Program(
    model=model,
    mesh=mesh,
    method=objective.method(config.objective),
    optimizer=optimizer,
    schedule=schedule,
    generate=engine.Spec(
      rollouts=config.rollouts,
      max_tokens=config.completion_tokens,
      temperature=config.temperature,
      end_ids=tuple(end_ids),
      dtype=dtype,
      slots=config.generate.slots,
      order=pick(order, config.generate.order, 'generate.order'),
      stop=pick(stopping, config.generate.stop, 'generate.stop'),
    ),
    verify=None if config.generate.draft.fn == 'none' else draft,
    lockstep=config.generate.lockstep,
    same_noise=config.generate.draft.fn == 'coupled',
    seed=config.seed,
    prompts=config.prompts,
    prompt_tokens=config.prompt_tokens,
    minibatches=config.updates_per_rollout,
    slice_groups=rows // slice_rollouts,
    slice_rollouts=slice_rollouts,
    head_chunk_tokens=config.objective.head_chunk_tokens,
    remat=(not cpu) if config.remat == 'auto' else config.remat,
  )

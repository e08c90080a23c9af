"""The host loop in reading order: choose prompts, build inputs, run the compiled step, land its rollouts, save."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm import rewards
from jaxrl_llm import step as steps
from jaxrl_llm.checkpointing import checkpoint, metrics_log, run_dir, storage
from jaxrl_llm.config import validation
from jaxrl_llm.config.validation import ConfigLike
from jaxrl_llm.distributed import consistency, preemption, sharding
from jaxrl_llm.evaluation import held_out
from jaxrl_llm.learner import compile as programs
from jaxrl_llm.monitoring import console, prometheus_endpoint
from jaxrl_llm.objective import record_checks
from jaxrl_llm.runner import (
  endpoint,
  hint_reliance,
  host_step,
  log_records,
  memory,
  multi_turn,
  prompt_encoding,
  resume,
  setup,
  sft,
  sharded_grading,
  turn_batching,
)
from jaxrl_llm.runner.context import PendingStep, Progress, ReceivedStep, RunContext
from jaxrl_llm.runner.run_logger import RunLogger
from jaxrl_llm.types import Batch, JsonObject


def run(
  config: ConfigLike, workdir: str, mesh: jax.sharding.Mesh | None = None
) -> dict[str, float]:  # fmt: skip
  """Train as `config` says, continuing the run in `workdir`; return the metrics of the last evaluation.

  `workdir` is a folder, gs://… or s3://…; `mesh` overrides config.mesh. Raises UserError for bad input before anything
  is compiled, and preemption.Preempted after SIGTERM, when the run is saved.
  """
  devices = jax.devices() if mesh is None else mesh.devices.flatten().tolist()
  config = validation.sized(config, devices)
  if jax.process_index() == 0:  # the process that opens the trackers
    prometheus_endpoint.check_free(config.monitoring)
  context = setup.build_context(config, mesh)
  memory.check_state(context.config, context.spec)
  pool = rewards.Pool(config.rewards)  # checks its settings, before a folder is made
  with storage.training(workdir, config.checkpoint.keep) as (root, publisher):
    directory = resume.open_directory(root, config)._replace(publisher=publisher)
    with (
      pool,
      contextlib.closing(context.episodes) if context.episodes else contextlib.nullcontext(),
      console.open_console(config.monitoring.console, config.steps) as screen,
    ):
      devices = context.spec.layout.mesh.devices
      screen.banner(**log_records.facts(config, devices, storage.shown(root)))
      return _train(context, directory, sharded_grading.Pool(pool, config.lag_steps), screen)


class _Loop(NamedTuple):
  """The services of the loop, fixed for a run."""

  context: RunContext
  pool: sharded_grading.Pool
  logger: RunLogger
  preemption: preemption.PreemptionHandler
  save: Callable[[Progress], None]
  evaluate: Callable[[Any, int], JsonObject]  # (state, step) → the record of the evaluation
  times: run_dir.TimeSpent


def _train(
  context: RunContext,
  directory: run_dir.RunDirectory,
  pool: sharded_grading.Pool,
  screen: console.Console,
) -> dict[str, float]:
  """Evaluate, take all steps, evaluate again."""
  config, times = context.config, run_dir.TimeSpent(directory.root)
  with (
    held_out.grading_pool(context, pool) as held_out_pool,
    preemption.PreemptionHandler(alone=jax.process_count() == 1) as handler,
    checkpoint.Saver(
      directory.checkpoints, config.checkpoint.keep, directory.record_checkpoint
    ) as saver,
  ):
    evaluate = held_out.recorded_evaluator(context, held_out_pool, directory, screen)
    evaluate = times.timed('evaluation', evaluate)
    save = times.timed('checkpoints', functools.partial(resume.save, context, saver))
    first_evaluation: JsonObject = {}
    with handler.interruptible():
      progress = _start(context, directory, screen, times)
      progress = progress._replace(received=_begun(context, pool, progress.received))
      start = progress.done
      if start == 0 or _due(config.evaluation.every, start):
        first_evaluation = evaluate(progress.state, start)
    if not config.steps:  # the supervised start is the whole run
      save(progress)
    first_row = start - (progress.pending is not None) - len(progress.received)
    with RunLogger(context, directory, screen, start, first_row) as logger:
      logger.log_evaluation(start, first_evaluation)
      loop = _Loop(context, pool, logger, handler, save, evaluate, times)
      with memory.explained(context.config, context.spec):
        progress = _take_steps(loop, progress)
      logger.after_last_step(progress.state)
      _land_all(loop, progress)
      # The last checkpoint is written meanwhile; leaving the saver waits for it.
      with handler.interruptible():
        last_evaluation = evaluate(progress.state, config.steps)
      logger.log_evaluation(config.steps, last_evaluation)
  logger.finish()
  return last_evaluation.get('metrics', {})


def _take_steps(loop: _Loop, progress: Progress) -> Progress:
  """Take the remaining steps of the run."""
  context, logger, start = loop.context, loop.logger, progress.done
  call, encode = _compile(context), prompt_encoding.compile_call(context)
  measure = hint_reliance.compile_call(context)
  for index in range(start, context.config.steps):
    logger.before_step(index, progress.state)
    began = time.perf_counter()
    choice = host_step.choose(context, index, _in_flight(progress))
    inputs = host_step.build_inputs(context, index, choice)
    logger.log_choice(choice.record)
    _check_processes(context, index, start, inputs, progress.batch)
    if index == start:
      logger.before_compilation()
    dispatched = time.perf_counter()
    state, rollout, device_metrics = call(progress.state, progress.batch, *inputs)
    if index == start:
      compile_s = time.perf_counter() - dispatched
      logger.after_compilation(compile_s)
      loop.times.add('compilation', compile_s)
      # Compilation is no part of the step's time.
      began, dispatched = began + compile_s, dispatched + compile_s
    prompts = context.episodes.prompts_of(inputs[0]) if context.episodes else inputs[0]
    encoded = encode and encode(index, state, prompts.index_P)
    reliance_B = measure and measure(state, prompts, rollout)
    newest = PendingStep(
      index, prompts, rollout, device_metrics, progress.batch, encoded, reliance_B
    )
    progress = _land(
      loop, progress._replace(state=state, done=index + 1), newest, began, dispatched
    )
    _save_and_evaluate(loop, progress)
  return progress


def _land(
  loop: _Loop, progress: Progress, newest: PendingStep, began: float, dispatched: float
) -> Progress:
  """Receive the rollouts of a step, and land the step that the next update learns.

  Without a lag both are the newest. With one, the device runs the newest meanwhile: the step before it is received, and
  the one that was received config.lag_steps − 1 calls ago is landed. `began` and `dispatched`: when the host began to
  choose prompts, and when it called the compiled step.
  """
  config, received = loop.context.config, progress.received
  lag = config.lag_steps if config.mode == 'lag' else 0
  to_receive, pending = (progress.pending, newest) if lag else (newest, None)
  if to_receive is not None:
    jax.block_until_ready(to_receive.rollout)
    received += (host_step.receive(loop.context, to_receive),)
  sampled = time.perf_counter()
  if lag > 1:
    received = _begun(loop.context, loop.pool, received)
  progress = progress._replace(pending=pending, received=received)
  if len(received) < max(lag, 1):
    return progress
  batch = _finish(loop, received[0], began, dispatched, sampled)
  return progress._replace(batch=batch, received=received[1:])


def _land_all(loop: _Loop, progress: Progress) -> None:
  """Land what the last step left."""
  received = progress.received
  if progress.pending is not None:
    received += (host_step.receive(loop.context, progress.pending),)
  for step in received:
    now = time.perf_counter()
    _finish(loop, step, now, now, now)


def _begun(
  context: RunContext, pool: sharded_grading.Pool, received: tuple[ReceivedStep, ...]
) -> tuple[ReceivedStep, ...]:
  """The steps, all of which are being graded."""
  return tuple(x if x.begun else host_step.begin(context, pool, x) for x in received)


def _in_flight(progress: Progress) -> list[np.ndarray]:
  """The prompts of all steps that are not graded yet."""
  steps = [received.pending for received in progress.received]
  steps += [] if progress.pending is None else [progress.pending]
  return [step.prompts.index_P for step in steps]


def _finish(
  loop: _Loop, received: ReceivedStep, began: float, dispatched: float, sampled: float
) -> Batch:
  """Wait for the scores of a step and log it; return the batch of the next update."""
  pending, landed = received.pending, host_step.finish(loop.context, loop.pool, received)
  record_checks.finite(landed.batch)
  graded = time.perf_counter()
  timing = {
    'timing_s/choose': dispatched - began,
    'timing_s/gen_update': sampled - dispatched,
    'timing_s/grade': graded - sampled - landed.metrics.get('timing_s/encode', 0.0),
    'timing_s/step': graded - began,
    'perf/throughput': landed.metrics['generate/tokens'] / (graded - began),
  }
  loop.logger.log_step(pending, landed, timing)
  return landed.batch


def _save_and_evaluate(loop: _Loop, progress: Progress) -> None:
  """Save and evaluate where due. Raises preemption.Preempted after SIGTERM, when the run is saved."""
  config, done = loop.context.config, progress.done
  preempt = sharding.any_process(loop.preemption.requested)
  if preempt or _due(config.checkpoint.every, done) or done == config.steps:
    loop.save(progress)
  if preempt:
    raise preemption.Preempted
  if _due(config.evaluation.every, done) and done < config.steps:
    with loop.preemption.interruptible(functools.partial(loop.save, progress)):
      loop.logger.log_evaluation(done, loop.evaluate(progress.state, done))


def _compile(context: RunContext) -> Callable:
  """The compiled step: one program, its two halves, or one sampling call for every turn of an environment."""
  if isinstance(context.episodes, endpoint.HarnessEpisodes):
    return endpoint.compile_call(context)
  if context.episodes is not None:
    batches = context.episodes.batching is not None
    return (turn_batching if batches else multi_turn).compile_call(context)
  split = context.config.mode == 'split'
  return (programs.compile_split if split else steps.compile_step)(context.spec)


def _check_processes(
  context: RunContext, index: int, start: int, inputs: host_step.StepInputs, batch: Batch
) -> None:
  """Raises UserError where the processes of a run disagree, every config.processes.same_every steps."""
  every = context.config.processes.same_every
  if jax.process_count() > 1 and _due(every, index - start):
    consistency.check(index, resume.shared_state(context, index, inputs[0], batch))


def _start(
  context: RunContext,
  directory: run_dir.RunDirectory,
  screen: console.Console,
  times: run_dir.TimeSpent,
) -> Progress:
  """Restore the run; a fresh one takes the supervised steps of config.sft first."""
  config, tokenizer = context.config, context.models.policy.tokenizer
  progress = resume.restore(context, directory, screen, trains=True)
  is_fresh = progress.done == 0 and checkpoint.latest(directory.checkpoints) is None
  if not (is_fresh and config.sft.steps):
    return progress
  screen.info(f'supervised warm start, {config.sft.steps} steps')
  writer = metrics_log.Writer(directory.sft, 0, jax.process_index() == 0, sync=False)
  with times.on('warm start'), writer:
    on_loss = sft.LossLogger(config.sft.steps, writer.write, screen)
    rows = context.tables.demonstrations
    state = sft.run(config, context.spec, progress.state, rows, tokenizer, on_loss)
  return progress._replace(state=state)


def _due(every: int, done: int) -> bool:
  return every > 0 and done % every == 0

"""Evaluations of a run: one file for each evaluated step, reused by later starts with the same settings and weights."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Hashable, Iterator

from absl import logging

from jaxrl_llm import data, evaluation, rewards
from jaxrl_llm.checkpointing import run_dir
from jaxrl_llm.config import stages
from jaxrl_llm.config.schema import Config, RewardsConfig, Section
from jaxrl_llm.evaluation import evaluate
from jaxrl_llm.evaluation.fingerprint import fingerprint
from jaxrl_llm.learner import state as train_state
from jaxrl_llm.monitoring import console
from jaxrl_llm.monitoring.example import Example
from jaxrl_llm.rewards.parsing import extract, formula
from jaxrl_llm.runner import endpoint, multi_turn, sharded_grading
from jaxrl_llm.runner.context import RunContext, ScorePool
from jaxrl_llm.types import JsonObject, TrainState, UserError

# Fields of config.rewards and config.environment that change how grading runs, and not its results.
_RESOURCES = ('workers', 'deadline_s', 'cpu_s', 'memory_mb', 'worker_memory_mb', 'failed')


@contextlib.contextmanager
def grading_pool(context: RunContext, pool: ScorePool) -> Iterator[ScorePool]:
  """`pool`, which grades with config.rewards; for a benchmark, workers of its verifier beside it."""
  if not context.tables.held_out.verifier:
    yield pool
    return
  with rewards.Pool(context.held_out_rewards) as own:
    yield sharded_grading.Pool(own)


def recorded_evaluator(
  context: RunContext,
  pool: ScorePool,
  directory: run_dir.RunDirectory,
  screen: console.Console,
) -> Callable[[TrainState, int], JsonObject]:
  """Return evaluate(state, step) → the contents of eval/step_….json, read from there where it exists.

  `pool` is that of `grading_pool`.
  Without held-out prompts it returns {}.
  """
  if not len(context.tables.held_out):
    logging.warning('no held-out prompts: nothing is evaluated')
    return lambda state, step: {}
  settings, table = context.config.evaluation, context.tables.held_out
  grading = context.held_out_rewards
  evaluator = evaluate.make_evaluator(
    context.spec,
    table,
    context.models.policy.tokenizer.decode,
    scoring(grading, pool, context.episodes),
    settings.samples,
    settings.sampling,
  )
  run_identity = identity(context.config, grading, table)

  def evaluate_step(state: TrainState, step: int) -> JsonObject:
    params = train_state.sampling_weights(context.spec, state)
    # The same path or model name may hold other weights by now.
    wanted = run_identity | dict(weights=fingerprint((params, state.rollout_head)))
    record: JsonObject | None = directory.read_eval(step, wanted)
    if record is None:
      on_progress = functools.partial(screen.evaluating, step)
      on_progress(0, len(table))
      metrics, rows, groups = evaluator(params, state.rollout_head, on_progress)
      record = wanted | dict(step=step, metrics=metrics, groups=groups, rows=rows)
      directory.write_eval(step, record)
    screen.evaluation(step, record['metrics'], _example(record['rows'][0]))
    return record

  return evaluate_step


def _example(row: JsonObject) -> Example:
  """The first completion of a row, for the console."""
  question = row['question']
  if not isinstance(question, str):
    question = question[-1]['content'] if question else ''
  return Example(question, row['output'][0], row['score'][0])


def identity(config: Config, grading: RewardsConfig, table: data.PromptTable) -> JsonObject:
  """The fields of an evaluation's file that identify it: version, model, grader, settings.

  `grading` is RunContext.held_out_rewards. Evaluations of the same prompts with the same `grader` can be compared;
  `settings` may differ.
  """
  settings = dict(
    prompts=table.fingerprint, samples=config.evaluation.samples, **config.evaluation.sampling
  )
  settings |= dict(completion_tokens=config.completion_tokens, seed=config.seed)
  grader = _without_resources(grading)
  if config.environment.fn != 'none':
    grader['environment'] = _without_resources(config.environment)
  return dict(
    version=evaluation.compare.VERSION, model=config.model, grader=grader, settings=settings
  )


def _without_resources(section: Section) -> JsonObject:
  return {k: v for k, v in json.loads(section.to_json()).items() if k not in _RESOURCES}


def scoring(
  grading: RewardsConfig,
  pool: ScorePool,
  episodes: multi_turn.Episodes | endpoint.HarnessEpisodes | None,
) -> evaluate.Scoring:
  """How held-out completions are scored; majority votes need a reward function with a known answer parser.

  Raises UserError for a harness, which `evaluate` does not run.
  """
  if isinstance(episodes, endpoint.HarnessEpisodes):
    raise UserError(
      "config.environment.fn='endpoint' runs the harness in training alone: serve the run with --mode=serve and run "
      'the harness against that.'
    )
  environment_scores = episodes is not None and episodes.judge == 'environment'
  read_answer: Callable[[str], Hashable] | None = None
  if not environment_scores:
    parsers = stages.choices(extract) | dict(math_verify=formula.key)
    read_answer = parsers.get(grading.fn)
  return evaluate.Scoring(pool, grading.right, read_answer, episodes)

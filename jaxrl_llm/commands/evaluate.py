"""--mode=eval: evaluates a checkpoint, or the model as loaded, on the held-out prompts."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxrl_llm.checkpointing import storage
from jaxrl_llm.commands import run_config
from jaxrl_llm.commands.processes import Processes
from jaxrl_llm.config import validation
from jaxrl_llm.config.validation import ConfigLike
from jaxrl_llm.types import JsonObject, UserError

if TYPE_CHECKING:
  from jaxrl_llm.checkpointing.run_dir import RunDirectory
  from jaxrl_llm.config.schema import Config
  from jaxrl_llm.runner.context import RunContext


def add_flags(parser: argparse.ArgumentParser) -> None:
  """Add --step and --against."""
  parser.add_argument(
    '--step', type=int, help='with --mode=eval: a checkpoint; default: the newest'
  )
  parser.add_argument(
    '--against', default='', help='with --mode=eval: the file of an evaluation to compare with'
  )


def run(arguments: argparse.Namespace, overrides: Sequence[str], processes: Processes) -> int:
  """Print the tables of `evaluate_checkpoint`."""
  config = run_config.load(arguments, overrides, run_config.EVALUATION)
  processes.join(arguments, config.trained)
  options = arguments.step, arguments.against, config.trained, config.evaluation_changes
  evaluate_checkpoint(config.requested, arguments.workdir, *options)
  return 0


def evaluate_checkpoint(
  config: ConfigLike,
  workdir: str,
  step: int | None = None,
  against: str = '',
  trained: ConfigLike | None = None,
  changes: Sequence[str] = (),
) -> dict[str, float]:
  """Evaluate the newest checkpoint in `workdir`, that of `step`, or the model as loaded; print tables.

  `against` is the file of another evaluation to compare with. `trained` is the config of the run, where `config` has
  other fields of evaluation; the file of such an evaluation is named by `changes`, and the run's own stays. Returns the
  metrics. Raises UserError for bad input, without held-out prompts, and where a supervised start is still to come.
  """
  # Imported late: --help and a misspelled flag do not wait for jax.
  import jax

  from jaxrl_llm import evaluation
  from jaxrl_llm.checkpointing import run_dir
  from jaxrl_llm.evaluation import held_out
  from jaxrl_llm.runner import resume, setup

  other = evaluation.compare.load(against) if against else None
  config = validation.sized(config, jax.devices())
  trained = config if trained is None else validation.sized(trained, jax.devices())
  context = setup.build_context(config)
  table = context.tables.held_out
  if not len(table):
    raise UserError(
      f'config.evaluation.prompts={config.evaluation.prompts} leaves no held-out prompt to evaluate; raise it, or give '
      'config.data.eval_path.'
    )
  if other is not None:
    grader = held_out.identity(config, context.held_out_rewards, table)['grader']
    evaluation.compare.check(grader, [row.id for row in table.rows], other)
  with storage.reading(workdir, checkpoint=True, step=step, rollouts=False) as root:
    resume.check_supervised_start(trained, root)
    directory = run_dir.view(root, _variant(changes))
    record = _record(context, trained, directory, step, changes)
  tables = evaluation.tally.table(record['groups'])
  if other is not None:
    tables += f'\n\n{evaluation.compare.table(record, other)}'
  if jax.process_index() == 0:
    print(f'\n{tables}', flush=True)
  return record['metrics']


def _record(
  context: RunContext,
  trained: Config,
  directory: RunDirectory,
  step: int | None,
  changes: Sequence[str],
) -> JsonObject:
  """The record of the evaluation of a checkpoint of the run that was `trained`."""
  import contextlib

  from jaxrl_llm import rewards
  from jaxrl_llm.evaluation import held_out
  from jaxrl_llm.monitoring import console
  from jaxrl_llm.runner import resume, sharded_grading, weights

  config = context.config
  with (
    rewards.Pool(context.held_out_rewards) as pool,
    contextlib.closing(context.episodes) if context.episodes else contextlib.nullcontext(),
    console.open_console(config.monitoring.console, config.steps) as screen,
  ):
    restored = weights.restore(trained, context.models.policy, directory, step)
    if restored.host is not None and not changes:  # other settings may draw other held-out prompts
      resume.check_data(context, directory, restored.done, restored.host)
    evaluate = held_out.recorded_evaluator(context, sharded_grading.Pool(pool), directory, screen)
    record = evaluate(restored.state, restored.done)
    if changes:
      screen.info(
        f'other settings than in training ({"; ".join(changes)}): the record is a file of its own, '
        f'{storage.shown(directory.eval_path(restored.done))}'
      )
  return record


def _variant(changes: Sequence[str]) -> str:
  """A short name of these settings; '' for the run's own."""
  text = '\n'.join(changes)
  return hashlib.sha256(text.encode()).hexdigest()[:8] if text else ''

"""--mode=eval: evaluates a checkpoint, or the model as loaded, on the held-out prompts."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from jaxrl_llm.commands.processes import Processes
from jaxrl_llm.config import validation
from jaxrl_llm.config.validation import ConfigLike
from jaxrl_llm.types import UserError


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
  from jaxrl_llm.config import loading

  config = loading.load(arguments.config, overrides)
  processes.join(arguments, config)
  evaluate_checkpoint(config, arguments.workdir, arguments.step, arguments.against)
  return 0


def evaluate_checkpoint(
  config: ConfigLike, workdir: str, step: int | None = None, against: str = ''
) -> dict[str, float]:
  """Evaluate the newest checkpoint in `workdir`, that of `step`, or the model as loaded; print tables.

  `against` is the file of another evaluation to compare with. Returns the metrics. Raises UserError for bad input,
  without held-out prompts, and where a supervised start is still to come.
  """
  # Imported late: --help and a misspelled flag do not wait for jax.
  import contextlib

  import jax

  from jaxrl_llm import evaluation, rewards
  from jaxrl_llm.evaluation import held_out
  from jaxrl_llm.monitoring import console
  from jaxrl_llm.runner import resume, setup, sharded_grading

  other = evaluation.compare.load(against) if against else None
  config = validation.sized(config, jax.devices())
  context = setup.build_context(config)
  table = context.tables.held_out
  if not len(table):
    raise UserError(
      f'config.evaluation.prompts={config.evaluation.prompts} leaves no held-out prompt to evaluate; raise it, or give '
      'config.data.eval_path.'
    )
  if other is not None:
    grader = held_out.identity(config, table)['grader']
    evaluation.compare.check(grader, [row.id for row in table.rows], other)
  resume.check_supervised_start(config, workdir)
  directory = resume.open_directory(workdir, config)
  with (
    rewards.Pool(config.rewards) as pool,
    contextlib.closing(context.episodes) if context.episodes else contextlib.nullcontext(),
    console.open_console(config.monitoring.console, config.steps) as screen,
  ):
    progress = resume.restore(context, directory, screen, step)
    evaluate = held_out.recorded_evaluator(context, sharded_grading.Pool(pool), directory, screen)
    record = evaluate(progress.state, progress.done)
  tables = evaluation.tally.table(record['groups'])
  if other is not None:
    tables += f'\n\n{evaluation.compare.table(record, other)}'
  if jax.process_index() == 0:
    print(f'\n{tables}', flush=True)
  return record['metrics']

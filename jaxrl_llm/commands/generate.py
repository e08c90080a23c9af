"""--mode=generate: prints completions of prompts, or holds a conversation."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from jaxrl_llm.checkpointing import safe_files
from jaxrl_llm.commands.processes import Processes
from jaxrl_llm.config import validation
from jaxrl_llm.config.validation import ConfigLike
from jaxrl_llm.types import JsonObject, UserError


def add_flags(parser: argparse.ArgumentParser) -> None:
  """Add --prompt, --prompts and --samples."""
  parser.add_argument(
    '--prompt', action='append', default=[], help='with --mode=generate; may be repeated'
  )
  parser.add_argument(
    '--prompts', default='', help='with --mode=generate: a file, one prompt a line'
  )
  parser.add_argument(
    '--samples', type=int, default=1, help='with --mode=generate: completions of each prompt'
  )


def run(arguments: argparse.Namespace, overrides: Sequence[str], processes: Processes) -> int:
  """Print the completions of `generate_text`."""
  from jaxrl_llm.config import loading

  config = loading.load(arguments.config, overrides)
  prompts = _prompts(arguments)
  processes.join(arguments, config)
  generate_text(config, arguments.workdir, prompts, arguments.samples, arguments.base)
  return 0


def generate_text(
  config: ConfigLike,
  workdir: str,
  prompts: Sequence[str | list[dict]],
  samples: int,
  base: bool = False,
) -> None:
  """Print completions of the newest checkpoint in `workdir`, or with `base` of the model as loaded.

  Without prompts, hold a conversation. Raises UserError where nothing was trained.
  """
  # Imported late: --help and a misspelled flag do not wait for jax.
  import jax

  from jaxrl_llm import rollout
  from jaxrl_llm.commands import chat
  from jaxrl_llm.learner import state as train_state
  from jaxrl_llm.monitoring import console
  from jaxrl_llm.runner import resume, setup

  config = validation.sized(config, jax.devices())
  if not base:
    resume.check_trained(config, workdir)
  context = setup.build_context(config)
  directory = resume.open_directory(workdir, config)
  with console.open_console(config.monitoring.console, config.steps) as screen:
    progress = resume.fresh(context) if base else resume.restore(context, directory, screen)
  params = train_state.merged_weights(context.spec, progress.state)
  model = context.models.policy._replace(params=params)
  settings: JsonObject = dict(
    max_tokens=config.completion_tokens, chat=config.data.chat, **config.evaluation.sampling
  )
  if not prompts:
    chat.run(model, settings, config.seed)
    return
  completions = rollout.stream(model, prompts, n=samples, seed=config.seed, **settings)
  for prompt, texts in zip(prompts, completions, strict=True):
    print(f'> {prompt}', *texts, sep='\n', flush=True)


def _prompts(arguments: argparse.Namespace) -> list[str]:
  """The prompts of the flags; none in a terminal means a conversation."""
  prompts = list(arguments.prompt)
  if arguments.prompts:
    try:
      with safe_files.open_regular(arguments.prompts) as file:
        prompts += [line.rstrip('\n') for line in file if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
      raise UserError(
        f'--prompts={arguments.prompts} cannot be read ({error}); name a UTF-8 text file.'
      ) from error
  if not prompts and arguments.samples == 1 and sys.stdin.isatty():
    return []
  if not prompts or arguments.samples < 1:
    raise UserError(
      f'--mode=generate has {len(prompts)} prompts and --samples={arguments.samples}; give at least one of each: '
      '--prompt=TEXT or --prompts=FILE, --samples=1.'
    )
  return prompts

"""--mode=generate: prints completions of prompts, or holds a conversation."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence

from jaxrl_llm.checkpointing import safe_files, storage
from jaxrl_llm.commands import run_config
from jaxrl_llm.commands.processes import Processes
from jaxrl_llm.config import validation
from jaxrl_llm.config.schema import Config, typed
from jaxrl_llm.config.validation import ConfigLike
from jaxrl_llm.types import JsonObject, Row, UserError

# Set on the command line, they are the temperature of --mode=generate; that of a training run has no say.
_TEMPERATURES = ('--config.temperature=', '--config.evaluation.sampling.temperature=')


def add_flags(parser: argparse.ArgumentParser) -> None:
  """Add --prompt, --prompts, --samples, --temperature, --tokens and --raw."""
  parser.add_argument(
    '--prompt', action='append', default=[], help='with --mode=generate; may be repeated'
  )
  parser.add_argument(
    '--prompts', default='', help='with --mode=generate: a file, one prompt a line'
  )
  parser.add_argument(
    '--samples', type=int, default=1, help='with --mode=generate: completions of each prompt'
  )
  parser.add_argument(
    '--temperature', type=float, help='with --mode=generate: 0, the default, is greedy'
  )
  parser.add_argument(
    '--tokens',
    type=int,
    help='with --mode=generate: the longest completion; default: config.completion_tokens',
  )
  parser.add_argument(
    '--raw',
    action='store_true',
    help='with --mode=generate: the prompt as it is, without config.data.template and the chat template',
  )


def run(arguments: argparse.Namespace, overrides: Sequence[str], processes: Processes) -> int:
  """Print the completions of `generate_text`."""
  prompts = _prompts(arguments)
  config = run_config.load(arguments, overrides, run_config.GENERATION)
  validation.check(config.requested)
  settings = sampling_settings(arguments, overrides, typed(config.requested))
  processes.join(arguments, config.trained)
  options = settings, arguments.raw, arguments.base
  generate_text(config.trained, arguments.workdir, prompts, config.requested, *options)
  return 0


def sampling_settings(
  arguments: argparse.Namespace, overrides: Sequence[str], config: Config
) -> JsonObject:
  """The settings of `rollout.stream` for --mode=generate: greedy unless a temperature is typed.

  Raises UserError for numbers out of range.
  """
  temperature = 0.0
  if any(text.startswith(_TEMPERATURES) for text in overrides):
    ours = any(text.startswith(_TEMPERATURES[1]) for text in overrides)
    temperature = config.evaluation.sampling.temperature if ours else config.temperature
  if arguments.temperature is not None:
    temperature = arguments.temperature
  if not 0 <= temperature < math.inf:
    raise UserError(f'--temperature={temperature} must be a finite number of at least 0.')
  tokens = config.completion_tokens if arguments.tokens is None else arguments.tokens
  if tokens < 1:
    raise UserError(f'--tokens={tokens} must be a whole number of at least 1.')
  filters = {k: v for k, v in config.evaluation.sampling.items() if k != 'temperature'}
  return dict(
    n=arguments.samples, max_tokens=tokens, temperature=temperature, seed=config.seed, **filters
  )


def generate_text(
  config: ConfigLike,
  workdir: str,
  prompts: Sequence[str],
  requested: ConfigLike | None = None,
  settings: JsonObject | None = None,
  raw: bool = False,
  base: bool = False,
) -> None:
  """Print completions of the newest checkpoint in `workdir`, or with `base` of the model as loaded.

  `config` is that of the run; `requested.data` renders the prompts, unless they are `raw`. `settings` are those of
  `rollout.stream`. Without prompts, hold a conversation. Raises UserError where nothing was trained.
  """
  # Imported late: --help and a misspelled flag do not wait for jax.
  import jax

  from jaxrl_llm import data, rollout
  from jaxrl_llm.checkpointing import run_dir
  from jaxrl_llm.commands import chat
  from jaxrl_llm.monitoring import console
  from jaxrl_llm.runner import resume, weights

  config = validation.sized(config, jax.devices())
  settings = settings or dict(max_tokens=config.completion_tokens, temperature=0.0)
  rendering = typed(requested or config).data
  with (
    storage.reading(workdir, checkpoint=not base, rollouts=False) as root,
    console.open_console(config.monitoring.console, config.steps) as screen,
  ):
    if not base:
      resume.check_trained(config, root)
    restored = weights.load(config, run_dir.view(root), base=base)
    source = config.model if base else f'the model after {restored.done} steps'
    screen.info(f'{source} samples at temperature {settings["temperature"]:g}')
  model = restored.model._replace(params=restored.merged())
  if not prompts:
    chat.run(model, settings, None if raw else rendering)
    return
  inputs = prompts if raw else [data.render(_row(prompt), rendering) for prompt in prompts]
  completions = rollout.stream(model, inputs, chat=False, **settings)
  for prompt, texts in zip(prompts, completions, strict=True):
    print(f'> {prompt}', *texts, sep='\n', flush=True)


def _row(prompt: str) -> Row:
  return Row('', prompt, (), '', '', {})


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

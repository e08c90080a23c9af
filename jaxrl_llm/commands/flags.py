"""The flags of the command line: those of all modes here, those of a single mode beside its command."""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Iterable, Sequence
from typing import NoReturn, Protocol

from jaxrl_llm.commands import (
  compile_mode,
  evaluate,
  export,
  fit,
  generate,
  layout,
  report,
  reward_model,
  serve,
)
from jaxrl_llm.commands.processes import Processes

_HELP = """Trains a language model by reinforcement learning with verifiable rewards.

Any field of the configuration can be set: --config.steps=100 --config.curriculum.utility.fn=uniform.
A run directory holds its configuration: with --workdir=RUN no --config is needed, in any mode.

Modes:
  train     trains; a run in --workdir is resumed
  eval      evaluates the newest checkpoint in --workdir, that of --step=N, or the model as loaded: accuracy with
            intervals, by source and level; --against=OTHER/eval/step_N.json also compares two evaluations;
            --config.evaluation.benchmark=hub:openai/gsm8k takes a published benchmark as the held-out prompts
  generate  prints completions of --prompt=TEXT or of the lines of --prompts=FILE, in the template of the training and
            greedily; without either, a conversation; --temperature=1 samples, --raw leaves the template out
  serve     answers requests of OpenAI's API at http://127.0.0.1:8000/v1 (--host, --port), chat and text completions
            with streams and tools, with continuous batching; see jaxrl_llm/serving/README.md
  export    writes a Hugging Face folder --to=FOLDER, which transformers loads; with --adapter the LoRA adapter alone,
            which PEFT loads; --push=owner/name uploads it to the Hugging Face hub
  compile   compiles the step for a TPU slice that is not present, --topology=v5e-16: memory, exchanges and copies per
            token; exit status 1 if it does not fit or the decode loop copies its cache or exchanges weights;
            --sweep compares meshes; --lengths=900,0.6 expects completions of 900 tokens on average; shapes of 90 models
            of the hub are known without it
  layout    prints the part of each parameter that a device of --topology holds, and its bytes
  fit       fits a sigmoid of compute to a metric of the runs in --workdir (commas between them), with a band;
            --plot=curve.svg draws it
  report    writes report.html of the runs in --workdir (commas between them): results, curves, curriculum, time,
            rollouts; of a folder of runs runs.html, which lists and compares them
  reward_model
            trains config.model as a reward model on pairs, --config.data.source=jsonl --config.data.path=pairs.jsonl
            with prompt, chosen and rejected, and writes it to --to=FOLDER for jaxrl_llm.models.reward_model:score and
            transformers
"""


class Command(Protocol):
  """A module of this package: one mode of the command line."""

  def add_flags(self, parser: argparse.ArgumentParser) -> None:
    """Add the flags that only this mode reads."""

  def run(
    self, arguments: argparse.Namespace, overrides: Sequence[str], processes: Processes
  ) -> int:
    """Run the mode; return the exit status. Raises UserError for bad input."""
    ...


COMMANDS: dict[str, Command] = {
  'eval': evaluate,
  'generate': generate,
  'serve': serve,
  'export': export,
  'compile': compile_mode,
  'layout': layout,
  'fit': fit,
  'report': report,
  'reward_model': reward_model,
}
MODES = ('train', *COMMANDS)


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
  """(flags, overrides of the configuration). Raises SystemExit for --help and for flags that do not exist."""
  overrides = [flag for flag in argv if flag.startswith('--config.')]
  parser, modes = _parser()
  arguments, unknown = parser.parse_known_args(
    [flag for flag in argv if not flag.startswith('--config.')]
  )
  if unknown:
    meant = _with_space(argv, unknown[0]) or _flag_meant(unknown[0], vars(arguments))
    parser.error(f'unrecognized arguments: {" ".join(unknown)}{meant}')
  if arguments.mode not in MODES:
    parser.error(f'--mode={arguments.mode} is unknown; {_near_mode(arguments.mode)}')
  for name, of in modes.items():
    value = getattr(arguments, name)
    if arguments.mode not in of and value != parser.get_default(name):
      meant = _flag_meant(f'--{name}={value}')
      meant = meant if f'.{name}=' in meant else ''  # of that very name
      *others, last = (f'--mode={mode}' for mode in of)
      some = f'{", ".join(others)} and {last}' if others else last
      parser.error(f'--{name} is a flag of {some}, not of --mode={arguments.mode}{meant}')
  arguments.workdir_given = bool(arguments.workdir)
  if not arguments.workdir:
    name = os.path.splitext(os.path.basename(arguments.config))[0] or 'default'
    arguments.workdir = os.path.join('runs', name)
  return arguments, overrides


class _Parser(argparse.ArgumentParser):
  """Errors are one sentence, without the list of all flags."""

  def error(self, message: str) -> NoReturn:
    self.exit(2, f'error: {message}; --help lists the flags.\n')


def _flag_meant(flag: str, names: Iterable[str] = ()) -> str:
  """What an unknown argument means, for an error message: a mode, a config, one of the flags `names`, or a field."""
  from jaxrl_llm.config import paths, suggestions  # --help does not wait for it

  if flag in MODES:
    return f'; did you mean --mode={flag}'
  if flag in paths.names():
    return f'; did you mean --config={flag}'
  meant = suggestions.flag(flag, tuple(names))
  return f'; did you mean {meant}' if meant else ''


def _with_space(argv: Sequence[str], unknown: str) -> str:
  """For '--config.steps 10', which has a space in place of the equals sign, what to write; else ''."""
  for flag, value in itertools.pairwise(argv):
    if value == unknown and flag.startswith('--config.') and '=' not in flag:
      return f'; did you mean {flag}={value}'
  return ''


def _near_mode(mode: str) -> str:
  from jaxrl_llm.config import suggestions

  return suggestions.near(mode, MODES, '--mode=')


# Flags that several modes read.
_SHARED = {
  'to': ('export', 'report', 'reward_model'),
  'dtype': ('export', 'reward_model'),
  'base': ('export', 'generate', 'serve'),
  'topology': ('compile', 'layout'),
  'report': ('compile', 'layout'),
}


def _parser() -> tuple[argparse.ArgumentParser, dict[str, tuple[str, ...]]]:
  """The parser, and the flags that only some modes read: name → modes."""
  parser = _Parser(
    'jaxrl-llm', description=_HELP, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument(
    '--config', default='', help='a file of configs/; default: that of the run in --workdir'
  )
  parser.add_argument(
    '--workdir',
    default='',
    help='the run directory, also gs://… or s3://…; default: runs/<config name>',
  )
  parser.add_argument('--mode', default='train', metavar=f'{{{",".join(MODES)}}}')
  parser.add_argument(
    '--coordinator',
    default='',
    help='host:port of the first process, the same for all; default: detected (Slurm, TPU pod, …)',
  )
  parser.add_argument('--processes', type=int, help='their number; 1 forces single-process mode')
  parser.add_argument('--process', type=int, help='the index of this process, from 0')
  shared, modes = vars(parser.parse_args([])), {}
  for mode, command in COMMANDS.items():
    command.add_flags(parser)
    added = vars(parser.parse_args([])).keys() - shared.keys() - modes.keys()
    modes |= {name: (mode,) for name in sorted(added)}
  parser.add_argument(
    '--to',
    default='',
    help='with --mode=export and reward_model: the folder; default: WORKDIR/export. With --mode=report: the file',
  )
  parser.add_argument(
    '--base',
    action='store_true',
    help='with --mode=export, generate and serve: config.model as it is, whatever was trained in --workdir',
  )
  parser.add_argument(
    '--topology',
    default='',
    help='with --mode=compile (v5e-16; 2xv5e-16 for two slices) and layout (this machine)',
  )
  parser.add_argument(
    '--report', default='', help='with --mode=compile and layout: a JSON file to write'
  )
  return parser, modes | _SHARED

"""The command line: `python -m jaxrl_llm.main --config=configs/dapo.py [--workdir=…] [--config.a.b=v] [--mode=…]`."""

from __future__ import annotations

import argparse
import errno
import os
import sys

from jaxrl_llm.checkpointing import safe_files
from jaxrl_llm.distributed import preemption, watchdog
from jaxrl_llm.types import UserError

MODES = ('train', 'eval', 'generate', 'export', 'compile', 'layout', 'fit', 'report')

_HELP = """Trains a language model by reinforcement learning with verifiable rewards.

Any field of the configuration can be set: --config.steps=100 --config.curriculum.utility.fn=uniform.
Modes: train (resumes what lies in --workdir), eval (accuracy of the newest checkpoint there or of that of --step=…,
or of the model, with intervals, by source and level; --against=OTHER/eval/step_….json: how the two differ), generate
(prints its answers to --prompt=…, or to the lines of --prompts=FILE; without either a conversation), export (the same
as a Hugging Face folder --to=…, which transformers loads; --adapter: of a run with config.lora the adapter alone,
which PEFT loads), compile (the step for a TPU slice that need not be at hand, --topology=v5e-16: memory, exchanges
and copies per token; exit status 1 if it does not fit or the decode loop does what it should not; --sweep: which mesh
is the fastest), layout (which part of which parameter lies on a device of --topology, and how many bytes), fit (the
sigmoid of compute through a metric of the run in --workdir, or of several runs with commas between them, with a band;
--plot=curve.svg draws it), report (what the run in --workdir, or several with commas between them, has done, as one
file report.html there, or --to=FILE: curves, curriculum, time, health in words, every rollout; and in the terminal
what the curriculum has learned).
"""


def main(argv: list[str] | None = None) -> int:
  """Runs one mode. Source: none.

  Bad input ends with one sentence and exit status 2, SIGTERM with all saved and 75, the death of another process of
  the run with one sentence and 76.
  """
  arguments, overrides = _parse(sys.argv[1:] if argv is None else argv)
  watches: list[watchdog.Watchdog] = []
  try:
    status = _told(arguments, overrides, watches)
  except Exception as error:
    for watch in watches:
      watch.failed(error)
    raise
  for watch in watches:
    watch.leave(status, well=status in (0, preemption.EXIT_PREEMPTED))
  return status


def _told(
  arguments: argparse.Namespace, overrides: list[str], watches: list[watchdog.Watchdog]
) -> int:
  """Runs, and turns what is foreseen into a sentence and an exit status."""
  try:
    return _run(arguments, overrides, watches)
  except UserError as error:
    print(f'error: {error}', file=sys.stderr)
    return 2
  except safe_files.NotRegularError as error:
    print(
      f'error: {error.filename} cannot be read: {error.strerror}; put the file back.',
      file=sys.stderr,
    )
    return 2
  except OSError as error:
    where = f'{error.filename or arguments.workdir}'
    if safe_files.is_transient(error):
      print(
        f'error: {where} cannot be read or written ({error}), also when tried again; check the disk or the network '
        'mount, and the same command goes on.',
        file=sys.stderr,
      )
      return 2
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
      raise
    print(
      f'error: the disk of {where} is full ({error}); make room, and the same command goes on.',
      file=sys.stderr,
    )
    return 2
  except preemption.Preempted:
    print(
      'stopped as asked (SIGTERM) and saved; the same command goes on from there.', file=sys.stderr
    )
    return preemption.EXIT_PREEMPTED
  except KeyboardInterrupt:
    print('interrupted; the same command resumes at the last checkpoint.', file=sys.stderr)
    return 130


def _parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
  overrides = [a for a in argv if a.startswith('--config.')]
  parser = argparse.ArgumentParser(
    'jaxrl_llm.main', description=_HELP, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--config', default='', help='a file of configs/; default: the defaults')
  parser.add_argument('--workdir', default='', help='the run folder; default: runs/<config name>')
  parser.add_argument('--mode', default='train', choices=MODES)
  parser.add_argument(
    '--coordinator',
    default='',
    help='host:port of the first of several processes, the same for all; default: as Slurm, a TPU pod, … tell',
  )
  parser.add_argument('--processes', type=int, help='how many there are; 1 alone: no others')
  parser.add_argument('--process', type=int, help='which of them this is, from 0')
  parser.add_argument(
    '--prompt', action='append', default=[], help='with --mode=generate; may be repeated'
  )
  parser.add_argument(
    '--prompts', default='', help='with --mode=generate: a file, one prompt a line'
  )
  parser.add_argument(
    '--samples', type=int, default=1, help='with --mode=generate: answers to each prompt'
  )
  parser.add_argument(
    '--step', type=int, help='with --mode=eval: a checkpoint; default: the newest'
  )
  parser.add_argument(
    '--against', default='', help='with --mode=eval: the file of an evaluation to compare with'
  )
  parser.add_argument(
    '--topology', default='', help='with --mode=compile (v5e-16) and layout (this machine)'
  )
  parser.add_argument(
    '--sweep',
    action='store_true',
    help='with --mode=compile: tries layouts, and names the fastest that fits',
  )
  parser.add_argument(
    '--report', default='', help='with --mode=compile and layout: a JSON file to write'
  )
  parser.add_argument('--metric', default='critic/score/mean', help='with --mode=fit')
  parser.add_argument(
    '--compute', default='seconds', help='with --mode=fit: seconds, tokens or steps'
  )
  parser.add_argument(
    '--skip', type=float, default=0.0, help='with --mode=fit: share of the compute to leave out'
  )
  parser.add_argument(
    '--to',
    default='',
    help='with --mode=export: the folder; default: WORKDIR/export. With --mode=report: the file',
  )
  parser.add_argument(
    '--dtype', default='bfloat16', help='with --mode=export: bfloat16, float16 or float32'
  )
  parser.add_argument(
    '--adapter',
    action='store_true',
    help="with --mode=export of a run with config.lora: the adapter alone, in PEFT's format",
  )
  parser.add_argument(
    '--base',
    action='store_true',
    help='with --mode=export and generate: config.model as it is, whatever was trained in --workdir',
  )
  parser.add_argument('--plot', default='', help='with --mode=fit: a .svg, .png or .pdf to write')
  arguments = parser.parse_args([a for a in argv if not a.startswith('--config.')])
  if not arguments.workdir:
    name = os.path.splitext(os.path.basename(arguments.config))[0] or 'default'
    arguments.workdir = os.path.join('runs', name)
  return arguments, overrides


def _prompts(arguments: argparse.Namespace) -> list[str]:
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
    return []  # a conversation
  if not prompts or arguments.samples < 1:
    raise UserError(
      f'--mode=generate has {len(prompts)} prompts and --samples={arguments.samples}; give at least one of each: '
      '--prompt=TEXT or --prompts=FILE, --samples=1.'
    )
  return prompts


def _check_system() -> None:
  if sys.platform == 'win32':
    raise UserError(
      f'jaxrl_llm runs on Linux and macOS, and this Python is of {sys.platform}; on Windows, install WSL2 '
      '(wsl --install) and run the same command there.'
    )


def _check_target(arguments: argparse.Namespace) -> None:
  """Raises UserError where what the mode writes cannot be written: before the work, not after it."""
  if arguments.mode == 'export':
    folder = _export_folder(arguments)
    if why := safe_files.folder_write_problem(folder):
      raise UserError(
        f'--to={folder} cannot be written: {why}; name a folder that is empty, or that is not there.'
      )
  files = dict(report='to', fit='plot', compile='report', layout='report')
  flag = files.get(arguments.mode, '')
  path = getattr(arguments, flag, '')
  if path and (why := safe_files.file_write_problem(path)):
    raise UserError(f'--{flag}={path} cannot be written: {why}; name another file.')


def _export_folder(arguments: argparse.Namespace) -> str:
  return arguments.to or os.path.join(arguments.workdir, 'export')


def _run(arguments: argparse.Namespace, overrides: list[str], watches: list[watchdog.Watchdog]) -> int:
  """`watches` gets that of the other processes, if there are any."""
  _check_system()
  _check_target(arguments)
  # Imported late: --help and a misspelled flag should not wait for jax.
  if arguments.mode == 'fit':
    from jaxrl_llm.commands import scaling_fit

    folders = arguments.workdir.split(',')
    scaling_fit.run(folders, arguments.metric, arguments.compute, arguments.skip, arguments.plot)
    return 0
  if arguments.mode == 'report':
    from jaxrl_llm import report

    report.write_report(arguments.workdir.split(','), arguments.to)
    return 0
  from jaxrl_llm.config import loading as configs

  config = configs.load(arguments.config, overrides)
  if arguments.mode == 'compile':
    from jaxrl_llm.commands import compile_report, mesh_sweep

    compiled = mesh_sweep.run if arguments.sweep else compile_report.run
    return compiled(config, arguments.topology or 'v5e-16', arguments.report)
  if arguments.mode == 'layout':
    from jaxrl_llm.commands import sharding_report

    sharding_report.run(config, arguments.topology, arguments.report)
    return 0
  prompts = _prompts(arguments) if arguments.mode == 'generate' else []
  import jax

  from jaxrl_llm import train
  from jaxrl_llm.config import validation
  from jaxrl_llm.distributed import cluster

  silent_s = validation.silent_s(config)
  flags = arguments.coordinator, arguments.processes, arguments.process
  watch = cluster.join(*flags, os.environ, silent_s)
  watches += [watch] if watch else []
  cache = os.environ.get('JAXRL_LLM_CACHE') or os.path.expanduser('~/.cache/jaxrl_llm')
  jax.config.update('jax_compilation_cache_dir', os.path.join(cache, 'compiled'))
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.1)
  if arguments.mode == 'generate':
    train.generate_only(config, arguments.workdir, prompts, arguments.samples, arguments.base)
  elif arguments.mode == 'export':
    to, how = _export_folder(arguments), (arguments.dtype, arguments.adapter, arguments.base)
    train.export_only(config, arguments.workdir, to, *how)
  elif arguments.mode == 'eval':
    train.evaluate_only(config, arguments.workdir, arguments.step, arguments.against)
  else:
    train.run(config, arguments.workdir)
  return 0


if __name__ == '__main__':
  sys.exit(main())

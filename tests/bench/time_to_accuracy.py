"""Time to an accuracy: the default job here and in TRL's GRPOTrainer, each run alone on the machine, in turns.

    python -m tests.bench.time_to_accuracy --workdir=runs/accuracy [--arms=ours,trl,trl2] [--seeds=0,1,2]
                                           [--until=PERCENT] [--write] [--smoke]

Needs the extra `parity`. `ours` is `python -m jaxrl_llm.main --config=dapo`, with an empty compilation cache. `trl` has
the same float32 weights, chat template, prompts, reward function with DAPO's length penalty, group size, rollouts a
step, AdamW settings and learning rate, with loss_type='dapo'; it shuffles the prompts, while `ours` chooses them by its
curriculum. `trl2` learns each batch twice (num_iterations=2). TRL has no counterpart of masking groups without reward
variance: they have no advantage there and no length penalty, but their tokens count in the loss's denominator.
`ours2` is `ours` with config.learner.passes=2; it runs where --arms names it.

Every `--every` steps all 400 held-out prompts are completed greedily and graded by the same function. The clock runs
from the start of the process, compilation included, and stands still during evaluations; downloads and the export of
the weights come before it. An accuracy counts as reached at the first of two consecutive evaluations at or above it.

Arms alternate within a seed. A finished arm is a file of `--workdir`/arms and does not run again; an interrupted one
starts again. With `--until` an arm ends once it has reached that accuracy, and higher ones are left out of the first
table. It shows all finished arms, the second those of all steps. `--write` replaces the section of
tests/bench/results/time_to_accuracy.md and draws tests/bench/pictures/time_to_accuracy.svg.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pathlib
import shutil
import subprocess
import sys
import time
from typing import Any

from tests.bench.lib import plots, results, sides, smoke
from tests.bench.lib.accuracy_points import (
  Clock,
  Point,
  Runs,
  first_reached,
  last_table,
  median_curve,
  reached_table,
)

WORKER = pathlib.Path(__file__).with_name('lib') / 'accuracy_trl.py'
PACKAGES = ('trl', 'torch', 'transformers', 'jax', 'jaxlib', 'flax')
ARMS = ('ours', 'trl', 'trl2')
TITLES = {
  'ours': 'jaxrl_llm',
  'ours2': 'jaxrl_llm, 2 passes',
  'trl': 'TRL',
  'trl2': 'TRL, 2 passes',
}
PASSES = {'ours': 1, 'ours2': 2, 'trl': 1, 'trl2': 2}  # over each batch


def overrides(args: argparse.Namespace) -> list[str]:
  """Changes of the config, on both sides."""
  fixed = dict(
    model=args.workdir / 'job' / 'model',
    prompts=4,  # those of a CPU
    steps=args.steps,
    **{
      'evaluation.every': args.every,
      'evaluation.prompts': args.held_out,
      'evaluation.samples': 0,
      'checkpoint.every': args.steps,
    },
  )
  return [f'--config.{name}={value}' for name, value in fixed.items()] + args.more


def prepare(args: argparse.Namespace) -> None:
  """Exports the weights and prompts, unless an earlier call has."""
  folder = args.workdir / 'job'
  wanted = dict(config=args.config, overrides=overrides(args), smoke=args.smoke)
  file = folder / 'settings.json'
  if not file.exists():
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    sides.python(WORKER, 'prepare', folder, args.config, int(args.smoke), *overrides(args))
    write_json(file, wanted)
  elif (found := json.loads(file.read_text())) != wanted:
    raise SystemExit(
      f'--workdir={args.workdir} holds arms of another job ({found}), and this is {wanted}; give another --workdir.'
    )


def command(arm: str, seed: int, folder: pathlib.Path, args: argparse.Namespace) -> list[str]:
  """The command line of an arm."""
  if arm.startswith('ours'):
    line = [sys.executable, '-m', 'jaxrl_llm.main', f'--config={args.config}']
    line += [f'--workdir={folder / "run"}', '--config.monitoring.console=json']
    line += [f'--config.seed={seed}', f'--config.learner.passes={PASSES[arm]}']
    return [*line, *overrides(args)]
  options = [args.workdir / 'job', folder, seed, PASSES[arm], args.microbatch]
  return [sys.executable, str(WORKER), 'train', *map(str, options)]


def run(arm: str, seed: int, args: argparse.Namespace, facts: str) -> dict[str, Any]:
  """Runs an arm in a fresh folder, and returns its record. Raises SystemExit where it fails."""
  folder = args.workdir / 'running' / f'{arm}_{seed}'
  shutil.rmtree(folder, ignore_errors=True)
  folder.mkdir(parents=True)
  # The compiled programs of the command are kept here: its cache is empty at the start of every arm.
  env = sides.environment({'JAXRL_LLM_CACHE': str(folder / 'cache')})
  log = folder / 'stderr.log'
  start_s = time.monotonic()
  clock = Clock(start_s)
  with open(log, 'w') as errors, subprocess.Popen(
    command(arm, seed, folder, args), stdout=subprocess.PIPE, stderr=errors, text=True, env=env
  ) as process:  # fmt: skip
    try:
      has_reached = listen(process, clock, f'{arm}, seed {seed}', args.until)
    finally:
      process.kill()  # after an interruption or --until; else it has ended
  if process.returncode and not has_reached:
    end = '\n'.join(log.read_text(errors='replace').splitlines()[-15:])
    raise SystemExit(f'{arm}, seed {seed}, ended with status {process.returncode}; {log}:\n{end}')
  total_s = time.monotonic() - start_s
  if len(clock.points) < 2:
    raise SystemExit(f'{arm}, seed {seed}, printed no evaluations; see {folder}.')
  record = dict(arm=arm, seed=seed, points=clock.points, facts=facts)
  record |= dict(total_s=total_s, evaluation_s=clock.evaluation_s)
  shutil.rmtree(folder)
  return record


def listen(process: subprocess.Popen, clock: Clock, name: str, until: float) -> bool:
  """Passes each event to the clock as it arrives; returns whether `until` was reached before the process ended."""
  assert process.stdout is not None
  for line in process.stdout:
    now_s = time.monotonic()
    if not line.startswith('{'):
      continue
    count = len(clock.points)
    clock.observe(json.loads(line), now_s)
    if len(clock.points) > count:
      point = clock.points[-1]
      print(
        f'{name}: step {point.step}, {point.seconds:.1f} s, {point.rollouts} rollouts, {point.accuracy:.1f} %',
        file=sys.stderr, flush=True,
      )  # fmt: skip
      if first_reached(clock.points, until):
        return True
  process.wait()
  return False


def write_json(path: pathlib.Path, value: Any) -> None:
  """Writes the file at once: an interruption leaves none, or a whole one."""
  part = path.with_name(f'{path.name}.part')
  part.write_text(json.dumps(value, indent=1))
  os.replace(part, path)


def finished(workdir: pathlib.Path) -> tuple[Runs, list[dict[str, Any]]]:
  """(the points of all finished arms, their records), by arm and seed."""
  records = [json.loads(path.read_text()) for path in sorted((workdir / 'arms').glob('*.json'))]
  runs: dict[str, list[list[Point]]] = {}
  for record in sorted(records, key=lambda x: x['seed']):
    runs.setdefault(record['arm'], []).append([Point(*x) for x in record['points']])
  return runs, records


def report(args: argparse.Namespace) -> str:
  """The section, in Markdown."""
  runs, records = finished(args.workdir)
  seeds = {arm: [r['seed'] for r in records if r['arm'] == arm] for arm in TITLES}
  whole = {arm: [x for x in found if x[-1].step == args.steps] for arm, found in runs.items()}
  lines = [
    f'{args.config}, {args.steps} steps, {args.held_out} held-out prompts every {args.every} steps. Medians over seeds '
    f'({", ".join(f"{TITLES[arm]}: {found}" for arm, found in seeds.items() if found)}); — is not reached.',
    '',
    reached_table(runs, [x for x in args.thresholds if x <= args.until], TITLES),
    '',
    last_table(whole, TITLES),
    '',
    *sorted({record['facts'] for record in records}),
  ]
  return '\n'.join(lines)


def draw(workdir: pathlib.Path, path: pathlib.Path) -> None:
  """Accuracy against seconds and against rollouts: a thin line for each seed, a thick one for their median."""
  runs, _ = finished(workdir)
  with plots.svg(path, panels=2, width=9.0) as (_, panels):
    for axes, field in zip(panels, ('seconds', 'rollouts'), strict=True):
      for number, (arm, title) in enumerate(TITLES.items()):
        color = f'C{number}'
        for points in runs.get(arm, []):
          x = [getattr(p, field) for p in points]
          axes.plot(x, [p.accuracy for p in points], color=color, alpha=0.3, lw=0.8)
        if runs.get(arm):
          axes.plot(*median_curve(runs[arm], field), color=color, lw=2, label=title)
      axes.set(xlabel=field, xlim=(0, None), ylim=(0, None))
    panels[0].set_ylabel('held-out accuracy, greedy, percent')
    panels[0].legend(frameon=False)


def parse() -> argparse.Namespace:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  names = lambda text: text.split(',')  # noqa: E731
  integers = lambda text: [int(x) for x in text.split(',')]  # noqa: E731
  numbers = lambda text: [float(x) for x in text.split(',')]  # noqa: E731
  parser.add_argument('--workdir', type=pathlib.Path, default=pathlib.Path('runs/accuracy'))
  parser.add_argument('--arms', type=names, default=list(ARMS), help=f'of: {", ".join(TITLES)}')
  parser.add_argument('--seeds', type=integers, default=[0, 1, 2])
  parser.add_argument('--steps', type=int, default=60)
  parser.add_argument('--every', type=int, default=4, help='steps between evaluations')
  parser.add_argument('--held-out', type=int, default=400, help='prompts of an evaluation')
  parser.add_argument('--thresholds', type=numbers, default=[15.0, 20.0, 25.0, 30.0, 35.0, 40.0])
  parser.add_argument('--until', type=float, default=math.inf, help='percent at which an arm ends')
  parser.add_argument('--microbatch', type=int, default=32, help='of TRL; see step_time')
  parser.add_argument('--write', action='store_true', help='write results/time_to_accuracy.md')
  parser.set_defaults(config='dapo', more=[])
  tiny = [f'--config.{x}' for x in ('sft.steps=0', 'rollouts=4', 'data.size=64')]
  sizes = dict(config='tiny', more=tiny, seeds=[0], steps=4, every=2, held_out=8, write=True)
  args = smoke.parse(parser, **sizes, thresholds=[0.0])
  if args.smoke:
    args.workdir = pathlib.Path(results.smoke_folder())
  args.workdir = args.workdir.absolute()
  for arm in args.arms:
    if arm not in TITLES:
      parser.error(f'--arms: {arm!r} is unknown; choose from: {", ".join(TITLES)}')
  if args.steps % args.every:
    parser.error(f'--every={args.every} must divide --steps={args.steps}')
  return args


def main() -> None:
  args = parse()
  facts = results.facts(PACKAGES, results.load_average())
  if args.smoke:
    sides.prepare_smoke()
  prepare(args)
  (args.workdir / 'arms').mkdir(exist_ok=True)
  for seed in args.seeds:
    for arm in args.arms:
      file = args.workdir / 'arms' / f'{arm}_{seed}.json'
      if not file.exists():
        write_json(file, run(arm, seed, args, facts))
  section = report(args)
  print(section)
  if args.write:
    results.write(results.path('time_to_accuracy.md', args.smoke), 'default job', section)
    if plots.available():
      draw(args.workdir, results.path('time_to_accuracy.svg', args.smoke))


if __name__ == '__main__':
  main()

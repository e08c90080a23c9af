"""Time of one GRPO step: TRL's GRPOTrainer on torch, and Tunix's GRPOLearner, against this program on the same work.

    python -m tests.bench.step_time [--shapes=full,default,long] [--rounds=5] [--write] [--json=out.json] [--smoke]
      [--tunix-python=ENVIRONMENT/bin/python]

Needs the extra `parity`. SmolLM2-135M in float32; 4 prompts with 8 rollouts each, one AdamW update, no KL term, no
gradient checkpointing. A step covers everything from prompts to new weights: sampling, decoding to text, grading,
update. Each side is a process of its own, and the sides alternate: TRL's step, this program's step, then its two halves
as separate programs, on the same prompts. Ratios are those of pairs of a round. TRL runs with the fastest of several
micro-batches, found by a probe before; so does Tunix. The shapes are

  full      prompts of 64 tokens; each completion has 32 tokens (no end token stops a row); every group is mixed
  default   prompts and objective of configs/dapo.py; completions end by themselves, at most 16 tokens; 54 % of the
            groups are mixed, chosen by prompt
  long      prompts of 64 tokens; lengths are log-normal (mean 64, cap 256), drawn by prompt and rollout, and the same
            on both sides: a logits processor ends TRL's rows, the cap of each row ours; half of the groups are mixed

The reward of a mixed group is a hash of prompt, rollout and text, so that it differs between any two rollouts; that of
another group is 0. This program starts twice: the first step of the first start compiles everything, that of the
second finds the compilation cache. `--write` replaces the sections of tests/bench/results/step_time.md.

Tunix takes part where `--tunix-python` names the interpreter of an environment with google-tunix (its versions of jax
and flax may be others), and in shapes that it can do: its sampler has no length for each row, so `long` is without it.
The benchmark ends if Tunix's logits on the first prompts differ from this program's by more than 0.001.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import shutil
import statistics
import sys
import tempfile
from typing import Any, NamedTuple

from tests.bench.lib import results, sides, smoke, step_shapes
from tests.bench.lib.sides import Side

WORKERS = pathlib.Path(__file__).with_name('lib') / 'step_workers.py'
TUNIX = WORKERS.with_name('tunix_step.py')
LOGIT_GAP = 1e-3  # the most by which Tunix's logits may differ: sums of float32 in another order
NAMES = {'trl': 'TRL', 'tunix': 'Tunix', 'ours': 'jaxrl_llm'}
PACKAGES = ('trl', 'torch', 'transformers', 'jax', 'jaxlib', 'flax')
# Title, key of a row, format, and which of our commands is measured for it.
LINES = (
  ('step, wall seconds', 'step_wall_s', '.2f', 'ours'),
  ('step, CPU-seconds', 'step_cpu_s', '.2f', 'ours'),
  ('rollout, wall seconds', 'rollout_wall_s', '.2f', 'split'),
  ('rollout, CPU-seconds', 'rollout_cpu_s', '.2f', 'split'),
  ('update, wall seconds', 'update_wall_s', '.2f', 'split'),
  ('update, CPU-seconds', 'update_cpu_s', '.2f', 'split'),
  ('peak memory of a step, GiB', 'peak_gib', '.2f', 'ours'),
  ('tokens sampled', 'tokens', '.0f', 'ours'),
  ('mixed groups', 'mixed', '.1f', 'ours'),
  ('entropy of the sampled tokens, nats', 'entropy', '.2f', 'ours'),
)
START_LINES = (
  ('peak memory while starting, GiB', 'start_peak_gib', '.2f'),
  ('load, seconds', 'load_s', '.1f'),
  ('first step, compilation included, seconds', 'cold_s', '.1f'),
  ('first step, programs from the cache, seconds', 'warm_s', '.1f'),
)


class Starter(NamedTuple):
  """Starts the workers of a shape; jax keeps this program's compiled programs below `folder`."""

  folder: pathlib.Path
  shape: str
  tunix_python: str

  def start(self, name: str, options: list) -> Side:
    """A worker of the side `name`."""
    if name == 'tunix':
      return self.tunix('train', *options)
    cache = sides.compilation_cache(self.folder / f'compiled_{self.shape}')
    arguments = [name, self.folder, self.shape, *options]
    return Side(WORKERS, arguments, cache if name == 'ours' else None)

  def tunix(self, command: str, *options: object) -> Side:
    """A worker in the environment of Tunix."""
    arguments = [command, self.folder, self.shape, *options]
    return Side(TUNIX, arguments, interpreter=self.tunix_python)

  def check_tunix(self) -> dict[str, Any]:
    """Versions in Tunix's environment and the gap between the logits. Raises SystemExit for a gap above LOGIT_GAP."""
    sides.python(WORKERS, 'logits', self.folder, self.shape)
    worker = self.tunix('check')
    worker.stop()
    facts = worker.ready
    log(f'{self.shape}: logits of Tunix differ by at most {facts["gap"]:.2e}; {facts["versions"]}')
    if not facts['gap'] <= LOGIT_GAP:  # NaN is refused too
      raise SystemExit(
        f"the logits of Tunix's model differ by {facts['gap']:.2e} from those of jaxrl_llm, more than {LOGIT_GAP}: "
        'they are different models, and their times do not compare. Leave out --tunix-python.'
      )
    return facts


def probe(starter: Starter, name: str, sizes: list[int], rounds: int) -> dict[int, float]:
  """Median wall seconds of a side's step for each micro-batch, measured one after the other."""
  found = {}
  for size in sizes:
    side = starter.start(name, [size])
    side.call('step')
    found[size] = statistics.median(side.call('step')['step_wall_s'] for _ in range(rounds))
    log(f'{starter.shape}: {NAMES[name]} with micro-batch {size}: {found[size]:.2f} s')
    side.stop()
  return found


def started(starter: Starter, name: str, options: list, warmup: int) -> tuple[Side, dict]:
  """A side after its warm-up steps, and the costs of its start; ours starts twice, for the compilation cache."""
  side = starter.start(name, options)
  rows = [side.call('step')]
  costs = {'load_s': side.load_s, 'cold_s': rows[0]['step_wall_s']}
  if name == 'ours':
    side.stop()
    side = starter.start(name, options)
    rows = [side.call('step')]
    costs['warm_s'] = rows[0]['step_wall_s']
  rows += [side.call('step') for _ in range(warmup - 1)]
  costs['start_peak_gib'] = rows[-1]['peak_gib']
  for _ in range(warmup if name == 'ours' else 0):
    side.call('split')  # the first call compiles
  return side, costs


def sides_of(shape: step_shapes.Shape, args: argparse.Namespace) -> list[str]:
  """The sides that measure a shape, in the order of a round; Tunix is left out with a sentence."""
  if not args.tunix_python:
    log(
      'Tunix is left out: --tunix-python names the interpreter of an environment with google-tunix.'
    )
  elif shape.tunix is None:
    log('Tunix is left out of this shape: its sampler has no length for each row.')
  else:
    return ['tunix', *args.sides]
  return args.sides


def measure(folder: pathlib.Path, name: str, args: argparse.Namespace) -> dict[str, Any]:
  """All rounds of a shape."""
  shape = step_shapes.shape(name, args.smoke)
  starter, names = Starter(folder, name, args.tunix_python), sides_of(shape, args)
  tunix = starter.check_tunix() if 'tunix' in names else {}
  sizes = args.microbatches or list(shape.microbatches)
  options, probed = {'ours': args.set}, {}
  for side in names:
    if side != 'ours':
      probed[side] = probe(starter, side, sizes, args.probe_rounds) if len(sizes) > 1 else {}
      options[side] = [min(probed[side], key=probed[side].__getitem__, default=sizes[0])]
  running: dict[str, Side] = {}
  start_costs, rows = {}, {side: [] for side in names}
  with contextlib.ExitStack() as stack:
    for side in names:
      running[side], start_costs[side] = started(starter, side, options[side], args.warmup)
      stack.callback(running[side].kill)
    if 'ours' in running:
      rows['split'] = []
    for number in range(args.rounds):
      for kind in rows:
        side = running['ours' if kind == 'split' else kind]
        side.call('forget')
        rows[kind].append(side.call('split' if kind == 'split' else 'step'))
        log(f'{name}, round {number}: {kind} {rows[kind][-1]}')
    threads = {side: worker.ready['threads'] for side, worker in running.items()}
    for worker in running.values():
      worker.stop()
  microbatch = {side: options[side][0] for side in probed}
  return dict(
    rows=rows, start=start_costs, probe=probed, microbatch=microbatch, threads=threads, tunix=tunix
  )


def log(text: str) -> None:
  print(text, file=sys.stderr, flush=True)


def report(result: dict[str, Any], title: str, facts: str) -> str:
  """The section of a shape, in Markdown."""
  rows, starts, lines = result['rows'], result['start'], []
  others = [side for side in NAMES if side in rows and side != 'ours']
  for name, key, form, ours in LINES:
    column = lambda side: [row[key] for row in rows.get(side, []) if key in row]  # noqa: B023, E731
    columns = [*map(column, others), column(ours)]
    cells = [format(statistics.median(x), form) if x else '—' for x in columns]
    lines.append([name, *cells, *(paired_ratio(x, columns[-1]) for x in columns[:-1])])
  for name, key, form in START_LINES:
    costs = [starts.get(side, {}).get(key) for side in (*others, 'ours')]
    cells = ['—' if x is None else format(x, form) for x in costs]
    ratios = ['—' if None in (x, costs[-1]) else f'{x / costs[-1]:.2f}' for x in costs[:-1]]
    lines.append([name, *cells, *ratios])
  count = max(map(len, rows.values()), default=0)
  titles = [NAMES[side] for side in (*others, 'ours')]
  ratios = [f'{NAMES[side]} / jaxrl_llm (lowest – highest)' for side in others]
  table = results.table([f'median of {count} rounds', *titles, *ratios], lines)
  return '\n'.join([f'## {title}', '', table, '', *notes(result), facts])


def paired_ratio(theirs: list[float], ours: list[float]) -> str:
  """The median of the ratios of a round, with the lowest and the highest one."""
  if not theirs or not ours or not all(ours):
    return '—'
  ratios = [a / b for a, b in zip(theirs, ours, strict=True)]
  return f'{statistics.median(ratios):.2f} ({min(ratios):.2f} – {max(ratios):.2f})'


def notes(result: dict[str, Any]) -> list[str]:
  """Lines below the table: seconds of each round, threads, micro-batches, and what was checked of Tunix."""
  out = []
  for side, threads in result['threads'].items():
    seconds = ', '.join(f'{row["step_wall_s"]:.2f}' for row in result['rows'][side])
    out.append(f'{NAMES[side]}: steps of {seconds} s; {threads} threads.')
  for side, size in result['microbatch'].items():
    tried = ', '.join(f'{size}: {s:.2f} s' for size, s in result['probe'][side].items())
    out.append(f'{NAMES[side]} micro-batch {size} ({tried or "the only one tried"}).')
  if facts := result['tunix']:
    out.append(f"Tunix's logits differ by at most {facts['gap']:.1e}; {facts['versions']}.")
  return out


def parse() -> argparse.Namespace:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  names = lambda text: text.split(',')  # noqa: E731
  numbers = lambda text: [int(x) for x in text.split(',')]  # noqa: E731
  parser.add_argument('--shapes', type=names, default=list(step_shapes.SHAPES))
  parser.add_argument('--rounds', type=int, default=5, help='measured steps of each side')
  parser.add_argument('--warmup', type=int, default=2, help='steps before them')
  parser.add_argument('--probe-rounds', type=int, default=2, help='for each micro-batch tried')
  parser.add_argument(
    '--microbatches', type=numbers, help='of TRL and Tunix, to try; default: by shape'
  )
  parser.add_argument('--sides', type=names, default=['trl', 'ours'], help='without Tunix')
  parser.add_argument(
    '--tunix-python', default='', help='an interpreter that has google-tunix; adds Tunix'
  )
  parser.add_argument(
    '--set', action='append', default=[], help='an override of our config: rollout.slots=16'
  )
  parser.add_argument('--write', action='store_true', help='write results/step_time.md')
  parser.add_argument('--json', type=pathlib.Path, help='where to write every number')
  args = smoke.parse(parser, rounds=1, warmup=1, write=True)
  if args.tunix_python and not shutil.which(args.tunix_python):
    parser.error(
      f'--tunix-python: {args.tunix_python!r} cannot be run; name the interpreter of an environment with google-tunix'
    )
  for name in args.shapes:
    if name not in step_shapes.SHAPES:
      parser.error(f'--shapes: {name!r} is unknown; choose from: {", ".join(step_shapes.SHAPES)}')
  return args


def main() -> None:
  args = parse()
  facts = results.facts(PACKAGES, results.load_average())
  found, file = {}, results.path('step_time.md', args.smoke)
  if args.smoke:
    sides.prepare_smoke()
  with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    sides.python(WORKERS, 'prepare', folder, int(args.smoke), *args.shapes)
    for shape in args.shapes:
      found[shape] = measure(folder, shape, args)
      title = f'{shape}: {step_shapes.SHAPES[shape].title}'
      section = report(found[shape], title, facts)
      print(section, flush=True)
      if args.write:
        results.write(file, shape, section)
  if args.json:
    args.json.write_text(json.dumps(dict(facts=facts, shapes=found), indent=2))


if __name__ == '__main__':
  main()

"""Time of one GRPO step: TRL's GRPOTrainer on torch against this program, same weights and work.

    python -m tests.bench.step_time [--shapes=full,default,long] [--rounds=5] [--write] [--json=out.json] [--smoke]

Needs the extra `parity`. SmolLM2-135M in float32; 4 prompts with 8 rollouts each, one AdamW update, no KL term, no
gradient checkpointing. A step covers everything from prompts to new weights: sampling, decoding to text, grading,
update. Each side is a process of its own, and the sides alternate: TRL's step, this program's step, then its two halves
as separate programs, on the same prompts. Ratios are those of pairs of a round. TRL runs with the fastest of several
micro-batches, found by a probe before. The shapes are

  full      prompts of 64 tokens; each completion has 32 tokens (no end token stops a row); every group is mixed
  default   prompts and objective of configs/dapo.py; completions end by themselves, at most 16 tokens; 54 % of the
            groups are mixed, chosen by prompt
  long      prompts of 64 tokens; lengths are log-normal (mean 64, cap 256), drawn by prompt and rollout, and the same
            on both sides: a logits processor ends TRL's rows, the cap of each row ours; half of the groups are mixed

The reward of a mixed group is a hash of prompt, rollout and text, so that it differs between any two rollouts; that of
another group is 0. This program starts twice: the first step of the first start compiles everything, that of the
second finds the compilation cache. `--write` replaces the sections of tests/bench/results/step_time.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import statistics
import sys
import tempfile
from typing import Any

from tests.bench.lib import results, sides, smoke, step_shapes
from tests.bench.lib.sides import Side

WORKERS = pathlib.Path(__file__).with_name('lib') / 'step_workers.py'
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


def start(name: str, folder: pathlib.Path, shape: str, options: list) -> Side:
  """A worker of the side `name`; jax keeps compiled programs below `folder`."""
  cache = sides.compilation_cache(folder / f'compiled_{shape}')
  return Side(WORKERS, [name, folder, shape, *options], cache if name == 'ours' else None)


def probe(folder: pathlib.Path, shape: str, sizes: list[int], rounds: int) -> dict[int, float]:
  """Median wall seconds of TRL's step for each micro-batch, measured one after the other."""
  found = {}
  for size in sizes:
    side = start('trl', folder, shape, [size])
    side.call('step')
    found[size] = statistics.median(side.call('step')['step_wall_s'] for _ in range(rounds))
    log(f'{shape}: TRL with micro-batch {size}: {found[size]:.2f} s')
    side.stop()
  return found


def started(
  name: str, folder: pathlib.Path, shape: str, options: list, warmup: int
) -> tuple[Side, dict]:
  """A side after its warm-up steps, and the costs of its start; ours starts twice, for the compilation cache."""
  side = start(name, folder, shape, options)
  rows = [side.call('step')]
  costs = {'load_s': side.load_s, 'cold_s': rows[0]['step_wall_s']}
  if name == 'ours':
    side.stop()
    side = start(name, folder, shape, options)
    rows = [side.call('step')]
    costs['warm_s'] = rows[0]['step_wall_s']
  rows += [side.call('step') for _ in range(warmup - 1)]
  costs['start_peak_gib'] = rows[-1]['peak_gib']
  for _ in range(warmup if name == 'ours' else 0):
    side.call('split')  # the first call compiles
  return side, costs


def measure(folder: pathlib.Path, name: str, args: argparse.Namespace) -> dict[str, Any]:
  """All rounds of a shape."""
  sizes = args.microbatches or step_shapes.shape(name, args.smoke).microbatches
  probed = {}
  if 'trl' in args.sides and len(sizes) > 1:
    probed = probe(folder, name, sizes, args.probe_rounds)
  best = min(probed, key=probed.__getitem__) if probed else sizes[0]
  options = {'trl': [best], 'ours': args.set}
  running: dict[str, Side] = {}
  start_costs, rows = {}, {side: [] for side in args.sides}
  with contextlib.ExitStack() as stack:
    for side in args.sides:
      running[side], start_costs[side] = started(side, folder, name, options[side], args.warmup)
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
  return dict(rows=rows, start=start_costs, probe=probed, microbatch=best, threads=threads)


def log(text: str) -> None:
  print(text, file=sys.stderr, flush=True)


def report(result: dict[str, Any], title: str, facts: str) -> str:
  """The section of a shape, in Markdown."""
  rows, lines = result['rows'], []
  for name, key, form, ours in LINES:
    pair = [[r[key] for r in rows.get(side, []) if key in r] for side in ('trl', ours)]
    cells = [format(statistics.median(x), form) if x else '—' for x in pair]
    lines.append([name, *cells, paired_ratio(*pair)])
  for name, key, form in START_LINES:
    pair = [result['start'].get(side, {}).get(key) for side in ('trl', 'ours')]
    cells = ['—' if x is None else format(x, form) for x in pair]
    lines.append([name, *cells, '—' if None in pair else f'{pair[0] / pair[1]:.2f}'])
  count = max(map(len, rows.values()), default=0)
  header = [f'median of {count} rounds', 'TRL', 'jaxrl_llm', 'TRL / jaxrl_llm (lowest – highest)']
  table = results.table(header, lines)
  return '\n'.join([f'## {title}', '', table, '', *notes(result), facts])


def paired_ratio(theirs: list[float], ours: list[float]) -> str:
  """The median of the ratios of a round, with the lowest and the highest one."""
  if not theirs or not ours or not all(ours):
    return '—'
  ratios = [a / b for a, b in zip(theirs, ours, strict=True)]
  return f'{statistics.median(ratios):.2f} ({min(ratios):.2f} – {max(ratios):.2f})'


def notes(result: dict[str, Any]) -> list[str]:
  """Lines below the table: seconds of each round, threads, TRL's micro-batch."""
  names = {'trl': 'TRL', 'ours': 'jaxrl_llm'}
  out = []
  for side, threads in result['threads'].items():
    seconds = ', '.join(f'{row["step_wall_s"]:.2f}' for row in result['rows'][side])
    out.append(f'{names[side]}: steps of {seconds} s; {threads} threads.')
  if 'trl' in result['threads']:
    tried = ', '.join(f'{size}: {s:.2f} s' for size, s in result['probe'].items())
    out.append(f'TRL micro-batch {result["microbatch"]} ({tried or "the only one tried"}).')
  return out


def parse() -> argparse.Namespace:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  names = lambda text: text.split(',')  # noqa: E731
  numbers = lambda text: [int(x) for x in text.split(',')]  # noqa: E731
  parser.add_argument('--shapes', type=names, default=list(step_shapes.SHAPES))
  parser.add_argument('--rounds', type=int, default=5, help='measured steps of each side')
  parser.add_argument('--warmup', type=int, default=2, help='steps before them')
  parser.add_argument('--probe-rounds', type=int, default=2, help='for each micro-batch tried')
  parser.add_argument('--microbatches', type=numbers, help='of TRL, to try; default: by shape')
  parser.add_argument('--sides', type=names, default=['trl', 'ours'])
  parser.add_argument(
    '--set', action='append', default=[], help='an override of our config: rollout.slots=16'
  )
  parser.add_argument('--write', action='store_true', help='write results/step_time.md')
  parser.add_argument('--json', type=pathlib.Path, help='where to write every number')
  args = smoke.parse(parser, rounds=1, warmup=1, write=True)
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

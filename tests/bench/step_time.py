"""Time of one GRPO step: TRL's GRPOTrainer on torch against this program, same weights and work.

    python -m tests.bench.step_time [--rounds=5] [--json=out.json] [--smoke]   (needs the extra `parity`)

SmolLM2-135M in float32; 4 prompts of 64 tokens, 8 rollouts each of exactly 32 tokens (no end token
stops a row), one AdamW update, beta 0, no gradient checkpointing. The step of each side covers everything
from prompts to new weights: sampling, decoding to text, grading, update. Each side is a separate process with
its own CPU-seconds and memory, and the two alternate: A B A B. TRL runs with the fastest of several
micro-batches, found by a probe before the main run.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import metadata

from tests.bench.lib import smoke

ROOT = pathlib.Path(__file__).parents[2]
WORKERS = str(pathlib.Path(__file__).with_name('lib') / 'step_workers.py')


def environment() -> dict[str, str]:
  # Without XLA_FLAGS: the virtual devices of the test suite would shard the work.
  inherited = {k: v for k, v in os.environ.items() if k != 'XLA_FLAGS'}
  return inherited | {'JAX_PLATFORMS': 'cpu', 'HF_HUB_OFFLINE': '1', 'PYTHONPATH': str(ROOT)}


class Side:
  """A worker process that runs one command at a time."""

  def __init__(self, name: str, folder: pathlib.Path, *options: int):
    command = [sys.executable, WORKERS, name, str(folder), *map(str, options)]
    env = environment()
    start = time.perf_counter()
    self._process = subprocess.Popen(
      command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    )
    self.ready = self._read()
    self.load_s = time.perf_counter() - start

  def call(self, command: str = 'step') -> dict:
    print(command, file=self._process.stdin, flush=True)
    return self._read()

  def stop(self) -> None:
    self._process.stdin.close()
    self._process.wait(60)

  def _read(self) -> dict:
    line = self._process.stdout.readline()
    if not line:
      raise SystemExit(f'a worker ended with status {self._process.wait()}; see its output above.')
    return json.loads(line)


def warm(side: Side, steps: int) -> dict:
  rows = [side.call() for _ in range(steps)]
  start = {'load_s': side.load_s, 'first_step_s': rows[0]['step_wall_s']}
  start['start_peak_gib'] = rows[-1]['peak_gib']
  side.call('forget')
  return start


def probe(folder: pathlib.Path, microbatches: list[int], rounds: int) -> dict[int, float]:
  """Median wall seconds of TRL's step for each micro-batch, measured one after the other."""
  found = {}
  for size in microbatches:
    side = Side('trl', folder, size)
    warm(side, 1)
    found[size] = statistics.median(side.call()['step_wall_s'] for _ in range(rounds))
    print(f'probe: TRL, micro-batch {size}: {found[size]:.2f} s', file=sys.stderr, flush=True)
    side.stop()
  return found


def run(folder: pathlib.Path, args: argparse.Namespace) -> dict:
  probed = probe(folder, args.microbatches, args.probe_rounds) if len(args.microbatches) > 1 else {}
  best = min(probed, key=probed.get) if probed else args.microbatches[0]
  sides = {'trl': lambda: Side('trl', folder, best), 'ours': lambda: Side('ours', folder)}
  sides = {name: sides[name]() for name in args.sides}
  start = {name: warm(side, args.warmup) for name, side in sides.items()}
  rows = {name: [] for name in sides}
  for i in range(args.rounds):
    for name, side in sides.items():
      rows[name].append(side.call())
      print(f'round {i}: {name} {rows[name][-1]}', file=sys.stderr, flush=True)
  if 'ours' in sides:  # the first call compiles; the halves of TRL were timed in its rounds
    rows['split'] = [sides['ours'].call('split') for _ in range(1 + args.rounds)][1:]
  threads = {name: side.ready['threads'] for name, side in sides.items()}
  for side in sides.values():
    side.stop()
  return {'rows': rows, 'start': start, 'probe': probed, 'microbatch': best, 'threads': threads}


def report(result: dict) -> str:
  """The table, in Markdown."""
  rows, start = result['rows'], result['start']
  value = {
    name: {k: statistics.median(r[k] for r in rows[name]) for k in rows[name][0]} | start[name]
    for name in start
  }
  if 'split' in rows:
    halves = rows['split'][0].keys() - {'tokens', 'entropy', 'peak_gib'}
    value['ours'] |= {k: statistics.median(r[k] for r in rows['split']) for k in halves}
  lines = [
    ('wall seconds per step', 'step_wall_s', '.2f'),
    ('CPU-seconds per step', 'step_cpu_s', '.2f'),
    ('rollout alone, wall seconds', 'rollout_wall_s', '.2f'),
    ('update alone, wall seconds', 'update_wall_s', '.2f'),
    ('rollout alone, CPU-seconds', 'rollout_cpu_s', '.2f'),
    ('update alone, CPU-seconds', 'update_cpu_s', '.2f'),
    ('peak memory while stepping, GiB', 'peak_gib', '.2f'),
    ('peak memory while starting, GiB', 'start_peak_gib', '.2f'),
    ('load, seconds', 'load_s', '.1f'),
    ('first step (with compilation), seconds', 'first_step_s', '.1f'),
    ('tokens generated per step', 'tokens', '.0f'),
    ('entropy of the sampled tokens, nats', 'entropy', '.2f'),
  ]
  out = ['| median of the rounds | TRL | jaxrl_llm | TRL / jaxrl_llm |', '|---|---|---|---|']
  for title, key, form in lines:
    pair = [value.get(name, {}).get(key) for name in ('trl', 'ours')]
    cells = ['—' if x is None else format(x, form) for x in pair]
    ratio = '—' if None in pair else f'{pair[0] / pair[1]:.2f}'
    out.append(f'| {title} | {cells[0]} | {cells[1]} | {ratio} |')
  return '\n'.join(out + [''] + notes(result))


def notes(result: dict) -> list[str]:
  rows = result['rows']
  out = [
    f'{name}: {len(rows[name])} rounds, wall '
    + ', '.join(f'{r["step_wall_s"]:.2f}' for r in rows[name])
    + f' s; {threads} threads.'
    for name, threads in result['threads'].items()
  ]
  if {'trl', 'ours'} <= rows.keys():
    for kind in ('wall', 'cpu'):
      pairs = zip(rows['trl'], rows['ours'], strict=True)
      ratios = [a[f'step_{kind}_s'] / b[f'step_{kind}_s'] for a, b in pairs]
      out.append(f'Ratio of {kind} in each round: {min(ratios):.2f} to {max(ratios):.2f}.')
  tried = ', '.join(f'{size}: {s:.2f} s' for size, s in result['probe'].items()) or 'not probed'
  out.append(f'TRL micro-batch {result["microbatch"]} ({tried}).')
  out.append(f'Load average before the run: {result["load"]:.2f}; above 0.5 discard the numbers.')
  out.append(f'{result["machine"]}; {result["versions"]}; {result["date"]}.')
  return out


def machine() -> str:
  with contextlib.suppress(OSError, StopIteration):
    lines = pathlib.Path('/proc/cpuinfo').read_text().splitlines()
    name = next(line.split(':')[1].strip() for line in lines if line.startswith('model name'))
    return f'{name}, {os.cpu_count()} cores'
  return f'{platform.processor() or platform.machine()}, {os.cpu_count()} cores'


def parse() -> argparse.Namespace:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--rounds', type=int, default=5, help='measured steps of each side')
  parser.add_argument('--warmup', type=int, default=2, help='steps before them')
  parser.add_argument('--probe-rounds', type=int, default=2, help='for each micro-batch tried')
  numbers = lambda text: [int(x) for x in text.split(',')]  # noqa: E731
  parser.add_argument('--microbatches', type=numbers, default=[32, 16, 8], help='of TRL, to try')
  parser.add_argument('--sides', type=lambda text: text.split(','), default=['trl', 'ours'])
  parser.add_argument('--json', type=pathlib.Path, help='where to write every number')
  return smoke.parse(parser, rounds=1, warmup=1, microbatches=[32])


def main() -> None:
  args = parse()
  load = os.getloadavg()[0]
  with tempfile.TemporaryDirectory() as folder:
    subprocess.run(
      [sys.executable, WORKERS, 'prepare', folder, str(int(args.smoke))],
      check=True,
      env=environment(),
    )
    result = run(pathlib.Path(folder), args)
  names = ('trl', 'torch', 'transformers', 'jax', 'jaxlib', 'flax')
  result['versions'] = ', '.join(f'{name} {metadata.version(name)}' for name in names)
  result['machine'] = machine()
  result['load'] = load
  result['date'] = datetime.date.today().isoformat()
  print(report(result))
  if args.json:
    args.json.write_text(json.dumps(result, indent=2))


if __name__ == '__main__':
  main()

"""Time of the update against learned tokens: the default job's batches, from no mixed group to all of them mixed.

    python -m tests.bench.update_cost [--batches=8] [--rounds=5] [--set=learner.…=…] [--write] [--smoke]

SmolLM2-135M in float32 under the objective of configs/dapo.py, which masks groups without reward variance: 4 prompts of
the default job × 8 rollouts of at most 16 tokens that end by themselves. Learned tokens are the tokens of the mixed
groups. One compiled update learns all batches in turn, `--rounds` times; the first turn is not measured. Printed are
the median seconds of each batch and the least-squares line through them: the slope is the time of a learned token, the
intercept what an update costs without any. `--write` replaces the section of tests/bench/results/update_cost.md and
draws tests/bench/pictures/update_cost.svg (with the extra `plot`).
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import tempfile
from typing import Any

os.environ.setdefault('JAX_PLATFORMS', 'cpu')

import jax
import numpy as np

from jaxrl_llm.distributed import host_memory
from tests.bench.lib import plots, results, smoke, step_shapes, step_workers, trl_jobs
from tests.bench.lib.line_fit import Line, fit
from tests.bench.lib.step_workers import Stepper

PACKAGES = ('jax', 'jaxlib', 'flax')


def mixed_counts(prompts: int, batches: int) -> list[int]:
  """The number of mixed groups of each batch: from none to all, in equal steps as far as they are whole."""
  return [round(i * prompts / (batches - 1)) for i in range(batches)]


def make_stepper(
  folder: pathlib.Path, is_tiny: bool, prompts: int, overrides: list[str]
) -> Stepper:
  """The default job's step in which every group is mixed, with `prompts` prompts."""
  tokenizer = trl_jobs.export_model(folder, is_tiny).tokenizer
  shape = step_shapes.shape('default', is_tiny)._replace(mixed=1.0, prompts=prompts)
  config = 'tiny' if is_tiny else shape.config
  texts, ids = step_workers.job_prompts(config, tokenizer, shape)
  end_ids = tuple(tokenizer.end_ids)
  job = step_shapes.Job(shape, end_ids, texts, ids, [True] * len(ids), [])
  return Stepper(folder, job, tuple(overrides))


def make_batches(stepper: Stepper, counts: list[int]) -> list[Any]:
  """A sampled batch for each of `counts`, in which so many groups are mixed."""
  G, found = stepper.job.shape.rollouts, []
  for count in counts:
    batch = stepper.sampled()
    is_mixed_B = np.arange(len(batch.reward_B)) < count * G
    found.append(batch._replace(reward_B=np.where(is_mixed_B, batch.reward_B, 0.0)))
  return found


def learned_tokens(batch: Any, group: int) -> int:
  """Tokens of the rows of mixed groups."""
  is_mixed_P = np.ptp(batch.reward_B.reshape(-1, group), axis=1) > 0
  return int(batch.rollout.length_B.reshape(-1, group)[is_mixed_P].sum())


def measure(stepper: Stepper, batches: list[Any], rounds: int) -> list[list[dict[str, float]]]:
  """Rows of each batch: wall and CPU-seconds of an update in each round after the first."""
  rows: list[list[dict[str, float]]] = [[] for _ in batches]
  for number in range(rounds + 1):
    for batch, measured in zip(batches, rows, strict=True):
      row, fresh = {}, jax.tree.map(np.array, batch)  # the update may take its memory
      with step_workers.timed(row, 'update'):
        stepper.learn(fresh)
      if number:
        measured.append(row)
  return rows


def report(points: list[dict[str, float]], lines: dict[str, Line], facts: str) -> str:
  """The section, in Markdown."""
  cells = [
    [f'{p["mixed"]:.0f}', f'{p["tokens"]:.0f}', f'{p["wall"]:.3f}', f'{p["cpu"]:.3f}']
    for p in points
  ]
  header = ['mixed groups', 'learned tokens', 'update, wall seconds', 'update, CPU-seconds']
  text = [results.table(header, cells), '']
  for kind, name in (('wall', 'wall seconds'), ('cpu', 'CPU-seconds')):
    line = lines[kind]
    text.append(
      f'{name} = {line.intercept:.3f} + {1000 * line.slope:.3f} · learned tokens / 1000, R² {line.r2:.4f}.'
    )
  return '\n'.join([*text, facts])


def draw(points: list[dict[str, float]], line: Line, path: pathlib.Path) -> None:
  with plots.svg(path) as (_, (axes,)):
    x = [p['tokens'] for p in points]
    axes.plot(x, [p['wall'] for p in points], 'o', label='median of the rounds')
    ends = [0, max(x)]
    label = f'{line.intercept:.2f} s + {1000 * line.slope:.2f} ms · tokens, R² {line.r2:.3f}'
    axes.plot(ends, [line.intercept + line.slope * end for end in ends], '-', label=label)
    axes.set(xlabel='learned tokens', ylabel='update, wall seconds', xlim=(0, None), ylim=(0, None))
    axes.legend(frameon=False)


def parse() -> argparse.Namespace:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--batches', type=int, default=8)
  parser.add_argument('--prompts', type=int, default=4, help='groups of a batch')
  parser.add_argument('--rounds', type=int, default=5, help='measured updates of each batch')
  parser.add_argument(
    '--set', action='append', default=[], help='an override of the config: learner.remat=True'
  )
  parser.add_argument('--write', action='store_true', help='write results/update_cost.md')
  parser.add_argument('--json', type=pathlib.Path, help='where to write every number')
  args = smoke.parse(parser, batches=3, rounds=1, write=True)
  if args.batches < 2:
    parser.error(f'--batches={args.batches} is too few for a line; give at least 2.')
  return args


def main() -> None:
  args = parse()
  host_memory.keep_freed()  # as the command line does
  facts = results.facts(PACKAGES, results.load_average())
  if args.smoke:
    jax.config.update('jax_disable_most_optimizations', True)
  with tempfile.TemporaryDirectory() as folder:
    stepper = make_stepper(pathlib.Path(folder), args.smoke, args.prompts, args.set)
    counts = mixed_counts(args.prompts, args.batches)
    batches = make_batches(stepper, counts)
    rows = measure(stepper, batches, args.rounds)
  points = [
    dict(
      mixed=count,
      tokens=learned_tokens(batch, stepper.job.shape.rollouts),
      wall=statistics.median(row['update_wall_s'] for row in measured),
      cpu=statistics.median(row['update_cpu_s'] for row in measured),
    )
    for count, batch, measured in zip(counts, batches, rows, strict=True)
  ]
  tokens = [p['tokens'] for p in points]
  lines = {kind: fit(tokens, [p[kind] for p in points]) for kind in ('wall', 'cpu')}
  section = report(points, lines, facts)
  print(section)
  if args.write:
    results.write(results.path('update_cost.md', args.smoke), 'default job', section)
    if plots.available():
      draw(points, lines['wall'], results.path('update_cost.svg', args.smoke))
  if args.json:
    args.json.write_text(json.dumps(dict(facts=facts, points=points, rows=rows), indent=2))


if __name__ == '__main__':
  main()

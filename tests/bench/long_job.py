"""Seconds of rollout and update against the lengths that occur, at a fixed cap of 4,096 tokens.

    python -m tests.bench.long_job [--means=250,500,1000,2000,4000] [--sigma=0.5] [--rounds=3] [--write] [--smoke]

configs/rollout/long_copy.py: a small character model, 8 prompts of up to 1,006 tokens × 8 completions. One compiled
rollout and one compiled update serve all lengths. Lengths are log-normal, drawn by row and cut at the cap. The cap of a
row ends it; no token does. Rewards are drawn, so that every group is mixed and all rows are learned. Printed are
medians over the rounds, after a first one that is not counted, and least-squares lines: rollouts against the longest
row, which gives the decode iterations, and updates against all tokens.
"""

from __future__ import annotations

import argparse
import os
import statistics
from typing import Any, NamedTuple

os.environ.setdefault('JAX_PLATFORMS', 'cpu')

import jax
import numpy as np

from jaxrl_llm.config import loading
from jaxrl_llm.distributed import sharding
from jaxrl_llm.learner import compile as programs
from jaxrl_llm.learner import state as train_state
from jaxrl_llm.runner import host_step, setup
from jaxrl_llm.types import Batch
from tests.bench.lib import line_fit, results, smoke, step_workers

_SHORT = (
  *('prompts=2', 'rollouts=2', 'prompt_tokens=32', 'completion_tokens=64'),
  "data.tasks=[{'name': 'copy', 'min_length': 4, 'max_length': 16}]",
)


class Point(NamedTuple):
  """One mean of the lengths: tokens, and medians of seconds."""

  tokens: int  # of all completions
  longest: int
  rollout_wall_s: float
  rollout_cpu_s: float
  update_wall_s: float
  update_cpu_s: float


class Job:
  """The programs of the config for one device, and its state."""

  def __init__(self, is_tiny: bool):
    overrides = [f'--config.{field}' for field in (*smoke.TINY, *_SHORT)] if is_tiny else []
    config = loading.load('long_copy', overrides)
    context = setup.build_context(config, sharding.make_mesh({}, jax.devices()[:1]))
    decode = context.spec.rollout.decode._replace(end_ids=())  # caps alone end rows
    spec = context.spec._replace(rollout=context.spec.rollout._replace(decode=decode))
    self.prompts, *_ = host_step.build_inputs(context, 0)
    self.rows, self.cap = config.prompts * config.rollouts, config.completion_tokens
    self.state = train_state.init_state(spec, context.models.policy.params)
    self.sample, self.update = programs.compile_sample(spec), programs.compile_update(spec)

  def call(self, length_B: np.ndarray, reward_B: np.ndarray) -> dict[str, float]:
    """A rollout of these lengths and an update on it: wall and CPU-seconds."""
    row: dict[str, float] = {}
    state = self.state._replace(carried=())
    with step_workers.timed(row, 'rollout'):
      sampled = self.sample(state, self.state.carried, self.prompts, None, None, length_B)
      rollout, _, carried = jax.block_until_ready(sampled)
    np.testing.assert_array_equal(rollout.length_B, length_B)
    batch: Any = Batch(self.prompts, rollout, reward_B, reward_B)
    batch = jax.tree.map(np.array, batch)  # a copy: the update takes the memory of its prompts, too
    with step_workers.timed(row, 'update'):
      learned = self.update(self.state._replace(carried=carried), batch)
      self.state, _ = jax.block_until_ready(learned)
    return row


def draw_lengths(mean: float, sigma: float, rows: int, cap: int) -> np.ndarray:
  """Log-normal lengths, cut at the cap, the same for the same arguments."""
  drawn = np.random.default_rng(0).lognormal(np.log(mean) - sigma**2 / 2, sigma, rows)
  return drawn.round().clip(2, cap).astype(np.int32)


def measure(job: Job, means: list[float], sigma: float, rounds: int) -> list[Point]:
  """Every mean once a round, so that a busy minute is spread over all of them."""
  lengths = [draw_lengths(mean, sigma, job.rows, job.cap) for mean in means]
  timed: list[list[dict[str, float]]] = [[] for _ in means]
  random = np.random.default_rng(0)
  for number in range(rounds + 1):
    for length_B, rows in zip(lengths, timed, strict=True):
      row = job.call(length_B, random.normal(size=job.rows).astype(np.float32))
      if number:
        rows.append(row)
  names = Point._fields[2:]
  medians = [[statistics.median(row[name] for row in rows) for name in names] for rows in timed]
  return [
    Point(int(length_B.sum()), int(length_B.max()), *seconds)
    for length_B, seconds in zip(lengths, medians, strict=True)
  ]


def report(points: list[Point], means: list[float], rows: int) -> str:
  """The tables and lines, in Markdown."""
  header = ['mean drawn', 'mean', 'longest', 'rollout, wall s', 'CPU-s', 'update, wall s', 'CPU-s']
  cells = [
    [f'{mean:g}', f'{p.tokens / rows:.0f}', f'{p.longest}', *(f'{s:.2f}' for s in p[2:])]
    for mean, p in zip(means, points, strict=True)
  ]
  text = [results.table(header, cells), '']
  against = dict(rollout=('longest row', 'longest'), update=('tokens of all rows', 'tokens'))
  for part, (label, field) in against.items():
    for kind in ('wall', 'cpu'):
      seconds = [getattr(p, f'{part}_{kind}_s') for p in points]
      line = line_fit.fit([getattr(p, field) for p in points], seconds)
      text.append(
        f'{part}, {kind} seconds = {line.intercept:.3f} + {1000 * line.slope:.4f} · {label} / 1000, '
        f'R² {line.r2:.4f}.'
      )
  return '\n'.join(text)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--means', default='250,500,1000,2000,4000', help='of the lengths, tokens')
  parser.add_argument('--sigma', type=float, default=0.5, help='of the log of the lengths')
  parser.add_argument('--rounds', type=int, default=3, help='measured calls of each mean')
  options = smoke.parse(parser, means='8,32', rounds=1)
  means = [float(mean) for mean in options.means.split(',')]
  job = Job(options.smoke)
  print(report(measure(job, means, options.sigma, options.rounds), means, job.rows))


if __name__ == '__main__':
  main()

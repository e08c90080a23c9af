"""How many prompts to encode for the choice by odds of answers, and which: simulated on recorded samples.

python -m tests.bench.encoded_prompts --job=tiny [--prompts 1200] [--samples 8] [--orders 12] [--smoke] [--write]

The samples are those of tests/bench/difficulty.py, read from --out or drawn first. The curriculum of
configs/curriculum/answer_odds.py encodes, chooses and observes, as many prompts in each step as the job has; the
policy stays as it is, so that a prompt that comes again has the same samples, and the words of answers are known from
the first step on. Columns: prompts encoded in a step besides its own; the share of mixed groups; the mean of 4p(1 − p)
in the first and the second half of the steps, without bias for groups so small. Means over --orders
orders of the prompts, at least 2, each with other noise of the choice, ± their standard error.
"""

from __future__ import annotations

import argparse

import jax
import numpy as np

from jaxrl_llm.config import loading, validation
from jaxrl_llm.curriculum import Curriculum
from tests.bench import choices, difficulty
from tests.bench.lib import results, smoke

CONFIG = 'answer_odds'
# (curriculum.prior_pooling.multiple, curriculum.prior_pooling.considered)
SETTINGS = ((1, 1), (2, 1), (4, 1), (8, 1), (2, 2), (2, 4), (2, 8), (4, 8))


def simulated(
  found: dict[str, np.ndarray], samples: int, prompts: int, steps: int, order: int, **pooling: int
) -> tuple[float, float, float, float]:
  """Encoded prompts of a step, share of mixed groups, and 4p(1 − p) in both halves of the steps.

  `found`: a recording of `difficulty`, of groups of `samples`; `pooling`: settings of curriculum.prior_pooling.
  """
  at_N = np.random.default_rng(order).permutation(len(found['right']))
  right_N, states_NxF = found['right'][at_N], found['states'][at_N]
  settings = loading.load(CONFIG).curriculum.to_dict()
  settings['prior_pooling'] |= pooling
  curriculum = Curriculum(settings, len(at_N), group=samples, seed=order, kind=found['kind'][at_N])
  features, encoded, chosen = curriculum.features, [], []
  for step in range(steps):
    proposal = curriculum.propose(step, prompts)
    curriculum.accept(proposal)
    index = proposal.index
    own = index[:0] if features.are_new(index) else index
    others = curriculum.to_encode(step, prompts)
    features.put(np.concatenate([own, others]), states_NxF[np.concatenate([own, others])], index)
    curriculum.observe(index, right_N[index], np.full(prompts, samples))
    encoded.append(len(others))
    chosen.append(right_N[index])
  right_TxP = np.array(chosen)
  spread_T = (4 * right_TxP * (samples - right_TxP) / (samples * (samples - 1))).mean(1)
  mixed = ((right_TxP > 0) & (right_TxP < samples)).mean()
  halves = (float(part.mean()) for part in np.array_split(spread_T, 2))
  return float(np.mean(encoded)), float(mixed), *halves


def table(found: dict[str, np.ndarray], samples: int, prompts: int, steps: int, orders: int) -> str:
  """A row for each of `SETTINGS`, after one for prompts at random."""
  share_N = found['right'] / samples
  mixed = ((share_N > 0) & (share_N < 1)).mean()
  spread = (4 * share_N * (1 - share_N)).mean() * samples / (samples - 1)
  rows = [['at random', '–', '0', f'{mixed:.3f}', f'{spread:.3f}', f'{spread:.3f}']]
  for multiple, considered in SETTINGS:
    if multiple * considered * prompts > len(share_N):
      continue
    runs_OxC = np.array(
      [
        simulated(found, samples, prompts, steps, order, multiple=multiple, considered=considered)
        for order in range(orders)
      ]
    )
    mean_C, error_C = runs_OxC.mean(0), runs_OxC.std(0, ddof=1) / orders**0.5
    cells = [f'{x:.3f} ± {e:.3f}' for x, e in zip(mean_C[1:], error_C[1:], strict=True)]
    rows.append([str(multiple), str(considered), f'{mean_C[0]:.0f}', *cells])
  header = ['multiple', 'considered', 'encoded', 'mixed groups', '4p(1 − p), first half', 'second']
  return results.table(header, rows)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  difficulty.add_options(parser)
  parser.add_argument('--orders', type=int, default=12)
  options = smoke.parse(parser, prompts=96, samples=2, orders=2)
  found = difficulty.recording(options)
  config = validation.sized(choices.job(options.job, 'uniform', 0), jax.devices())
  prompts = 4 if options.smoke else config.prompts
  # An epoch has four times as many prompts as the steps sample, or more.
  steps = min(config.steps, options.prompts // (4 * prompts))
  print(f'{options.job}: {steps} steps of {prompts} prompts, groups of {options.samples}\n')
  print(table(found, options.samples, prompts, steps, options.orders))


if __name__ == '__main__':
  main()

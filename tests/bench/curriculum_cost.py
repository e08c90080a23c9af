"""Host cost of a curriculum step: milliseconds and bytes, by rule and number of prompts.

python -m tests.bench.curriculum_cost [--sizes 1000,10000] [--rules default,mopps] [--slots 64] [--plot FILE] [--smoke]

CPU-milliseconds of propose (and of the features of hidden states), and of observe with its metrics: the mean of
`--steps` after a first one. Bytes per prompt are those of the state in a checkpoint. Half of the prompts have been
visited before. Lengths are known, as in a run.
"""

from __future__ import annotations

import argparse
import pathlib
import time

import numpy as np

from jaxrl_llm.config import loading
from jaxrl_llm.curriculum import Curriculum, LengthEstimate
from tests.bench.lib import smoke

G = 8
BLOCK = 1 << 14  # prompts whose hidden states are made at once
CONFIGS = pathlib.Path(__file__).parents[2] / 'configs'
FEATURES, HIDDEN = 16, 64
RULES = {
  'default': {},
  **{
    name: loading.load(name).curriculum.to_dict()
    for name in ('mopps', 'bots', 'vade', 'greso', 'scale_rl', 'dots')
  },
  'uniform': dict(utility=dict(fn='uniform'), selection=dict(fn='top')),
  'per_token': dict(utility=dict(fn='per_token')),
  'fitted kinds': dict(prior_pooling=dict(fn='fitted_kind')),
  'regression': dict(prior_pooling=dict(fn='regression')),
  'hidden states': dict(prior_pooling=dict(fn='hidden_state')),
  'answer odds': loading.load('answer_odds').curriculum.to_dict(),
  'mixed domains': dict(domain_mix=dict(fn='mix', targets=dict(a=1.0, b=1.0))),
}


def make(rule: str, size: int, random: np.random.Generator) -> tuple[Curriculum, LengthEstimate]:
  """A curriculum that has visited half of the prompts once."""
  settings = loading.default().curriculum.to_dict() | RULES[rule]
  columns = dict(
    traits=random.normal(size=(size, FEATURES)).astype(np.float32),
    source=np.array(['a', 'b'])[random.integers(0, 2, size)],
  )
  kind = random.integers(0, 100, size)
  curriculum = Curriculum(settings, size, group=G, kind=kind, columns=columns)
  if features := curriculum.features:
    if not features.ready:
      features.fit(random.normal(size=(4 * HIDDEN, HIDDEN)))
    for part in np.array_split(np.arange(size), -(-size // BLOCK)):
      features.put(part, random.normal(size=(len(part), HIDDEN)))
  lengths = LengthEstimate(size)
  index = random.choice(size, size // 2, replace=False)
  if rule == 'dots':
    index = index[:64]  # all of these are references, as are the choices of every second step
  k = random.integers(0, G + 1, len(index))
  curriculum.observe(index, k, np.full(len(index), G))
  lengths.mean[index] = random.integers(10, 1000, len(index))
  return curriculum, lengths


def measure(rule: str, size: int, slots: int, steps: int) -> tuple[float, float, float]:
  """(ms of propose, ms of observe, bytes a prompt)."""
  random = np.random.default_rng(0)
  curriculum, lengths = make(rule, size, random)
  spent = []
  features = curriculum.features
  hidden = random.normal(size=(slots * (1 + features.multiple), HIDDEN)) if features else None
  for step in range(1, steps + 2):
    begun = time.process_time()
    proposal = curriculum.propose(step, slots, lengths)
    curriculum.accept(proposal)
    index = proposal.index
    if features:
      own = index[: 0 if features.are_new(index) else slots]
      encoded = np.concatenate([own, curriculum.to_encode(step, slots)])
      features.put(encoded, hidden[: len(encoded)], index)
    proposed = time.process_time()
    k = random.integers(0, G + 1, slots)
    again = time.process_time()
    curriculum.observe(index, k, np.full(slots, G), 0 * k, 100 * k)
    curriculum.metrics()
    spent.append((proposed - begun, time.process_time() - again))
  state_bytes = sum(x.nbytes for x in (*curriculum.state_dict().values(), lengths.mean))
  return *(1e3 * np.mean(spent[1:], axis=0)), state_bytes / size


def draw(sizes: list[int], cost: dict[str, list[float]], path: str) -> None:
  import matplotlib

  matplotlib.use('agg')
  import matplotlib.pyplot as plt

  figure, axes = plt.subplots(figsize=(7, 4.5), layout='constrained')
  for rule, times in cost.items():
    axes.plot(sizes, times, 'o-', label=rule)
  axes.axhline(50, color='grey', lw=0.8, ls=':')
  axes.set(xscale='log', yscale='log', xlabel='prompts', ylabel='CPU-ms a step, propose + observe')
  axes.legend(frameon=False, ncols=2)
  axes.grid(alpha=0.3)
  figure.savefig(path)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  names = lambda text: text.split(',')  # noqa: E731
  parser.add_argument('--sizes', type=names, default=['1000', '10000', '100000', '1000000'])
  parser.add_argument('--rules', type=names, default=list(RULES))
  parser.add_argument('--slots', type=int, default=64)
  parser.add_argument('--steps', type=int, default=8)
  parser.add_argument('--plot', default='')
  args = smoke.parse(parser, sizes=['1000'], steps=1)
  sizes = [int(size) for size in args.sizes]
  print('| rule | ' + ' | '.join(f'{size:,}' for size in sizes) + ' | bytes a prompt |')
  print('|---' * (len(sizes) + 2) + '|')
  cost = {}
  for rule in args.rules:
    costs = [measure(rule, size, args.slots, args.steps) for size in sizes]
    cells = ' | '.join(f'{propose:.1f} + {observe:.1f}' for propose, observe, _ in costs)
    print(f'| {rule} | {cells} | {costs[-1][2]:.0f} |', flush=True)
    cost[rule] = [propose + observe for propose, observe, _ in costs]
  if args.plot:
    draw(sizes, cost, args.plot)


if __name__ == '__main__':
  main()

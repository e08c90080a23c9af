"""How many of the groups a curriculum pays for are mixed, in worlds that are simulated.

python -m tests.bench.curriculum [--seeds 5] [--worlds sums,levels] [--rules uniform,oracle]

A world gives each prompt a true success rate capᵢ·σ(aᵢ(Wᵢθ + mᵢ − dᵢ)); skills θ and the memory mᵢ
of single prompts grow with the advantage mass 2√(r(1 − r)) of the groups trained on, and memory
fades. Measured: mixed = mixed groups ÷ groups generated; gain = of the mean success rate of other
prompts of the same nature; brier of the predicted chance of a mixed group; coverage of prompts.

What this is not: evidence about language models. The gain law favours rates near ½ by construction,
and exploration is only worth what drift makes it.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxrl_llm import config, control

G = 8


@dataclasses.dataclass
class World:
  """Prompts with a true success rate, which training moves."""

  skill_NxK: np.ndarray  # W, rows sum to 1
  difficulty_N: np.ndarray
  kind_N: np.ndarray  # what the curriculum is told
  prompts: int  # P, per step
  steps: int
  gain: float  # of a skill, per step of mixed groups that all need it
  slope_N: Any = 1.0
  cap_N: Any = 1.0
  memory_gain: float = 0.5
  memory_decay: float = 0.98
  noise: float = 0.01

  def __post_init__(self):
    self.skill_K = np.zeros(self.skill_NxK.shape[1])
    self.memory_N = np.zeros(len(self.difficulty_N))

  def rate(self, memory: bool = True) -> np.ndarray:
    """The true rates; without memory, those of other prompts of the same nature."""
    logit = self.skill_NxK @ self.skill_K + memory * self.memory_N - self.difficulty_N
    return self.cap_N / (1 + np.exp(-self.slope_N * logit))

  def learn(self, index: np.ndarray, k: np.ndarray, random: np.random.Generator) -> None:
    mass = 2 * np.sqrt(k / G * (1 - k / G))
    K = len(self.skill_K)
    self.skill_K += self.gain * K * (self.skill_NxK[index] * mass[:, None]).mean(0)
    self.skill_K += self.noise * random.normal(size=K)
    self.memory_N *= self.memory_decay
    self.memory_N[index] += self.memory_gain * mass


def by_kind(centres, sizes, spread, gain, told=True, prompts=4, steps=60) -> Callable:
  """Kinds with a centre (a logit) each; inside a kind logits are normal with `spread`."""

  def make(random: np.random.Generator) -> World:
    K = len(centres)
    kind = random.permutation(np.repeat(np.arange(K), sizes))
    difficulty = spread * random.normal(size=len(kind)) - np.asarray(centres)[kind]
    skill = 0.7 * np.eye(K)[kind] + 0.3 / K
    codes = kind if told else random.integers(0, K, len(kind))
    return World(skill, difficulty, codes, prompts, steps, gain)

  return make


def long(hardness: float) -> Callable:
  """4096 prompts of mixed skills; told are the main skill and a noisy level."""

  def make(random: np.random.Generator) -> World:
    N = 4096
    skill = random.dirichlet(np.full(8, 0.25), N)
    difficulty = 1.5 * random.normal(size=N) + hardness
    noisy = difficulty + 0.8 * random.normal(size=N)
    level = np.searchsorted(np.quantile(difficulty, [0.2, 0.4, 0.6, 0.8]), noisy)
    return World(
      skill, difficulty, skill.argmax(1) * 5 + level, prompts=64, steps=500, gain=0.006,
      slope_N=np.exp(0.3 * random.normal(size=N)),
      cap_N=np.where(random.random(N) < 0.06, 0.02, 1.0),
      memory_gain=0.3,
    )  # fmt: skip

  return make


_SUMS = (77, 231, 230, 230)
_LENGTHS = tuple(np.linspace(4, -5, 8)) * 2
WORLDS = {
  # One kind within reach, two nearly not, one not: sums for a 135M model. N=768, P=4, 60 steps.
  'sums': by_kind((0.4, -4, -4, -7), _SUMS, 1.7, 0.03),
  'steep': by_kind((1, -1, -3, -8), _SUMS, 1.0, 0.03),
  # Two tasks, eight lengths each.
  'levels': by_kind(_LENGTHS, (48,) * 16, 1.7, 0.03),
  # The same prompts, but what the curriculum is told as kinds means nothing.
  'blind': by_kind(_LENGTHS, (48,) * 16, 1.7, 0.03, told=False),
  'long': long(0.0),
  'long hard': long(2.5),
}

_PLAIN, _TOP = dict(share=dict(fn='none')), dict(pick=dict(fn='top'))
_MOPPS = _TOP | dict(
  candidates=dict(fn='stream', multiple=16),
  forget=dict(fn='visit', decay=0.5),
  value=dict(fn='thompson'),
  utility=dict(fn='mopps'),
  gate=dict(fn='none'),
)
# What each changes of the defaults; the oracle knows the true rates.
RULES = {
  'uniform': dict(utility=dict(fn='uniform')),
  'mopps': _MOPPS | _PLAIN,
  'mopps + kind': _MOPPS,
  'mixed_group': _TOP | _PLAIN | dict(forget=dict(fn='visit', decay=0.5)),
  'mixed_group + kind': _TOP,
  'default': {},
  'default, strength 1': dict(share=dict(fn='kind', strength=1.0)),
  'default, strength 4': dict(share=dict(fn='kind', strength=4.0)),
  'default, no kinds': _PLAIN,
  'default, visit decay 0.5': dict(forget=dict(fn='visit', decay=0.5)),
  'default, visit decay 1': dict(forget=dict(fn='visit', decay=1.0)),
  'default, step decay 0.98': dict(forget=dict(fn='step', decay=0.98)),
  'default, kind decay 0.98': dict(kind_decay=0.98),
  'default, no audit': dict(gate=dict(fn='none')),
  'default, stream 16': dict(candidates=dict(fn='stream', multiple=16)),
  'oracle': dict(),
}


def run(world: str, rule: str, seed: int) -> dict[str, float]:
  """One run. The world's luck depends on the seed alone, so rules meet the same worlds."""
  made = WORLDS[world](np.random.default_rng((seed, 0)))
  random = np.random.default_rng((seed, 1))
  settings = config.default().curriculum.to_dict() | RULES[rule]
  curriculum = control.Curriculum(
    settings, len(made.difficulty_N), group=G, seed=seed, kind=made.kind_N
  )
  mixed, brier = [], []
  for step in range(made.steps):
    rate_N = made.rate()
    if rule == 'oracle':
      index = np.argsort(rate_N**G + (1 - rate_N) ** G)[: made.prompts].astype(np.int32)
      expected = curriculum.predict(index)[2]
    else:
      index, _, expected = curriculum.propose(step, made.prompts)
    k = random.binomial(G, rate_N[index])
    curriculum.observe(index, k, np.full_like(k, G))
    made.learn(index, k, random)
    mixed.append((k > 0) & (k < G))
    brier.append((expected - mixed[-1]) ** 2)
  told = curriculum.metrics()
  return dict(
    mixed=np.mean(mixed),
    gain=(made.rate(memory=False) - WORLDS[world](np.random.default_rng((seed, 0))).rate()).mean(),
    brier=np.mean(brier),
    calibration=told['curriculum/calibration_error'],
    coverage=told['curriculum/coverage'],
  )


def table(worlds: list[str], rules: list[str], seeds: int, measure: str, results: dict) -> str:
  """Markdown: mean ± standard error over seeds."""
  rows = [f'| {measure} | ' + ' | '.join(worlds) + ' |', '|---' * (len(worlds) + 1) + '|']
  for rule in rules:
    cells = []
    for world in worlds:
      values = np.array([r[measure] for r in results[world, rule]])
      error = values.std(ddof=1) / seeds**0.5 if seeds > 1 else 0
      cells.append(f'{values.mean():.3f} ± {error:.3f}')
    rows.append(f'| {rule} | ' + ' | '.join(cells) + ' |')
  return '\n'.join(rows)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  names = lambda text: text.split(',')  # noqa: E731
  parser.add_argument('--seeds', type=int, default=5)
  parser.add_argument('--first-seed', type=int, default=0)
  parser.add_argument('--worlds', type=names, default=list(WORLDS))
  parser.add_argument('--rules', type=names, default=list(RULES))
  parser.add_argument('--measures', type=names, default=['mixed', 'gain', 'brier', 'coverage'])
  args = parser.parse_args()
  seeds = range(args.first_seed, args.first_seed + args.seeds)
  results = {
    (world, rule): [run(world, rule, seed) for seed in seeds]
    for world in args.worlds
    for rule in args.rules
  }
  for measure in args.measures:
    print(table(args.worlds, args.rules, args.seeds, measure, results), end='\n\n')


if __name__ == '__main__':
  main()

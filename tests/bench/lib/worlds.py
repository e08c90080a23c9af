"""Simulated learners, whose success rates change with training, and tables of logged success rates.

A prompt's true success rate is p = cap·σ(a(Wθ + m − d)): skills θ are shared, memory m is per prompt and decays.
A group of G answers with k right moves them by its advantage mass g = 2√(r(1 − r)), r = k/G:
θ += η·K·ΣWg/P and m += η_m·g. With a noisy grader, g is multiplied by Cov(reward, truth) ÷ Var(reward),
which is 1 for a correct grader and negative for a wrong label. Held-out prompts depend on θ alone, so that memorization
does not help them.

Limits: this is no evidence about language models. The gain favors rates near ½ by construction, and exploration only
helps through drift.

A name is a base and axes: 'hard', 'medium+drift', 'hard+g16+stale4'.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
from collections.abc import Callable
from typing import Any

import numpy as np

_MISTAKE = (
  0.4  # of a prompt with a wrong label: chance that an answer that is not right is that label
)
FIXED_TOKENS = 256  # what a call of generation costs besides its longest row, in decoded tokens


@dataclasses.dataclass
class World:
  """Prompts with a true success rate, which training moves."""

  skill_NxK: np.ndarray  # W, rows sum to 1
  difficulty_N: np.ndarray
  kind_N: np.ndarray  # of each prompt, for the curriculum
  prompts: int  # P, per step
  rollouts: int  # that a run may generate
  gain: float  # η: of a skill, per step of mixed groups that all need it
  group: int = 8  # G
  slope_N: Any = 1.0
  cap_N: Any = 1.0
  memory_gain: float = 0.5
  memory_decay: float = 0.98
  noise: float = 0.01
  drift: float = 0.0  # deviation of a jump of all skills at half of the rollouts
  forgetting: float = 0.0  # share of every skill that a step loses
  flips: float = 0.0  # share of grades that are the wrong way round
  wrong_N: Any = False  # whether the label is wrong: a mistake is rewarded instead
  staleness: int = 0  # steps between sampling and the update and observation
  target: float = np.nan  # of held-out accuracy
  tokens_N: Any = 512.0  # mean length of an answer
  anchor_Nx2: Any = None  # pass rates of a weak and a strong reference model
  # (skill, difficulty, slope) of held-out prompts; None: others of the same nature
  held_out_prompts: Any = None

  def __post_init__(self):
    N = len(self.difficulty_N)
    self.skill_K, self.memory_N = np.zeros(self.skill_NxK.shape[1]), np.zeros(N)
    self.wrong_N = np.broadcast_to(self.wrong_N, N)
    self.tokens_N = np.broadcast_to(self.tokens_N, N)
    self._drifted = not self.drift

  def rate(self) -> np.ndarray:
    """The probability of a correct completion, [N]."""
    logit = self.skill_NxK @ self.skill_K + self.memory_N - self.difficulty_N
    return self.cap_N / (1 + np.exp(-self.slope_N * logit))

  def graded(self) -> np.ndarray:
    """The probability that a completion is graded as correct, [N]."""
    rate_N = self.rate()
    rate_N = np.where(self.wrong_N, _MISTAKE * (1 - rate_N), rate_N)
    return rate_N + self.flips * (1 - 2 * rate_N)

  def truth(self, index: np.ndarray) -> np.ndarray:
    """Cov(reward, truth) ÷ Var(reward) of these prompts' answers."""
    if not (self.flips or self.wrong_N.any()):
      return np.ones(len(index))
    rate, graded = self.rate()[index], self.graded()[index]
    covariance = np.where(self.wrong_N[index], -_MISTAKE, 1.0) * rate * (1 - rate)
    return (1 - 2 * self.flips) * covariance / np.maximum(graded * (1 - graded), 1e-9)

  def held_out(self) -> float:
    """Mean rate of held-out prompts."""
    if self.held_out_prompts is None:
      logit, slope, cap = (
        self.skill_NxK @ self.skill_K - self.difficulty_N,
        self.slope_N,
        self.cap_N,
      )
    else:
      (skill, difficulty, slope), cap = self.held_out_prompts, 1.0
      logit = skill @ self.skill_K - difficulty
    return float((cap / (1 + np.exp(-slope * logit))).mean())

  def sample(self, index, n, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Sample n rollouts of each prompt: the number graded as correct, and all lengths in tokens."""
    k = random.binomial(n, self.graded()[index])
    mean_R = np.repeat(self.tokens_N[index], n)
    return k, np.minimum(mean_R * np.exp(0.5 * random.normal(size=len(mean_R)) - 0.125), 4096)

  def learn(self, index, k, n, truth, progress: float, random: np.random.Generator) -> None:
    """One update with these groups; zero-variance groups add nothing, and larger groups more."""
    share = k / n
    mass = truth * n / self.group * 2 * np.sqrt(share * (1 - share))
    K = len(self.skill_K)
    step_K = self.gain * K * (self.skill_NxK[index] * mass[:, None]).sum(0) / self.prompts
    self.skill_K = (
      (1 - self.forgetting) * self.skill_K + step_K + self.noise * random.normal(size=K)
    )
    self.memory_N *= self.memory_decay
    np.add.at(self.memory_N, index, self.memory_gain * mass)
    if not self._drifted and progress >= 0.5:
      self._drifted = True
      self.skill_K = self.skill_K + self.drift * random.normal(size=K)


def by_kind(centres, sizes, spread, gain, informative=True, prompts=4, steps=60) -> Callable:
  """Kinds with a center (a logit) each; inside a kind logits are normal with `spread`."""

  def make(random: np.random.Generator) -> World:
    K = len(centres)
    kind = random.permutation(np.repeat(np.arange(K), sizes))
    difficulty = spread * random.normal(size=len(kind)) - np.asarray(centres)[kind]
    skill = 0.7 * np.eye(K)[kind] + 0.3 / K
    codes = kind if informative else random.integers(0, K, len(kind))
    return World(skill, difficulty, codes, prompts, steps * prompts * 8, gain)

  return make


def mixed_skills(
  hardness: float,
  target: float,
  *,
  spread: float = 2.0,
  prompts: int = 64,
  size: int = 4096,
  rollouts: int = 256_000,
  **axes,
) -> Callable:
  """Prompts of eight mixed skills; the curriculum gets the main skill and a noisy level as kinds.

  Spread, gains and the hardness of 'medium' and 'hard' are fitted to results of a pilot study for uniform
  selection and an oracle: mixed 0.61 and 0.99, held-out 0.54 and 0.77; 0.28 and 0.99, 0.11 and 0.49.
  """
  wrong, anchors = axes.pop('wrong', 0.0), axes.pop('anchors', 'good')
  fitted = dict(gain=0.0095, memory_gain=0.12, memory_decay=0.95) | axes

  def make(random: np.random.Generator) -> World:
    draw = lambda n: (  # noqa: E731
      random.dirichlet(np.full(8, 0.25), n),
      spread * random.normal(size=n) + hardness,
      np.exp(0.3 * random.normal(size=n)),
    )
    (skill, difficulty, slope), held_out_prompts = draw(size), draw(1024)
    noisy = difficulty + 0.8 * random.normal(size=size)
    level = np.searchsorted(np.quantile(difficulty, [0.2, 0.4, 0.6, 0.8]), noisy)
    cap = np.where(random.random(size) < 0.06, 0.02, 1.0)
    tokens = 512 * np.exp(0.25 * (difficulty - hardness) / spread + 0.3 * random.normal(size=size))
    world = World(
      skill, difficulty, skill.argmax(1) * 5 + level, prompts, rollouts, slope_N=slope, cap_N=cap,
      wrong_N=random.random(size) < wrong, tokens_N=tokens, held_out_prompts=held_out_prompts, target=target, **fitted,
    )  # fmt: skip
    world.anchor_Nx2 = _anchors(world, anchors, random)
    return world

  return make


def _anchors(world: World, quality: str, random: np.random.Generator) -> np.ndarray:
  """Rates of two reference models in 16 answers each.

  good: the learner itself, untrained and with all skills 2 higher; poor: models with other skills and other
  difficulties; shuffled: the good ones of other prompts.
  """
  N, K = world.skill_NxK.shape
  rates = []
  for lift in (0.0, 2.0):
    other = quality == 'poor'
    skill_K = lift + other * random.normal(size=K)
    logit = world.skill_NxK @ skill_K - world.difficulty_N + other * 3.0 * random.normal(size=N)
    rates.append(random.binomial(16, world.cap_N / (1 + np.exp(-world.slope_N * logit))) / 16)
  anchor_Nx2 = np.stack(rates, axis=1)
  return random.permutation(anchor_Nx2) if quality == 'shuffled' else anchor_Nx2


class Logged:
  """Success rates logged by a run at each of its steps; selection does not change them.

  right_NxT counts the right answers of a group, −1 where a prompt was not visited. The rate of a visit is
  (k + ½)/(G + 1), since an all-wrong group does not prove a rate of 0. Rates are interpolated linearly between
  visits, and
  constant before the first and after the last. A prompt visited once keeps its rate, so that rules which revisit
  known prompts look better than in real runs; predictions of the log are more informative.
  """

  target, staleness = np.nan, 0

  def __init__(self, right_NxT: np.ndarray, kind_N: np.ndarray, group: int):
    self.right_NxT, self.kind_N, self.group = right_NxT, kind_N, group
    steps = np.arange(right_NxT.shape[1])
    self.rate_NxT = np.stack(
      [np.interp(steps, steps[k >= 0], (k[k >= 0] + 0.5) / (group + 1)) for k in right_NxT]
    )
    self.difficulty_N = 1 - self.rate_NxT[:, 0]
    self.anchor_Nx2 = np.tile([0.0, 1.0], (len(right_NxT), 1))  # a log has no reference models
    self.tokens_N = np.zeros(len(right_NxT))
    self.prompts = max(1, round((right_NxT >= 0).sum() / len(steps)))
    self.rollouts, self._now = len(steps) * self.prompts * group, 0

  def graded(self) -> np.ndarray:
    """The current rates, [N]."""
    return self.rate_NxT[:, min(self._now, self.rate_NxT.shape[1] - 1)]

  def held_out(self) -> float:
    """No feedback, so no held-out accuracy."""
    return np.nan

  def truth(self, index: np.ndarray) -> np.ndarray:
    """Nothing is learned."""
    return np.ones(len(index))

  def sample(self, index, n, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """k of n by the logged rate; lengths are not simulated."""
    return random.binomial(n, self.graded()[index]), np.zeros(n.sum())

  def learn(self, index, k, n, truth, progress: float, random: np.random.Generator) -> None:
    """Advance to the next step of the log."""
    self._now += 1


def read_log(folder: str) -> tuple[np.ndarray, np.ndarray, int]:
  """rollouts/*.jsonl of a run directory → right_NxT with −1, kind_N, G. Groups of another size are left out.

  Prompts that differ only in digits are of one kind.
  """
  scores: dict[tuple[int, int], list[float]] = {}
  form: dict[int, str] = {}
  for path in sorted(pathlib.Path(folder, 'rollouts').glob('*.jsonl')):
    for line in path.read_text(encoding='utf-8').splitlines():
      row = json.loads(line)
      scores.setdefault((row['prompt'], row['step']), []).append(row['score'])
      form[row['prompt']] = re.sub(r'\d', '0', row['input'])
  if not scores:
    raise SystemExit(f'{folder}/rollouts holds no rows; give a run directory.')
  group = int(np.bincount([len(v) for v in scores.values()]).argmax())
  scores = {key: v for key, v in scores.items() if len(v) == group}
  prompts, steps = (sorted({key[i] for key in scores}) for i in range(2))
  right_NxT = np.full((len(prompts), len(steps)), -1)
  for (prompt, step), values in scores.items():
    right_NxT[prompts.index(prompt), steps.index(step)] = (np.asarray(values) > 0.5).sum()
  kind_N = np.unique([form[prompt] for prompt in prompts], return_inverse=True)[1]
  return right_NxT, kind_N, group


_SUMS = (77, 231, 230, 230)
_LENGTHS = tuple(np.linspace(4, -5, 8)) * 2
FIXED = {
  # One kind within reach, two nearly not, one not: sums for a 135M model. N=768, P=4, 60 steps.
  'sums': by_kind((0.4, -4, -4, -7), _SUMS, 1.7, 0.03),
  'steep': by_kind((1, -1, -3, -8), _SUMS, 1.0, 0.03),
  # Two tasks, eight lengths each.
  'levels': by_kind(_LENGTHS, (48,) * 16, 1.7, 0.03),
  # The same prompts, with random kinds for the curriculum.
  'blind': by_kind(_LENGTHS, (48,) * 16, 1.7, 0.03, informative=False),
}
STARTS = {
  'easy': dict(hardness=-0.5, target=0.85),
  'medium': dict(hardness=2.1, target=0.55),
  'hard': dict(hardness=4.4, target=0.3),
}
AXES = {
  'drift': dict(drift=1.5),
  'forgetting': dict(forgetting=0.002),
  'labels': dict(wrong=0.2),
  'flips': dict(flips=0.05),
  'poor': dict(anchors='poor'),
  'shuffled': dict(anchors='shuffled'),
  'g4': dict(group=4),
  'g16': dict(group=16),
  'n16': dict(size=1024),
  'n1024': dict(size=65536),
  'stale1': dict(staleness=1),
  'stale4': dict(staleness=4),
}


def make(name: str, seed: int) -> World:
  """The world of a name. Its randomness depends on the seed alone, so that all rules get the same world."""
  random = np.random.default_rng((seed, 0))
  if name in FIXED:
    world = FIXED[name](random)
    world.anchor_Nx2 = _anchors(world, 'good', np.random.default_rng((seed, 2)))
    return world
  start, *axes = name.split('+')
  if start not in STARTS or not set(axes) <= set(AXES):
    raise SystemExit(
      f'{name!r} is no world: one of {", ".join(FIXED)}; or {", ".join(STARTS)} with any of '
      f'+{", +".join(AXES)}.'
    )
  settings = dict(STARTS[start])
  for axis in axes:
    settings |= AXES[axis]
  return mixed_skills(**settings)(random)

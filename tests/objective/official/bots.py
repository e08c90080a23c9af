"""BOTS: posteriors, their draws, the utilities and the choice of prompts over a whole run of its selector.

Both codes observe a first batch, choose prompts, observe the same success rates of them, and go on, each from its own
state. The project does so in float32; here it computes in float64, as the official code does. Its generators have the
project's seeds.

Not covered: groups of another size than `group`, which count their own n here and m there.
"""

from __future__ import annotations

import contextlib
import types
from typing import Any
from unittest import mock

import numpy as np

from jaxrl_llm.config import loading
from jaxrl_llm.curriculum import (
  Curriculum,
  curriculum,
  evidence_decay,
  prior_pooling,
  rate_estimate,
  records,
  selection,
  utility,
)
from tests.objective.official import lib, trinity_core

FOLDER = 'trinity/buffer/selector'
ESTIMATOR, SELECTOR = f'{FOLDER}/difficulty_estimator.py', f'{FOLDER}/selector.py'
OFFICIAL = lib.Official(
  trinity_core.REPOSITORY, trinity_core.COMMIT, (ESTIMATOR, SELECTOR), 'Apache-2.0'
)
N, M, SLOTS, STEPS = 11, 8, 3, 9  # prompts, rollouts of each, prompts of a step, steps
FIRST = np.array([0, 4, 7])  # prompts of the first batch; without it all means are equal
WITHOUT = {'*': 'its inputs are success rates'}
SEEDS = (0, 1)
# name → (whether the data has pass rates of two models, decay per step, ρ, target, whether rates are drawn, whether ρ
# adapts)
CASES = {
  'config': (False, 0.9, 0.1, 0.5, True, False),
  'anchored': (True, 0.9, 0.1, 0.5, True, False),
  'means': (True, 0.7, 0.4, 0.35, False, False),
  'adaptive': (True, 0.9, 0.4, 0.5, True, True),
}
_SHARE = 'place if np.isnan(ability) else ability'
_CLIP = 'np.clip(weak_N + np.float32(ability) * gap_N, 0, 1)'
MUTANTS = {
  'above one': (prior_pooling, _CLIP, _CLIP.replace('0, 1)', '0, 1.05)')),
  'below zero': (prior_pooling, _CLIP, _CLIP.replace('0, 1)', '-0.05, 1)')),
  'anchors swapped': (prior_pooling, _CLIP, _CLIP.replace('weak_N +', 'strong_N -')),
  'momentum': (prior_pooling, 'momentum: float = 0.9', 'momentum: float = 0.8'),
  'from zero': (prior_pooling, _SHARE, _SHARE.replace('place if', '0 * place if')),
  'epsilon': (prior_pooling, 'gap_N[at].mean() + 1e-6', 'gap_N[at].mean() + 1e-5'),
  'rho alone': (prior_pooling, 'np.float32(rho_now * dataset.group)', 'np.float32(rho_now)'),
  'pooled evidence of visited prompts': (prior_pooling, 'gained[:, at] =', 'gained[:, at] +='),
  'rho of the step before': (
    prior_pooling,
    'np.float32(rho_now * dataset.group)',
    "np.float32(state['rho'] * dataset.group)",
  ),
  'prior': (
    prior_pooling,
    'np.ones((2, len(dataset.kind_N[index])), np.float32)',
    '2 * np.ones((2, len(dataset.kind_N[index])), np.float32)',
  ),
  'decay': (
    evidence_decay,
    'decay, 0, 1)\n  return np.power(np.float32(decay)',
    'decay, 0, 1)\n  return np.power(np.float32(decay**2)',
  ),
  'decay of visited prompts alone': (
    curriculum, 'self._evidence *= self._decay(self._since, now, False)', 'self._evidence *= 1.0'
  ),
  'draws of failures': (rate_estimate, 'random.beta(alpha, beta)', 'random.beta(beta, alpha)'),
  'mean': (rate_estimate, 'return alpha / (alpha + beta)', 'return alpha / (alpha + beta + 1)'),
  'squares': (utility, '-np.abs(rate - target)', '-((rate - target) ** 2) - 0'),
  'never the last prompt': (selection, '_smallest(-utility, slots)', '_smallest(-utility[:-1], slots)'),
  'the farthest first': (selection, 'np.argsort(-utility[order]', 'np.argsort(utility[order]'),
}  # fmt: skip


def draw(seed: int) -> dict[str, np.ndarray]:
  """Right rollouts of every prompt in the first batch and in every step, and pass rates of two models.

  The first batch is all right or all wrong: the policy starts beyond the strong model or below the weak one.
  """
  r = np.random.default_rng(seed)
  level_S = np.linspace(0.05, 0.95, 1 + STEPS)[:: 1 if seed else -1]
  rate_SxN = np.clip(level_S[:, None] + 0.3 * r.normal(size=(1 + STEPS, N)), 0, 1)
  weak_N = r.uniform(0.15, 0.5, N)
  strong_N = weak_N + r.uniform(0.05, 0.45, N)
  pass_rates = dict(weak=np.round(weak_N, 4), strong=np.round(strong_N, 4))
  right_SxN = r.binomial(M, rate_SxN)
  right_SxN[0] = 0 if seed else M
  return dict(right=right_SxN, **pass_rates)


class Seeded:
  """Numpy, but generators have the seeds of the project's steps."""

  def __init__(self):
    self.random = types.SimpleNamespace(default_rng=self.generator)

  def __getattr__(self, name):
    return getattr(np, name)

  def generator(self, position: int) -> np.random.Generator:
    """`position` counts the prompts of all earlier steps."""
    return np.random.default_rng((0, 0, position // SLOTS))


def anchors(data: dict, anchored: bool) -> dict[str, np.ndarray]:
  """Pass rates of the two models; 0 and 1 where the data has none."""
  if anchored:
    return dict(weak=data['weak'], strong=data['strong'])
  return dict(weak=np.zeros(N), strong=np.ones(N))


def record(steps: list[tuple], case: str) -> dict[str, list]:
  """Outputs of a case: chosen prompts, utilities, posteriors and the place between the models, by step."""
  names = ('chosen', 'worth', 'posterior', 'place')
  return {
    f'{case}_{name}': list(x) for name, x in zip(names, zip(*steps, strict=True), strict=True)
  }


def official(torch, read, data):
  log = types.SimpleNamespace(debug=lambda *_: None)
  space = dict(np=Seeded(), torch=torch, get_logger=lambda *_: log)
  names = ('BaseBetaPREstimator', 'InterpolationBetaPREstimator')
  estimators = vars(lib.functions(read(ESTIMATOR), names, **space))
  code = lib.functions(
    read(SELECTOR), ('BaseSelector', 'DifficultyBasedSelector'), **space, **estimators
  )
  out = {}
  for case, (anchored, decay, rho, target, drawn, adapts) in CASES.items():
    numbers = dict(m=M, lamb=1 - decay, rho=rho, target_reward=target, tau=0, do_sample=drawn)
    numbers |= dict(adaptive_rho=adapts)
    config = types.SimpleNamespace(feature_keys=['weak', 'strong'], kwargs=numbers, seed=0)
    source = types.SimpleNamespace(dataset=anchors(data, anchored))
    selector, steps = code.DifficultyBasedSelector(source, config), []
    selector.feedback(FIRST, data['right'][0][FIRST] / M)
    for right_N in data['right'][1:]:
      index, extra = selector.get_indices(SLOTS, return_extra_info=True)
      index = index.numpy()
      selector.feedback(index, right_N[index] / M)
      learned = selector.diff_estimator
      both = [learned.alphas.tolist(), learned.betas.tolist()]
      steps.append((index.tolist(), extra['scores'], both, float(learned.cap_coef)))
    out |= record(steps, case)
  return out


@contextlib.contextmanager
def in_float64():
  """The curriculum's modules with float64 in place of float32."""
  with contextlib.ExitStack() as stack:
    for module in (curriculum, evidence_decay, prior_pooling, records):
      stack.enter_context(mock.patch.object(module, 'np', trinity_core.Wide(np)))
    yield


def own(data: dict, case: str) -> dict[str, list]:
  """A run of the curriculum of the config, with the numbers of a case."""
  anchored, decay, rho, target, drawn, adapts = CASES[case]
  config: Any = loading.load('bots').curriculum
  settings = config.to_dict()
  if case != 'config':
    settings['evidence_decay'] |= dict(decay=decay)
    settings['prior_pooling'] |= dict(rho=rho, weak='weak', strong='strong', adaptive=adapts)
    settings['utility'] |= dict(target=target)
    settings['rate_estimate'] = dict(fn='thompson' if drawn else 'mean')
  chooser = Curriculum(settings, N, group=M, columns=anchors(data, anchored))
  steps = []
  chooser.observe(FIRST, data['right'][0][FIRST], np.full(len(FIRST), M))
  for step, right_N in enumerate(data['right'][1:]):
    proposal = chooser.propose(step, SLOTS)
    chooser.accept(proposal)
    index = proposal.index
    chooser.observe(index, right_N[index], np.full(SLOTS, M))
    place = chooser.metrics()['curriculum/capability']
    steps.append((index, proposal.worth, chooser.posterior(np.arange(N)), place))
  return record(steps, case)


def ours(data):
  with in_float64():
    return {name: x for case in CASES for name, x in own(data, case).items()}


lib.main(__name__)

"""Selection rules for tests/bench/curriculum.py: settings of the curriculum, and baselines.

step(step, generate) → (index, k, n) of the groups for the update; it calls generate(index, n) → k any number of times,
and each call costs rollouts (by default n = G each). observe(index, k, n) is called once per step with distinct
prompts. predict(index) → mean, variance (or NaN), P(mixed).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxrl_llm import curriculum
from jaxrl_llm.config import loading, stages
from jaxrl_llm.curriculum import allocation

NONE = dict(prior_pooling=dict(fn='none'))
TOP = dict(selection=dict(fn='top'), eligibility=dict(fn='none'))
UNIFORM = TOP | NONE | dict(candidates=dict(fn='stream', multiple=1), utility=dict(fn='uniform'))
BETA = TOP | NONE | dict(evidence_decay=dict(fn='visit', decay=0.5))
MOPPS = BETA | dict(
  candidates=dict(fn='stream', multiple=16),
  rate_estimate=dict(fn='thompson'),
  utility=dict(fn='mopps'),
)


class Chosen:
  """The curriculum with allocated settings: the update uses the groups that it selects."""

  def __init__(self, world: Any, seed: int, **settings):
    self.world = world
    anchors = zip(('pass_rate_weak', 'pass_rate_strong'), world.anchor_Nx2.T, strict=True)
    columns = (
      dict(columns=dict(anchors))
      if settings.get('prior_pooling', {}).get('fn') == 'anchors'
      else {}
    )
    self.curriculum = curriculum.Curriculum(
      loading.default().curriculum.to_dict() | settings,
      len(world.difficulty_N),
      group=world.group,
      seed=seed,
      kind=world.kind_N,
      **columns,
    )

  def chosen(self, step, slots):
    """The prompts of one call."""
    proposal = self.curriculum.propose(step, slots)
    self.curriculum.accept(proposal)
    return proposal.index

  def step(self, step, generate):
    index = self.chosen(step, self.world.prompts)
    return self.full_groups(index, generate(index))

  def full_groups(self, index, k):
    """Groups of G."""
    return index, k, np.full_like(k, self.world.group)

  def observe(self, index, k, n):
    self.curriculum.observe(index, k, n)

  def predict(self, index):
    return self.curriculum.predict(index)


class Dynamic(Chosen):
  """Generates batches until P groups are mixed, at most `rounds` of them. arXiv:2503.14476 (DAPO).

  Mixed groups beyond P are dropped, or with `carry` used in the next step.
  """

  def __init__(self, world, seed, *, carry: bool, rounds: int = 10, **settings):
    super().__init__(world, seed, **(UNIFORM | settings))
    self.carry, self.rounds, self.calls = carry, rounds, 0
    self.index, self.k = np.zeros(0, np.int32), np.zeros(0, np.int64)

  def step(self, step, generate):
    P, G = self.world.prompts, self.world.group
    for _ in range(self.rounds):
      if len(self.index) >= P:
        break
      index = self.chosen(self.calls, P)
      self.calls += 1
      k = generate(index)
      mixed = (k > 0) & (k < G)
      self.index = np.concatenate([self.index, index[mixed]])
      self.k = np.concatenate([self.k, k[mixed]])
    index, k, left = self.index[:P], self.k[:P], P if self.carry else len(self.index)
    self.index, self.k = self.index[left:], self.k[left:]
    return self.full_groups(index, k)


class Greso(Chosen):
  """1½P groups, all-equal ones left out, and top-ups while P are far. arXiv:2506.02177 (GRESO).

  Short by d with a share z of all-equal groups, the next call is of clip(1.25 d/(1 − z), P/4, 1½P), and the last
  one if that is not clipped; groups beyond P are dropped. `eligibility` decides which prompts are skipped; the others
  are drawn uniformly, not from a stream.
  """

  def __init__(self, world, seed, **settings):
    super().__init__(world, seed, **(TOP | NONE | dict(utility=dict(fn='uniform')) | settings))
    self.calls = 0

  def step(self, step, generate):
    P, G = self.world.prompts, self.world.group
    limit = 3 * P // 2
    groups, size, want = [], limit, np.inf
    while True:
      index = self.chosen(self.calls, min(size, len(self.world.difficulty_N)))
      self.calls += 1
      groups.append((index, generate(index)))
      index, k = (np.concatenate(x) for x in zip(*groups, strict=True))
      mixed = (k > 0) & (k < G)
      short = P - mixed.sum()
      if short <= 0 or want <= limit or len(groups) == 10:
        return self.full_groups(index[mixed][:P], k[mixed][:P])
      want = 1.25 * short / max(mixed.mean(), 1e-9)
      size = int(np.clip(np.ceil(want), max(P // 4, 1), limit))


class Allocated(Chosen):
  """The chosen prompts share the step's rollouts in parts of G/4; weights of a rule are not simulated.

  With parts of G/2 most rules change nothing: after one or two groups, the third part of one prompt is never worth
  more than the second of another.
  """

  def __init__(self, world, seed, *, rule: dict, **settings):
    super().__init__(world, seed, **settings)
    self.rule, self.unit = stages.pick(allocation, rule), max(world.group // 4, 1)

  def step(self, step, generate):
    index = self.chosen(step, self.world.prompts)
    mean, variance, _ = self.predict(index)
    total = mean * (1 - mean) / variance - 1
    length, parts = self.world.tokens_N[index], self.world.prompts * self.world.group // self.unit
    allocated = self.rule(mean * total, (1 - mean) * total, length, parts, self.unit)
    n = allocated.parts * self.unit
    return index, generate(index, n), n


class Oracle(Chosen):
  """Prompts with true rates nearest ½, which are also the most likely mixed groups: P(mixed) falls with |p − ½|."""

  def __init__(self, world, seed):
    super().__init__(world, seed, **BETA)

  def step(self, step, generate):
    far_N = np.abs(self.world.graded() - 0.5)
    index = np.argpartition(far_N, self.world.prompts - 1)[: self.world.prompts]
    return self.full_groups(index, generate(index))


class LastRate(Chosen):
  """Nearest ½ of e ← ½e + ½r, e = ½ before the first visit; ties at random."""

  def __init__(self, world, seed):
    super().__init__(world, seed, **BETA)
    self.rate_N, self.random = np.full(len(world.difficulty_N), 0.5), np.random.default_rng(seed)

  def step(self, step, generate):
    order = self.random.permutation(len(self.rate_N))
    far = np.argsort(np.abs(self.rate_N[order] - 0.5), kind='stable')
    index = order[far[: self.world.prompts]]
    return self.full_groups(index, generate(index))

  def observe(self, index, k, n):
    self.rate_N[index] = (self.rate_N[index] + k / n) / 2

  def predict(self, index):
    rate, G = self.rate_N[index], self.world.group
    return rate, np.full(len(index), np.nan), 1 - rate**G - (1 - rate) ** G


class EasyToHard(Chosen):
  """A window of N/8 prompts moves from the easiest at the start to the hardest."""

  def __init__(self, world, seed):
    super().__init__(world, seed, **BETA)
    self.order, self.random = np.argsort(-world.graded()), np.random.default_rng(seed)
    self.steps = world.rollouts // (world.prompts * world.group)

  def step(self, step, generate):
    N = len(self.order)
    width = max(N // 8, self.world.prompts)
    start = round(min(step / self.steps, 1) * (N - width))
    index = self.random.choice(self.order[start : start + width], self.world.prompts, replace=False)
    return self.full_groups(index, generate(index))


BOTS = TOP | dict(
  candidates=dict(fn='everything'),
  evidence_decay=dict(fn='step', decay=0.9),
  prior_pooling=dict(fn='anchors', rho=0.1),
  rate_estimate=dict(fn='thompson'),
  utility=dict(fn='bots'),
)
# name → (class, its settings). The world determines the quality of the anchors of BOTS: +poor, +shuffled.
RULES = {
  'uniform': (Chosen, UNIFORM),
  'oracle': (Oracle, {}),
  'dynamic': (Dynamic, dict(carry=False)),
  'dynamic, carry': (Dynamic, dict(carry=True)),
  'easy to hard': (EasyToHard, {}),
  'last rate': (LastRate, {}),
  'mopps 1': (Chosen, MOPPS | dict(evidence_decay=dict(fn='visit', decay=1.0))),
  'mopps': (Chosen, MOPPS),
  'mopps, mean': (Chosen, MOPPS | dict(rate_estimate=dict(fn='mean'))),
  'mopps + kind': (Chosen, MOPPS | dict(prior_pooling=dict(fn='kind'))),
  'mean, all': (Chosen, BETA | dict(utility=dict(fn='mopps'))),
  'mixed_group': (Chosen, BETA),
  'mixed_group + kind': (Chosen, TOP),
  'bots': (Chosen, BOTS),
  'bots, rho 0': (Chosen, BOTS | dict(prior_pooling=dict(fn='anchors', rho=0.0))),
  'bots + mixed_group': (
    Chosen,
    BOTS | dict(rate_estimate=dict(fn='mean'), utility=dict(fn='mixed_group')),
  ),
  'bots 0.03 + mixed_group': (
    Chosen,
    BOTS
    | dict(evidence_decay=dict(fn='step', decay=0.97), prior_pooling=dict(fn='anchors', rho=0.03))
    | dict(rate_estimate=dict(fn='mean'), utility=dict(fn='mixed_group')),
  ),
  'bots, no anchors': (
    Chosen,
    BOTS | dict(prior_pooling=dict(fn='anchors', weak='', strong='', rho=0.1)),
  ),
  'vade': (
    Chosen,
    TOP
    | NONE
    | dict(
      evidence_decay=dict(fn='two_scale'),
      rate_estimate=dict(fn='thompson'),
      utility=dict(fn='vade'),
    ),
  ),
  'greso': (Greso, dict(evidence_decay=dict(fn='none'), eligibility=dict(fn='streaks'))),
  'scalerl': (
    Chosen,
    UNIFORM | dict(evidence_decay=dict(fn='none'), eligibility=dict(fn='retire')),
  ),
  'dots': (
    Chosen,
    TOP
    | dict(
      evidence_decay=dict(fn='reset', every=2),
      prior_pooling=dict(fn='kernel', feature='kind', every=2),
      utility=dict(fn='bots'),
      selection=dict(fn='softmax', temperature=1e-3),
    ),
  ),
  'default': (Chosen, {}),
  'default, neyman': (Allocated, dict(rule=dict(fn='neyman'))),
  'default, xrpo': (Allocated, dict(rule=dict(fn='xrpo'))),
  'default, marginal': (Allocated, dict(rule=dict(fn='marginal'))),
  'default, knapsack': (Allocated, dict(rule=dict(fn='marginal', right=1, wrong=2))),
  'uniform, marginal': (Allocated, UNIFORM | dict(rule=dict(fn='marginal'))),
  'default, strength 1': (Chosen, dict(prior_pooling=dict(fn='kind', strength=1.0))),
  'default, strength 4': (Chosen, dict(prior_pooling=dict(fn='kind', strength=4.0))),
  'default, no kinds': (Chosen, NONE),
  'default, visit decay 0.5': (Chosen, dict(evidence_decay=dict(fn='visit', decay=0.5))),
  'default, visit decay 1': (Chosen, dict(evidence_decay=dict(fn='visit', decay=1.0))),
  'default, step decay 0.98': (Chosen, dict(evidence_decay=dict(fn='step', decay=0.98))),
  'default, kind decay 0.98': (Chosen, dict(kind_decay=0.98)),
  'default, top': (Chosen, dict(selection=dict(fn='top'))),
  'default, temperature 0.1': (Chosen, dict(selection=dict(fn='softmax', temperature=0.1))),
  'default, no audit': (Chosen, dict(eligibility=dict(fn='none'))),
  'default, stream 16': (Chosen, dict(candidates=dict(fn='stream', multiple=16))),
}
# The default of --rules.
MAIN = (
  *('uniform', 'oracle', 'dynamic', 'dynamic, carry', 'easy to hard', 'last rate'),
  *('mopps 1', 'mopps', 'mean, all', 'mixed_group', 'mixed_group + kind', 'default'),
  *('bots', 'bots + mixed_group', 'bots, no anchors', 'vade', 'greso', 'scalerl', 'dots'),
)

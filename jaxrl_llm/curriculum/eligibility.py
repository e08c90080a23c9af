"""Which candidates are struck out before the choice, and how many slots audit them. dataset → EligibilityRule.

Every public function here may be named in `config.curriculum.eligibility.fn`. Each has a `share`: that part of
the slots goes to prompts drawn uniformly from those struck out, and while there are none from all that are
not chosen, so that no belief goes stale for ever. Where too few candidates are left for the
slots, some of those struck out are drawn after all.
"""

from __future__ import annotations

import numpy as np

from jaxrl_llm.curriculum import setting_checks
from jaxrl_llm.curriculum.records import DatasetInfo, EligibilityRule, Mean, StepEvidence, State

_MOST = 255  # a streak is counted in a byte


def none(dataset: DatasetInfo) -> EligibilityRule:
  """All may be chosen. Source: none."""
  del dataset
  return EligibilityRule({})


def audit(dataset: DatasetInfo, *, share: float = 0.05) -> EligibilityRule:
  """All may be chosen, and that share of slots goes to prompts drawn uniformly.

  Keeps the posterior of prompts that a utility would never choose again from going stale. Source: none.
  """
  del dataset
  setting_checks.within('gate.share', share, 0, 1)
  return EligibilityRule({}, audit=share)


def retire(dataset: DatasetInfo, *, rate: float = 0.9, visits: int = 2, share: float = 0.02) -> EligibilityRule:
  """A prompt whose posterior mean is `rate` or more after `visits` visits returns as an audit alone.

  The mean is over its whole history with forget.none, as the paper's is. One that fails its audit, so that
  the mean falls below, is back. Source: arXiv:2510.13786 (ScaleRL; 0.9 of the history, by third-party
  notes; the visits and audits are ours).
  """
  del dataset
  setting_checks.within('gate.rate', rate, 0, 1)
  setting_checks.whole('gate.visits', visits, 1)
  setting_checks.within('gate.share', share, 0, 1)

  def barred(state: State, index: np.ndarray, visits_I: np.ndarray, mean: Mean):
    del state, index
    return (visits_I >= visits) & (mean() >= rate)

  return EligibilityRule({}, barred, audit=share)


def streaks(
  dataset: DatasetInfo,
  *,
  easy: float = 0.98,
  hard: float = 0.11,
  target: float = 0.25,
  start: float = 0.5,
  step: float = 0.01,
  floor: float = 0.01,
  share: float = 0.0,
) -> EligibilityRule:
  """Skipped with probability 1 − max(p^c, 0.01), c the visits in a row that were all easy, or all hard.

  Easy is a rate of at least 0.98, hard one of at most 0.11 (all wrong, at G = 8), each with its p. In
  a step with a prompt that was seen before, p_easy ← p_easy − 0.01 if a third of `target` or more of its
  groups were easy, else + 0.01; p_hard likewise by two thirds; both stay in [0.05, 0.95]. (The paper
  waits for the end of the first epoch, which is the same for a stream.) A step is not filled up
  with further rollouts. Source: arXiv:2506.02177 (GRESO), official code.
  """
  for name, value in dict(
    easy=easy, hard=hard, target=target, start=start, step=step, floor=floor, share=share
  ).items():
    setting_checks.within(f'gate.{name}', value, 0, 1)
  marks = (lambda rate: rate >= easy), (lambda rate: rate <= hard)

  def barred(state: State, index: np.ndarray, visits_I: np.ndarray, mean: Mean):
    del visits_I, mean
    every = np.arange(_MOST + 1)  # powers of all streaks there can be: the prompts look theirs up
    skip = [1 - np.maximum(state[name] ** every, floor) for name in ('p_easy', 'p_hard')]
    easy_I, hard_I = state['streak'][0, index], state['streak'][1, index]  # one of them is 0
    return np.maximum(skip[0][easy_I], skip[1][hard_I])

  def learn(state: State, seen: StepEvidence) -> State:
    rate_V, streak_2xN = seen.right_V / seen.count_V, state['streak'].copy()
    hit_2xV = np.stack([mark(rate_V) for mark in marks])
    old = streak_2xN[:, seen.index_V]
    streak_2xN[:, seen.index_V] = np.where(hit_2xV, np.minimum(old, _MOST - 1) + 1, 0)
    after = dict(state, streak=streak_2xN)
    if not seen.first_V.all():
      limits = dict(p_easy=target / 3, p_hard=2 * target / 3)
      for (name, most), met in zip(limits.items(), hit_2xV.mean(1), strict=True):
        moved = state[name] + (-step if met >= most else step)
        after[name] = np.asarray(np.clip(moved, 0.05, 0.95))
    return after

  begin = np.array(float(start))
  state = dict(streak=np.zeros((2, dataset.size), np.uint8), p_easy=begin, p_hard=begin)
  return EligibilityRule(state, barred, learn, share)

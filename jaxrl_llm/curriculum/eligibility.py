"""Eligibility of candidates, and slots that audit ineligible ones: dataset → EligibilityRule.

Each rule has a `share`: that part of the slots goes to prompts drawn uniformly from the barred ones, or from all that
are not chosen where none are barred. Audits keep posteriors from going stale. Where too few candidates are eligible,
barred ones fill the remaining slots. Every public function may be named in `config.curriculum.eligibility.fn`.
"""

from __future__ import annotations

import numpy as np

from jaxrl_llm.curriculum import setting_checks
from jaxrl_llm.curriculum.records import DatasetInfo, EligibilityRule, Mean, State, StepEvidence

_MAX_STREAK = 255  # a streak is a uint8


def none() -> None:
  """All prompts are eligible."""


def audit(dataset: DatasetInfo, *, share: float = 0.05) -> EligibilityRule:
  """All prompts are eligible, and that share of slots goes to prompts drawn uniformly.

  Keeps the posterior of prompts with a low utility from going stale.
  """
  del dataset
  setting_checks.check_range('eligibility.share', share, 0, 1)
  return EligibilityRule({}, audit=share)


def retire(
  dataset: DatasetInfo, *, rate: float = 0.9, visits: int = 2, share: float = 0.02
) -> EligibilityRule:
  """A prompt with a posterior mean of at least `rate` after `visits` visits is sampled only as an audit.

  With `evidence_decay.fn=none` the mean is over the whole history, as in the paper. A prompt whose mean falls below
  `rate` by an audit is eligible again. arXiv:2510.13786 (ScaleRL; 0.9 of the history, by third-party
  notes; the visits and audits are ours).
  """
  del dataset
  setting_checks.check_range('eligibility.rate', rate, 0, 1)
  setting_checks.check_integer('eligibility.visits', visits, 1)
  setting_checks.check_range('eligibility.share', share, 0, 1)

  def barred(state: State, index: np.ndarray, visits_I: np.ndarray, mean: Mean) -> np.ndarray:
    del state, index
    return (visits_I >= visits) & (mean() >= rate)

  return EligibilityRule({}, barred, audit=share)


def streaks(
  dataset: DatasetInfo,
  *,
  easy: float = 0.978,
  hard: float = 0.011,
  target: float = 0.25,
  start: float = 0.5,
  step: float = 0.01,
  floor: float = 0.01,
  share: float = 0.0,
) -> EligibilityRule:
  """Skipped with probability 1 − max(p^c, 0.01), c the length of the current streak of easy or of hard visits.

  Easy is a rate of at least `easy`, hard one of at most `hard`, each with its p; the official marks are 0.98 and 0.11
  of rewards of 1 and 0.1, which are these rates. After a call with a revisited prompt, p_easy ← p_easy − 0.01 if at
  least a third of `target` of the groups were easy, else + 0.01; p_hard likewise by two thirds; both stay in
  [0.05, 0.95]. The official code moves them once a batch, by all its calls. (The paper waits for the end of the first
  epoch, which is the same for a stream.) Skipped prompts are not replaced by further rollouts.
  arXiv:2506.02177 (GRESO), official code.
  """
  for name, value in dict(
    easy=easy, hard=hard, target=target, start=start, step=step, floor=floor, share=share
  ).items():
    setting_checks.check_range(f'eligibility.{name}', value, 0, 1)

  def barred(state: State, index: np.ndarray, visits_I: np.ndarray, mean: Mean) -> np.ndarray:
    del visits_I, mean
    streaks_C = np.arange(_MAX_STREAK + 1)  # a lookup table of all possible streaks
    skip = [1 - np.maximum(state[name] ** streaks_C, floor) for name in ('p_easy', 'p_hard')]
    easy_I, hard_I = (
      state['streak'][0, index],
      state['streak'][1, index],
    )  # at least one of them is 0
    return np.maximum(skip[0][easy_I], skip[1][hard_I])

  def learn(state: State, evidence: StepEvidence) -> State:
    rate_V, streak_2xN = evidence.right_V / evidence.count_V, state['streak'].copy()
    hit_2xV = np.stack([rate_V >= easy, rate_V <= hard])
    old = streak_2xN[:, evidence.index_V]
    streak_2xN[:, evidence.index_V] = np.where(hit_2xV, np.minimum(old, _MAX_STREAK - 1) + 1, 0)
    after = dict(state, streak=streak_2xN)
    if not evidence.first_V.all():
      limits = dict(p_easy=target / 3, p_hard=2 * target / 3)
      for (name, most), met in zip(limits.items(), hit_2xV.mean(1), strict=True):
        moved = state[name] + (-step if met >= most else step)
        after[name] = np.asarray(np.clip(moved, 0.05, 0.95))
    return after

  p = np.array(float(start))
  state = dict(streak=np.zeros((2, dataset.size), np.uint8), p_easy=p, p_hard=p)
  return EligibilityRule(state, barred, learn, share)

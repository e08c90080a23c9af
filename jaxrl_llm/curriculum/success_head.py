"""A logistic head from features of prompts to success rates, fitted online, with its reliability measured.

logit m = logit m₀ + θ·z: m₀ is the rate expected without the features z. The head is used in the measure in which its
predictions from before the evidence were right: m₀ + gain·(m − m₀).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxrl_llm.curriculum.records import State

_ITERATIONS = 12  # of Newton's method, from the previous fit
_HALVINGS = 8  # of a step
_LARGEST = 6.0  # |logit|: rates from 0.0025 to 0.9975


class Settings(NamedTuple):
  """Settings of a head."""

  ridge: float  # precision of the prior of θ
  visits: float  # of which the prior reliability has the weight
  memory: float  # visits over which evidence is kept
  share: float  # prior of Var(p | z) / (m(1 − m))
  mean_F: np.ndarray | float = 0.0  # of the prior of θ


class Visits(NamedTuple):
  """The evidence of visited prompts with features."""

  design_VxF: np.ndarray
  expected_V: np.ndarray  # m₀
  right_V: np.ndarray  # k
  count_V: np.ndarray  # n
  square_V: np.ndarray  # unbiased estimate of p²; only where n > 1
  first_V: np.ndarray  # bool, the first visit of the prompt


def initial(features: int) -> State:
  """A head without evidence: θ is the mean of its prior, and gain 0."""
  return dict(
    head_gram=np.zeros((features, features)),
    head_moment=np.zeros(features),
    # Σ d·e, Σ d², Σ e² and Σ 1, with d = m − m₀ and e = k/n − m₀
    head_slope=np.zeros(4),
    # of m₀ + gain·d and of m₀: Σ (p − m)² and Σ m(1 − m)
    head_spread=np.zeros((2, 2)),
    head_gain=np.zeros(()),
    head_unexplained=np.ones(()),
  )


def weights(state: State, settings: Settings) -> np.ndarray:
  """θ, float64 [F]."""
  return _solve(state['head_gram'], state['head_moment'], settings)


def predict(
  theta_F: np.ndarray, gain: float | np.ndarray, design_IxF: np.ndarray, expected_I: np.ndarray
) -> np.ndarray:
  """m₀ + gain·(m − m₀), in the type of `design_IxF`."""
  dtype = design_IxF.dtype
  expected_I = expected_I.astype(dtype)
  logit_I = logit(expected_I) + design_IxF @ theta_F.astype(dtype)
  return expected_I + dtype.type(gain) * (_rate(logit_I) - expected_I)


def learn(state: State, visits: Visits, settings: Settings) -> State:
  """The head after these visits; measures of reliability compare them with its predictions from before."""
  keep = (1 - 1 / settings.memory) ** len(visits.count_V)
  measured, share = _measured(state, visits, settings)
  older = keep * state['head_gram'], keep * state['head_moment']
  gram_FxF, moment_F = _fitted(*older, visits, share, settings)
  return measured | dict(head_gram=gram_FxF, head_moment=moment_F)


def _measured(state: State, visits: Visits, settings: Settings) -> tuple[State, float]:
  """Gain and reliability after first visits, whose prompts were chosen without evidence of their own.

  Also returns Var(p | z) / (m(1 − m)).
  """
  at = visits.first_V & (visits.count_V > 1)
  count = np.count_nonzero(at)
  keep = (1 - 1 / settings.memory) ** count
  expected_V = visits.expected_V[at]
  rate_V, square_V = visits.right_V[at] / visits.count_V[at], visits.square_V[at]
  full_V = predict(weights(state, settings), 1.0, visits.design_VxF[at], expected_V)
  step_V, error_V = full_V - expected_V, rate_V - expected_V
  added = [step_V @ error_V, step_V @ step_V, error_V @ error_V, count]
  slope = keep * state['head_slope'] + added
  used_V = expected_V + state['head_gain'] * step_V
  m_2xV = np.stack([used_V, expected_V])
  residual_2 = (square_V - 2 * m_2xV * rate_V + m_2xV**2).sum(1)
  spread = keep * state['head_spread'] + np.stack([residual_2, (m_2xV * (1 - m_2xV)).sum(1)], 1)
  share, share_without = _shares(spread, slope[3], settings)
  # The slope of e on d is shrunk as by a prior N(0, 1): errors have the variance Σ e² / Σ 1.
  gain = slope[0] / (slope[1] + max(slope[2] / max(slope[3], 1), 1e-9))
  measured = dict(head_slope=slope, head_spread=spread, head_gain=np.asarray(np.clip(gain, 0, 1)))
  return measured | dict(head_unexplained=np.asarray(share / share_without)), share


def _shares(spread_2x2: np.ndarray, count: float, settings: Settings) -> np.ndarray:
  """Var(p | z) / (m(1 − m)) with the head and without it, after shrinkage."""
  binary = spread_2x2[1, 1] / count if count else 0.25
  pseudo = settings.visits * max(binary, 1e-9)
  share_2 = (spread_2x2[:, 0] + pseudo * settings.share) / (spread_2x2[:, 1] + pseudo)
  return np.clip(share_2, 1e-3, 1)


def _fitted(
  gram_FxF: np.ndarray, moment_F: np.ndarray, visits: Visits, share: float, settings: Settings
) -> tuple[np.ndarray, np.ndarray]:
  """Adds the visits' likelihood, by its second-order expansion at the new maximum.

  Rollouts of a prompt are alike by 1/(1 + s) = `share`: n of them count as n / (1 + (n − 1)·share), the
  quasi-likelihood of a Beta-binomial. The maximum is found by Newton's method, with steps that are halved until they
  gain: far from it, where rates are near 0 or 1, a whole step goes much too far.
  """
  z_VxF = visits.design_VxF.astype(float)
  rate_V = visits.right_V / visits.count_V
  count_V = visits.count_V / (1 + (visits.count_V - 1) * share)
  offset_V = logit(visits.expected_V)

  def objective(theta_F: np.ndarray) -> float:
    logit_V = offset_V + z_VxF @ theta_F
    likelihood = count_V @ (rate_V * logit_V - np.logaddexp(0, logit_V))
    distance_F = theta_F - settings.mean_F
    prior = settings.ridge * distance_F @ distance_F
    return likelihood + moment_F @ theta_F - (theta_F @ gram_FxF @ theta_F + prior) / 2

  def expanded(theta_F: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    score_V = z_VxF @ theta_F
    m_V = _rate(offset_V + score_V)
    curvature_V = count_V * m_V * (1 - m_V)
    gram = gram_FxF + z_VxF.T @ (curvature_V[:, None] * z_VxF)
    return gram, moment_F + z_VxF.T @ (curvature_V * score_V + count_V * (rate_V - m_V))

  theta_F = _solve(gram_FxF, moment_F, settings)
  for _ in range(_ITERATIONS):
    step_F, now = _solve(*expanded(theta_F), settings) - theta_F, objective(theta_F)
    parts = (0.5**n * step_F for n in range(_HALVINGS))
    theta_F = theta_F + next((x for x in parts if objective(theta_F + x) >= now), 0 * step_F)
  return expanded(theta_F)


def _solve(gram_FxF: np.ndarray, moment_F: np.ndarray, settings: Settings) -> np.ndarray:
  precision_FxF = gram_FxF + settings.ridge * np.eye(len(moment_F))
  return np.linalg.solve(precision_FxF, moment_F + settings.ridge * settings.mean_F)


def logit(rate: np.ndarray) -> np.ndarray:
  """log(m / (1 − m))."""
  return np.log(rate) - np.log1p(-rate)


def _rate(logit: np.ndarray) -> np.ndarray:
  return 1 / (1 + np.exp(-np.clip(logit, -_LARGEST, _LARGEST)))

"""Graded scores: how often their groups are mixed, compared with binary scores of the same mean.

A group whose scores are all 0.5 is never mixed, and one of scores with noise nearly always, whatever their variance.
Neither follows from the mean, so that the probability P of the binary model is corrected: 1 − (1 − P)^τ, with τ > 0
for each kind. With h = −log(1 − P) and x = τ·h, the likelihood of a visit is 1 − exp(−x) where its group was mixed, and
exp(−x) where not. log τ follows it by Fisher scoring: + Σ score / (1 + Σ information), score = x/(eˣ − 1) or −x,
information = x²/(eˣ − 1), where older information decays. A kind without a score strictly between 0 and 1 keeps τ = 1
exactly.
"""

from __future__ import annotations

import numpy as np

from jaxrl_llm.curriculum.records import State

_MAX_P = 1 - 1e-9  # so that h is finite
_MAX_LEARNED_P = 0.99  # so that one group cannot outweigh all others
_MAX_STEP, _MAX_LOG = 1.0, 5.0


def initial(kinds: int) -> State:
  """The state of kinds without evidence; `found`: a visit had a score strictly between 0 and 1."""
  zeros = np.zeros(kinds)
  return dict(log_exponent=zeros, information=zeros, found=np.zeros(kinds, bool))


def exponents(state: State) -> np.ndarray:
  """τ of each kind."""
  return np.exp(state['log_exponent'])


def corrected(mixed: np.ndarray, exponent: np.ndarray) -> np.ndarray:
  """1 − (1 − P)^τ, and P to the bit where τ is 1."""
  power = -np.expm1(exponent * np.log1p(-np.minimum(mixed, _MAX_P)))
  return np.where(exponent == 1, mixed, power)


def learn(
  state: State,
  kind_V: np.ndarray,
  graded_V: np.ndarray,
  binary_V: np.ndarray,
  mixed_V: np.ndarray,
  decay: float,
) -> State:
  """The state after one visit to each of V prompts; information of a kind decays by `decay` per visit.

  `graded_V` is Σ x(1 − x) over the scores x, `binary_V` P of the binary model before the visit.
  """
  kinds = len(state['found'])
  found_K = state['found'] | (np.bincount(kind_V, graded_V, kinds) > 0)
  at = found_K[kind_V]
  if not at.any():
    return state
  kind_V, mixed_V = kind_V[at], mixed_V[at]
  hazard_V = -np.log1p(-np.clip(binary_V[at], 1e-6, _MAX_LEARNED_P))
  x_V = np.exp(state['log_exponent'])[kind_V] * hazard_V
  odds_V = 1 / np.expm1(x_V)
  score_K = np.bincount(kind_V, x_V * np.where(mixed_V, odds_V, -1), kinds)
  information_K = state['information'] * decay ** np.bincount(kind_V, minlength=kinds)
  information_K += np.bincount(kind_V, x_V**2 * odds_V, kinds)
  step_K = np.clip(score_K / (1 + information_K), -_MAX_STEP, _MAX_STEP)
  log_K = np.clip(state['log_exponent'] + step_K, -_MAX_LOG, _MAX_LOG)
  return dict(log_exponent=log_K, information=information_K, found=found_K)

"""What a prompt's prior is, and what it learns from others. dataset → PriorPool.

A prior is Beta pseudo-counts (right, wrong). A prompt's own evidence is added to it.
Every public function here may be named in `config.curriculum.prior_pooling.fn`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jaxrl_llm.curriculum import setting_checks
from jaxrl_llm.curriculum.records import DatasetInfo, Index, StepEvidence, PriorPool, State, column


def none(dataset: DatasetInfo) -> PriorPool:
  """Beta(1, 1) for every prompt. Source: arXiv:2507.04632 (MoPPS)."""
  return PriorPool({}, _even(dataset), _nothing)


def kind(dataset: DatasetInfo, *, strength: float = 2.0, floor: float = 1.0) -> PriorPool:
  """Beta(s·m, s·(1 − m)), m = (right + floor) / (right + wrong + 2·floor) of the prompt's kind.

  A prompt never seen is expected to do as its kind does now; a kind's counts age by
  config.curriculum.kind_decay a visit. `strength` is how alike prompts of a kind are, in
  pseudo-counts: small keeps room for difference between them, so the chance of a mixed group stays
  that of a Beta-binomial and not of one shared rate. Source: none (empirical Bayes).
  """
  setting_checks.within('share.strength', strength, 0, open_low=True)
  setting_checks.within('share.floor', floor, 0, open_low=True)
  kinds = int(dataset.kind_N.max(initial=0)) + 1

  def prior(state: State, index: Index) -> np.ndarray:
    right_K, wrong_K = state['pooled'] + floor
    rate_K = (right_K / (right_K + wrong_K)).astype(np.float32)
    return _beta(rate_K[dataset.kind_N[index]], strength)

  def learn(state: State, seen: StepEvidence) -> tuple[State, None]:
    kind_V, counts_2xV = dataset.kind_N[seen.index_V], np.stack([seen.right_V, _wrong(seen)])
    # A kind ages by how often it was seen, whatever the order of rows.
    pooled = state['pooled'] * dataset.kind_decay ** np.bincount(kind_V, minlength=kinds)
    for row, counts_V in zip(pooled, counts_2xV, strict=True):
      row += np.bincount(kind_V, counts_V, minlength=kinds)
    return dict(pooled=pooled), None

  return PriorPool(dict(pooled=np.zeros((2, kinds))), prior, learn)


def anchors(
  dataset: DatasetInfo,
  *,
  weak: str = 'pass_rate_weak',
  strong: str = 'pass_rate_strong',
  rho: float = 0.1,
  momentum: float = 0.9,
  adaptive: bool = False,
) -> PriorPool:
  """Beta(1, 1), and a step tells everyone: p̃ = clip(F₀ + c(F₁ − F₀), 0, 1), for a visited prompt its own rate.

  F₀, F₁: pass rates of a weak and a strong model, the fields `weak` and `strong` of the data; where a
  name is empty, 0 and 1 for all, and p̃ is one ability for everyone. The policy's place c between them:
  c ← 0.9c + 0.1(mean r − mean F₀)/(mean F₁ − mean F₀ + 1e-6) over the visited prompts, the first step
  taken whole. Visited prompts gain their k and n − k, all others ρG·p̃ and ρG·(1 − p̃): with
  forget.step that is α ← (1 − λ)α + λ + (1 − ρ)s + ρG·p̃. `adaptive` halves ρ after a step in which
  p̃ missed by 0.25 or more in the mean of the visited, from the next step on (that order is ours).
  Raises UserError where a row lacks a rate. Source: arXiv:2510.26374 (BOTS).
  """
  setting_checks.within('share.rho', rho, 0, 1)
  setting_checks.within('share.momentum', momentum, 0, 1)
  setting_checks.one_of('share.adaptive', adaptive, (True, False))
  weak_N = column(dataset, 'share.weak', weak, 0, 1) if weak else np.zeros(dataset.size, np.float32)
  strong_N = column(dataset, 'share.strong', strong, 0, 1) if strong else np.ones_like(weak_N)
  gap_N = strong_N - weak_N

  def learn(state: State, seen: StepEvidence) -> tuple[State, np.ndarray]:
    at, rate_V = seen.index_V, seen.right_V / seen.count_V
    ability, rho_now = state['capability'], state['rho']
    if len(at):
      place = (rate_V.mean() - weak_N[at].mean()) / (gap_N[at].mean() + 1e-6)
      old = place if np.isnan(ability) else ability
      ability = np.asarray(momentum * old + (1 - momentum) * place)
    if np.isnan(ability):  # nothing was ever seen
      return state, np.zeros((2, dataset.size), np.float32)
    p_N = np.clip(weak_N + np.float32(ability) * gap_N, 0, 1)
    missed = bool(len(at)) and np.abs(p_N[at] - rate_V).mean() >= 0.25
    gained = np.float32(rho_now * dataset.group) * np.stack([p_N, 1 - p_N])
    gained[:, at] = seen.right_V, _wrong(seen)
    after = rho_now / 2 if adaptive and missed else rho_now
    return dict(capability=ability, rho=np.asarray(after)), gained

  return PriorPool(dict(capability=np.array(np.nan), rho=np.array(float(rho))), _even(dataset), learn)


def kernel(
  dataset: DatasetInfo,
  *,
  feature: str = 'traits',
  every: int = 2,
  temperature: float = 0.1,
  strength: float = 8.0,
) -> PriorPool:
  """Beta(s·d, s·(1 − d)), d_i = Σ_r w_ir·(k_r + ½)/(n_r + 1), w = softmax_r(z_i·z_r / temperature).

  Every `every` steps all prompts of the step are drawn evenly: the reference set, r. From its
  rates d is made anew for all prompts, and kept until the next one. z are features of unit length:
  the field `feature` of the data (an embedding), 'traits' of the rows (one-hot), or 'kind'. The
  official method learns a map of the embeddings and a calibration of d offline; neither is built here,
  the kernel is fixed. There, references are extra rollouts; here they are the step's own.
  Raises UserError where a row lacks the feature. Source: arXiv:2506.05316 (DOTS; every 2).
  """
  setting_checks.whole('share.every', every, 1)
  setting_checks.within('share.temperature', temperature, 0, open_low=True)
  setting_checks.within('share.strength', strength, 0, open_low=True)
  unit_NxF = _features(dataset, feature)

  def prior(state: State, index: Index) -> np.ndarray:
    return _beta(state['rate'][index], strength)

  def learn(state: State, seen: StepEvidence) -> tuple[State, None]:
    if seen.step % every or not len(seen.index_V):
      return state, None
    known_R = ((seen.right_V + 0.5) / (seen.count_V + 1)).astype(np.float32)
    rate_N = np.empty(dataset.size, np.float32)
    for at in range(0, dataset.size, _BLOCK):  # [N, R] at once would be gigabytes
      part = slice(at, at + _BLOCK)
      like_IxR = unit_NxF[part] @ unit_NxF[seen.index_V].T
      w_IxR = np.exp((like_IxR - like_IxR.max(1, keepdims=True)) / np.float32(temperature))
      rate_N[part] = w_IxR @ known_R / w_IxR.sum(1)
    return dict(rate=rate_N), None

  state = dict(rate=np.full(dataset.size, 0.5, np.float32))
  return PriorPool(state, prior, learn, reference=lambda step: step % every == 0)


_BLOCK = 1 << 15


def _even(dataset: DatasetInfo) -> Callable[[State, Index], np.ndarray]:
  return lambda state, index: np.ones((2, len(dataset.kind_N[index])), np.float32)


def _nothing(state: State, seen: StepEvidence) -> tuple[State, None]:
  del seen
  return state, None


def _beta(rate_I: np.ndarray, strength: float) -> np.ndarray:
  right_I = np.float32(strength) * rate_I
  return np.stack([right_I, np.float32(strength) - right_I])


def _wrong(seen: StepEvidence) -> np.ndarray:
  return seen.count_V - seen.right_V


def _features(dataset: DatasetInfo, name: str) -> np.ndarray:
  """float32 [N, F] of unit length; rows of zeros stay zeros and are like all others alike."""
  if name == 'kind':
    return np.eye(int(dataset.kind_N.max(initial=0)) + 1, dtype=np.float32)[dataset.kind_N]
  raw_NxF = column(dataset, 'share.feature', name, -np.inf, np.inf).reshape(dataset.size, -1)
  return raw_NxF / np.maximum(np.linalg.norm(raw_NxF, axis=1, keepdims=True), 1e-12)

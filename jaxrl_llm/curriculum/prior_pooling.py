"""Priors of success rates, pooled between prompts: dataset → PriorPool.

A prior is Beta pseudo-counts (right, wrong), to which the evidence of the prompt itself is added.
Every public function may be named in `config.curriculum.prior_pooling.fn`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jaxrl_llm.curriculum import hidden_state_prior, pooled_sums, setting_checks, success_head
from jaxrl_llm.curriculum.prompt_features import PromptFeatures
from jaxrl_llm.curriculum.records import DatasetInfo, Index, PriorPool, State, StepEvidence, column


def none() -> None:
  """Beta(1, 1) for every prompt. arXiv:2507.04632 (MoPPS)."""


def kind(dataset: DatasetInfo, *, strength: float = 2.0, floor: float = 1.0) -> PriorPool:
  """Beta(s·m, s·(1 − m)), m = (right + floor) / (right + wrong + 2·floor) of the prompt's kind: empirical Bayes.

  The expected success rate of an unvisited prompt is the current one of its kind. The counts of a kind decay by
  config.curriculum.kind_decay per visit. `strength` is the similarity of prompts of a kind in pseudo-counts: a small
  value keeps variance between them, so that the probability of a mixed group is that of a Beta-binomial.
  """
  setting_checks.check_range('prior_pooling.strength', strength, 0, open_low=True)
  setting_checks.check_range('prior_pooling.floor', floor, 0, open_low=True)
  kinds = dataset.kinds

  def prior(state: State, index: Index) -> np.ndarray:
    right_K, wrong_K = state['pooled'] + floor
    rate_K = (right_K / (right_K + wrong_K)).astype(np.float32)
    return _beta(rate_K[dataset.kind_N[index]], strength)

  def learn(state: State, evidence: StepEvidence) -> tuple[State, None]:
    counts_2xV = np.stack([evidence.right_V, _wrong(evidence)])
    kind_V = dataset.kind_N[evidence.index_V]
    pooled = pooled_sums.decayed_sums(state['pooled'], kind_V, counts_2xV, dataset.kind_decay)
    return dict(pooled=pooled), None

  return PriorPool(dict(pooled=np.zeros((2, kinds))), prior, learn)


def fitted_kind(
  dataset: DatasetInfo, *, strength: float = 2.0, visits: float = 20.0, memory: float = 500.0
) -> PriorPool:
  """Beta(s·m, s·(1 − m)) as `kind`, with s fitted to the spread in each kind: 1/(1 + s) = Var(p)/(m(1 − m)).

  Method of moments for a Beta-binomial: E[p] from the scores x of a group, E[p²] from its pairs,
  Σ_{i≠j} x_i·x_j / (n(n − 1)), which is exact for graded scores, too. Var(p)/(m(1 − m)) of a kind is shrunk toward
  that of all kinds, and this toward 1/(1 + `strength`), each by `visits` visits. Moments are averages over about the
  last `memory` visits of a kind; m decays by config.curriculum.kind_decay and begins at that of all kinds.

  Only first visits count, because their prompts were chosen without evidence of their own; later ones are chosen for
  their posterior. After 32 visits of a kind without a first one, m follows all visits, and s stays.
  """
  setting_checks.check_range('prior_pooling.strength', strength, 0, open_low=True)
  setting_checks.check_range('prior_pooling.visits', visits, 0, open_low=True)
  setting_checks.check_range('prior_pooling.memory', memory, 1)
  kinds = dataset.kinds

  def prior(state: State, index: Index) -> np.ndarray:
    rate_K = pooled_sums.kind_rates(state['pooled'])
    strength_K = _fitted_strength(state['moments'], strength, visits)
    prior_2xK = np.stack([strength_K * rate_K, strength_K * (1 - rate_K)]).astype(np.float32)
    kind_I = dataset.kind_N[index]
    prior_2xI = np.empty((2, len(kind_I)), np.float32)
    for prior_K, prior_I in zip(prior_2xK, prior_2xI, strict=True):
      np.take(prior_K, kind_I, out=prior_I, mode='clip')  # by far faster than both rows at once
    return prior_2xI

  def learn(state: State, evidence: StepEvidence) -> tuple[State, None]:
    kind_V, n_V, k_V = dataset.kind_N[evidence.index_V], evidence.count_V, evidence.right_V
    at = evidence.first_V | (state['revisits'][kind_V] >= pooled_sums.MAX_REVISITS)
    pooled = pooled_sums.decayed_sums(
      state['pooled'], kind_V[at], np.stack([k_V, n_V - k_V])[:, at], dataset.kind_decay
    )
    first_K = np.bincount(kind_V[evidence.first_V], minlength=kinds)
    revisits_K = state['revisits'] + np.bincount(kind_V, minlength=kinds)
    at = evidence.first_V & (n_V > 1)
    rate_V, pairs_V = pooled_sums.moments(evidence, at)
    moments_3xV = np.stack([np.ones(len(rate_V)), rate_V, pairs_V])
    moments = pooled_sums.decayed_sums(state['moments'], kind_V[at], moments_3xV, 1 - 1 / memory)
    revisits_K[first_K > 0] = 0
    return dict(pooled=pooled, moments=moments, revisits=revisits_K), None

  state = dict(pooled=np.zeros((2, kinds)), revisits=np.zeros(kinds, np.int64))
  state |= dict(moments=np.zeros((3, kinds)))  # Σ 1, Σ k/n, Σ of pairs, over visits
  return PriorPool(state, prior, learn)


def anchors(
  dataset: DatasetInfo,
  *,
  weak: str = 'pass_rate_weak',
  strong: str = 'pass_rate_strong',
  rho: float = 0.1,
  momentum: float = 0.9,
  adaptive: bool = False,
) -> PriorPool:
  """Beta(1, 1), and evidence p̃ = clip(F₀ + c(F₁ − F₀), 0, 1) for every prompt without a visit in a step.

  F₀, F₁: pass rates of a weak and a strong model, the fields `weak` and `strong` of the data; 0 and 1 for all where a
  name is empty. The position c of the policy between them: c ← 0.9c + 0.1(mean r − mean F₀)/(mean F₁ − mean F₀ + 1e-6)
  over the visited prompts; the first step sets it. Visited prompts gain their k and n − k, all others ρG·p̃ and
  ρG·(1 − p̃): with evidence_decay.step that is α ← (1 − λ)α + λ + (1 − ρ)s + ρG·p̃. `adaptive` halves ρ from a step on
  in which the mean error of p̃ over the visited prompts is at least 0.25.
  Raises UserError where a row lacks a rate. arXiv:2510.26374 (BOTS).
  """
  setting_checks.check_range('prior_pooling.rho', rho, 0, 1)
  setting_checks.check_range('prior_pooling.momentum', momentum, 0, 1)
  setting_checks.check_choice('prior_pooling.adaptive', adaptive, (True, False))
  weak_N = (
    column(dataset, 'prior_pooling.weak', weak, 0, 1)
    if weak
    else np.zeros(dataset.size, np.float32)
  )
  strong_N = (
    column(dataset, 'prior_pooling.strong', strong, 0, 1) if strong else np.ones_like(weak_N)
  )
  gap_N = strong_N - weak_N

  def learn(state: State, evidence: StepEvidence) -> tuple[State, np.ndarray]:
    at, rate_V = evidence.index_V, evidence.right_V / evidence.count_V
    ability, rho_now = state['capability'], state['rho']
    if len(at):
      place = (rate_V.mean() - weak_N[at].mean()) / (gap_N[at].mean() + 1e-6)
      old = place if np.isnan(ability) else ability
      ability = np.asarray(momentum * old + (1 - momentum) * place)
    if np.isnan(ability):  # no evidence yet
      return state, np.zeros((2, dataset.size), np.float32)
    p_N = np.clip(weak_N + np.float32(ability) * gap_N, 0, 1)
    missed = bool(len(at)) and np.abs(p_N[at] - rate_V).mean() >= 0.25
    rho_now = rho_now / 2 if adaptive and missed else rho_now
    gained = np.float32(rho_now * dataset.group) * np.stack([p_N, 1 - p_N])
    gained[:, at] = evidence.right_V, _wrong(evidence)
    return dict(capability=ability, rho=np.asarray(rho_now)), gained

  return PriorPool(
    dict(capability=np.array(np.nan), rho=np.array(float(rho))), _even(dataset), learn
  )


def kernel(
  dataset: DatasetInfo,
  *,
  feature: str = 'traits',
  every: int = 2,
  temperature: float = 0.1,
  strength: float = 8.0,
) -> PriorPool:
  """Beta(s·d, s·(1 − d)), d_i = Σ_r w_ir·(k_r + ½)/(n_r + 1), w = softmax_r(z_i·z_r / temperature).

  Every `every` steps all prompts of the step are drawn uniformly: the reference set, r. Its rates determine d of all
  prompts until the next one. z are features of unit length: the field `feature` of the data (an embedding), 'traits' of
  the rows (one-hot), or 'kind'. The official method learns a map of the embeddings and a calibration of d offline;
  neither is implemented, and the kernel is fixed. References are extra rollouts there and those of the step here.
  Raises UserError where a row lacks the feature. arXiv:2506.05316 (DOTS; every 2).
  """
  setting_checks.check_integer('prior_pooling.every', every, 1)
  setting_checks.check_range('prior_pooling.temperature', temperature, 0, open_low=True)
  setting_checks.check_range('prior_pooling.strength', strength, 0, open_low=True)
  unit_NxF = _features(dataset, feature)

  def prior(state: State, index: Index) -> np.ndarray:
    return _beta(state['rate'][index], strength)

  def learn(state: State, evidence: StepEvidence) -> tuple[State, None]:
    if evidence.step % every or not len(evidence.index_V):
      return state, None
    rate_R = ((evidence.right_V + 0.5) / (evidence.count_V + 1)).astype(np.float32)
    rate_N = np.empty(dataset.size, np.float32)
    for at in range(0, dataset.size, _BLOCK):  # [N, R] at once would take gigabytes
      part = slice(at, at + _BLOCK)
      like_IxR = unit_NxF[part] @ unit_NxF[evidence.index_V].T
      w_IxR = np.exp((like_IxR - like_IxR.max(1, keepdims=True)) / np.float32(temperature))
      rate_N[part] = w_IxR @ rate_R / w_IxR.sum(1)
    return dict(rate=rate_N), None

  state = dict(rate=np.full(dataset.size, 0.5, np.float32))
  return PriorPool(state, prior, learn, reference=lambda step: step % every == 0)


def regression(
  dataset: DatasetInfo,
  *,
  feature: str = 'traits',
  dimensions: int = 16,
  ridge: float = 1.0,
  strength: float = 2.0,
  visits: float = 20.0,
  memory: float = 2000.0,
) -> PriorPool:
  """Beta(s·m, s·(1 − m)), m = ½ + θ·z: ridge regression of first visits' success rates on features z of the prompts.

  z are those of `kernel` and a constant, in float16; more than `dimensions` are projected by a fixed random matrix. The
  reliability is measured: 1/(1 + s) = Σ (p − m)² / Σ m(1 − m) over first visits with the m from before them, where the
  pairs of a group's scores replace p². It is shrunk toward 1/(1 + `strength`) by `visits` visits. Sums decay by
  1 − 1/`memory` per visit. Which visits count is as in `fitted_kind`. A step computes m of 65,536 prompts, those of
  larger data sets in turn, since conversion from float16 is slow.
  """
  setting_checks.check_integer('prior_pooling.dimensions', dimensions, 1)
  for name, value in dict(ridge=ridge, strength=strength, visits=visits).items():
    setting_checks.check_range(f'prior_pooling.{name}', value, 0, open_low=True)
  setting_checks.check_range('prior_pooling.memory', memory, 1)
  z_NxF = _low_dimensional(_features(dataset, feature), dimensions)

  def rate(gram_FxF: np.ndarray, moment_F: np.ndarray, index: Index) -> np.ndarray:
    theta_F = np.linalg.solve(gram_FxF + ridge * np.eye(len(moment_F)), moment_F)
    rate_I = z_NxF[index].astype(np.float32) @ theta_F.astype(np.float32)
    return np.clip(rate_I + np.float32(0.5), 0.02, 0.98)

  def prior(state: State, index: Index) -> np.ndarray:
    residual, binary, count = state['residual']
    pseudo = visits * (binary / count if count else 0.25)
    share = (residual + pseudo / (1 + strength)) / (binary + pseudo)
    return _beta(state['rate'][index], pooled_sums.strength(share))

  def learn(state: State, evidence: StepEvidence) -> tuple[State, None]:
    first = evidence.first_V
    at = first | (state['revisits'] >= pooled_sums.MAX_REVISITS)
    rate_V = (evidence.right_V / evidence.count_V)[at]
    z_VxF = z_NxF[evidence.index_V[at]].astype(float)
    keep = (1 - 1 / memory) ** len(rate_V)
    gram = keep * state['gram'] + z_VxF.T @ z_VxF
    moment = keep * state['moment'] + z_VxF.T @ (rate_V - 0.5)
    at = first & (evidence.count_V > 1)
    rate_V, pairs_V = pooled_sums.moments(evidence, at)
    m_V = rate(state['gram'], state['moment'], evidence.index_V[at]).astype(float)
    residual_V = pairs_V - 2 * m_V * rate_V + m_V**2
    added = [residual_V.sum(), (m_V * (1 - m_V)).sum(), len(m_V)]
    residual = (1 - 1 / memory) ** len(m_V) * state['residual'] + added
    revisits = 0 * state['revisits'] if first.any() else state['revisits'] + len(first)
    part, rate_N = pooled_sums.refreshed(evidence.step, dataset.size), state['rate'].copy()
    rate_N[part] = rate(gram, moment, part)
    learned = dict(gram=gram, moment=moment, residual=residual, revisits=revisits)
    return learned | dict(rate=rate_N), None

  size = z_NxF.shape[1]
  # Σ (p − m)², Σ m(1 − m) and Σ 1 over first visits.
  state = dict(gram=np.zeros((size, size)), moment=np.zeros(size), residual=np.zeros(3))
  state |= dict(revisits=np.zeros(1, np.int64), rate=np.full(dataset.size, 0.5, np.float32))
  return PriorPool(state, prior, learn)


def hidden_state(
  dataset: DatasetInfo,
  *,
  dimensions: int = 16,
  multiple: int = 8,
  ridge: float = 1.0,
  strength: float = 2.0,
  visits: float = 20.0,
  memory: float = 2000.0,
  answer_tokens: int = 0,
  considered: int = 1,
) -> PriorPool:
  """Beta(s·m, s·(1 − m)), logit m = logit m₀ + θ·z: m₀ of the kind, z from the policy's hidden state.

  z are `dimensions` features of the hidden state at the last token of the prompt (`prompt_features`), of the prompts
  of each step and `multiple` times as many others: of `considered` times as many, which are taken in turn, those that
  `selection` prefers by what is known of them before. θ is a logistic regression on first visits, discounted by
  1 − 1/`memory` a visit, and so is m₀, per visit of its kind. The mean of the latest visits, as `fitted_kind` has it,
  varies with the prompts that they were of, and its error would be that of all predictions.

  With `answer_tokens`, o − logit m₀ and logit m₀ are two more features: o = log(π(y | x) / (1 − π(y | x))), the odds of
  the row's known answer as the whole completion y, in the words of recent right completions (`answer_wording`), cut at
  so many tokens. The prior of θ has logit m = o; other weights are 0 in the mean. `dimensions` may be 0 then, and no
  prompt is encoded while these words are unknown. Ours; π(y | x) as a measure of
  success without a sample, as a reward there: arXiv:2506.18254 (RLPR), arXiv:2505.21493 (VeriFree).

  Reliability is measured on predictions from before the visit: m moves from m₀ by the measured gain, and 1/(1 + s) is
  that of the kind times the share of the spread that z leaves unexplained; both are shrunk toward no use of z, by
  `visits` visits. Prompts without features have the prior of `fitted_kind`. Which visits count is as there.

  A linear head on this state: arXiv:2602.09924 (probes of success before generation), offline there. Difficulty
  predicted online across prompts: arXiv:2602.01970 (GPS), by a small generative model there. Both reconstructed from
  the abstract.
  """
  setting_checks.check_integer('prior_pooling.dimensions', dimensions, 0 if answer_tokens else 1)
  setting_checks.check_integer('prior_pooling.multiple', multiple, 0)
  setting_checks.check_integer('prior_pooling.answer_tokens', answer_tokens, 0)
  setting_checks.check_integer('prior_pooling.considered', considered, 1)
  setting_checks.check_range('prior_pooling.ridge', ridge, 0, open_low=True)
  kinds = fitted_kind(dataset, strength=strength, visits=visits)
  setting_checks.check_range('prior_pooling.memory', memory, 1)
  mean_F = np.array([0.0] * dimensions + ([1.0, 0.0, 0.0] if answer_tokens else [0.0]))
  settings = success_head.Settings(ridge, visits, memory, 1 / (1 + strength), mean_F)
  encoded = multiple, dataset.seed, answer_tokens, considered
  features = PromptFeatures(dataset.size, dimensions, *encoded)
  stage = hidden_state_prior.HiddenStatePrior(dataset, kinds, features, settings)
  return PriorPool(stage.initial(), stage.prior, stage.learn, features=features)


_BLOCK = 1 << 15


def _even(dataset: DatasetInfo) -> Callable[[State, Index], np.ndarray]:
  return lambda state, index: np.ones((2, len(dataset.kind_N[index])), np.float32)


def _beta(rate_I: np.ndarray, strength: float) -> np.ndarray:
  right_I = np.float32(strength) * rate_I
  return np.stack([right_I, np.float32(strength) - right_I])


def _wrong(evidence: StepEvidence) -> np.ndarray:
  return evidence.count_V - evidence.right_V


def _fitted_strength(moments_3xK: np.ndarray, strength: float, visits: float) -> np.ndarray:
  """s of each kind: (1 − ρ)/ρ, ρ = Var(p)/(m(1 − m)) after shrinkage, s in [0.1, 100]."""
  count_K, rate_K, square_K = moments_3xK
  mean_K = rate_K / np.maximum(count_K, 1)
  binary_K = count_K * mean_K * (1 - mean_K)
  between_K = square_K - count_K * mean_K**2
  share = 1 / (1 + strength)
  scale = binary_K.sum() / max(count_K.sum(), 1)  # m(1 − m) of a visit, on average
  pseudo = max(visits * scale, 1e-9)
  share = (between_K.sum() + pseudo * share) / (binary_K.sum() + pseudo)
  share_K = (between_K + pseudo * share) / (binary_K + pseudo)
  return pooled_sums.strength(share_K)


def _low_dimensional(unit_NxF: np.ndarray, dimensions: int) -> np.ndarray:
  """float16 [N, at most dimensions + 1]: the features, projected where there are more, and a constant."""
  size = unit_NxF.shape[1]
  if size > dimensions:
    matrix = np.random.default_rng(0).normal(size=(size, dimensions)) / dimensions**0.5
    unit_NxF = unit_NxF @ matrix.astype(np.float32)
  constant = np.ones((len(unit_NxF), 1), np.float16)
  return np.concatenate([unit_NxF.astype(np.float16), constant], axis=1)


def _features(dataset: DatasetInfo, name: str) -> np.ndarray:
  """float32 [N, F] of unit length; rows of zeros stay zeros and are equally similar to all others."""
  if name == 'kind':
    return np.eye(dataset.kinds, dtype=np.float32)[dataset.kind_N]
  raw_NxF = column(dataset, 'prior_pooling.feature', name, -np.inf, np.inf).reshape(
    dataset.size, -1
  )
  return raw_NxF / np.maximum(np.linalg.norm(raw_NxF, axis=1, keepdims=True), 1e-12)

"""The prior of `prior_pooling.hidden_state`: the rate of the kind, moved by a head on features of the prompt."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxrl_llm.curriculum import pooled_sums, success_head
from jaxrl_llm.curriculum.prompt_features import PromptFeatures
from jaxrl_llm.curriculum.records import DatasetInfo, Index, PriorPool, State, StepEvidence

_ODDS = -2  # the column of odds in `PromptFeatures.design`


class HiddenStatePrior(NamedTuple):
  """Functions of the stage's state, which holds that of `kinds`, too."""

  dataset: DatasetInfo
  kinds: PriorPool  # of prompts without features, and of the spread within a kind
  features: PromptFeatures
  settings: success_head.Settings

  def initial(self) -> State:
    """The state without evidence."""
    design = self._design(slice(0, 0), np.zeros(0)).shape[1]
    return (
      self.kinds.state
      | success_head.initial(design)
      | dict(
        rate=np.full(self.dataset.size, 0.5, np.float32),  # predictions, computed in turn
        slow=np.zeros((2, self.dataset.kinds)),  # right and wrong, of which m₀ is
        encoded=np.zeros(()),  # the share of prompts with features
      )
      | self._with_odds()
    )

  def prior(self, state: State, index: Index) -> np.ndarray:
    """float32 [2, I], α and β."""
    prior_2xI, known_I = self.kinds.prior(state, index), self.features.state['known'][index]
    if not known_I.any():
      return prior_2xI
    share_I = 1 / (1 + prior_2xI[0] + prior_2xI[1])
    share_I *= np.float32(state['head_unexplained'])
    strength_I = pooled_sums.strength(share_I)
    right_I = strength_I * state['rate'][index]
    np.copyto(prior_2xI[0], right_I, where=known_I)
    np.copyto(prior_2xI[1], strength_I - right_I, where=known_I)
    return prior_2xI

  def learn(self, state: State, evidence: StepEvidence) -> tuple[State, None]:
    """The state after the evidence of a step, with new predictions of a part of the prompts."""
    index_V, kind_V = evidence.index_V, self.dataset.kind_N[evidence.index_V]
    at = evidence.first_V | (state['revisits'][kind_V] >= pooled_sums.MAX_REVISITS)
    counts_2xV = np.stack([evidence.right_V, evidence.count_V - evidence.right_V])[:, at]
    keep = 1 - 1 / self.settings.memory
    slow = pooled_sums.decayed_sums(state['slow'], kind_V[at], counts_2xV, keep)
    at &= self.features.state['known'][index_V]
    visited = self._visits(state, StepEvidence(evidence.step, *(x[at] for x in evidence[1:])))
    learned = state | self.kinds.learn(state, evidence)[0] | dict(slow=slow)
    learned |= success_head.learn(state, visited, self.settings)
    theta_F = success_head.weights(learned, self.settings)
    rate_N, gain = state['rate'].copy(), float(learned['head_gain'])
    for part in (pooled_sums.refreshed(evidence.step, self.dataset.size), self.features.latest):
      expected_I = self._expected(learned, part)
      design_IxF = self._design(part, expected_I)
      rate_N[part] = success_head.predict(theta_F, gain, design_IxF, expected_I)
    encoded = np.asarray(np.count_nonzero(self.features.state['known']) / self.dataset.size)
    return learned | dict(rate=rate_N, encoded=encoded) | self._with_odds(), None

  def _with_odds(self) -> State:
    """The share of the last encoded prompts whose answer has odds, where these are read."""
    if not self.features.answer_tokens:
      return {}
    return dict(with_odds=np.asarray(self.features.with_odds()))

  def _visits(self, state: State, evidence: StepEvidence) -> success_head.Visits:
    index_V, k_V, n_V = evidence.index_V, evidence.right_V, evidence.count_V
    square_V = pooled_sums.pairs(k_V, evidence.graded_V, np.maximum(n_V, 2))
    expected_V = self._expected(state, index_V).astype(float)
    seen = expected_V, k_V, n_V, square_V, evidence.first_V
    return success_head.Visits(self._design(index_V, expected_V), *seen)

  def _design(self, index: Index, expected_I: np.ndarray) -> np.ndarray:
    """float32 [I, F]: features, a constant, and where odds o are read, o − logit m₀ (0 where they are unknown).

    The odds know what the kind tells: logit m₀ is a feature, too, that the head may take it back.
    """
    design_IxF = self.features.design(index)
    if not self.features.answer_tokens:
      return design_IxF
    logit_I = success_head.logit(expected_I).astype(np.float32)
    design_IxF[:, _ODDS] = np.nan_to_num(design_IxF[:, _ODDS] - logit_I)
    return np.column_stack([design_IxF, logit_I])

  def _expected(self, state: State, index: Index) -> np.ndarray:
    """m₀, the mean success rate of the kind of each prompt."""
    return pooled_sums.kind_rates(state['slow'])[self.dataset.kind_N[index]]

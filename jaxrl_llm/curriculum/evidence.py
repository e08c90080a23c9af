"""Evidence of a prompt's difficulty in a landed batch: one row for each prompt, whatever slots it filled."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxrl_llm.rewards import outcomes
from jaxrl_llm.types import TRUNCATED, Batch


class Evidence(NamedTuple):
  """Of each prompt with rollouts, in order of prompt numbers; as `Curriculum.observe` takes them."""

  index_V: np.ndarray  # int32, distinct
  mass_V: np.ndarray  # float64 in [0, n]: successes, k of n for binary scores
  count_V: np.ndarray  # int32, n, at least 1
  truncated_V: np.ndarray  # int32, rollouts cut off before they were right
  tokens_V: np.ndarray  # int32, of all n
  mixed_V: np.ndarray  # bool: scores differ
  truncated_mass_V: np.ndarray  # float64, what of `mass_V` is theirs


def gather_evidence(batch: Batch, score_BxK: np.ndarray, chosen_P: np.ndarray) -> Evidence:
  """The evidence of the slots `chosen_P`; `score_BxK` decides which groups are mixed.

  Where rows were kept by chance, successes count 1 / their probability, scaled to the group: who was kept
  must not look like how hard a prompt is.
  """
  P = len(chosen_P)
  by_slot = lambda x: np.asarray(x).reshape(P, -1)[chosen_P]  # noqa: E731
  length_PxG = by_slot(batch.rollout.length_B)
  exists_PxG = length_PxG > 0
  cut_PxG = exists_PxG & by_slot((batch.rollout.reason_B == TRUNCATED) & (batch.correct_B < 1))
  weight_PxG = by_slot(batch.rollout.weight_B).astype(float) * exists_PxG
  # Weights that are all 1 leave a whole number of successes whole.
  scale_P = exists_PxG.sum(1) / np.maximum(weight_PxG.sum(1), 1e-9)
  mass_PxG = weight_PxG * by_slot(batch.success) * scale_P[:, None]
  index_V, slot_P = np.unique(np.asarray(batch.prompts.index_P)[chosen_P], return_inverse=True)
  sums = lambda x_PxG: np.bincount(slot_P, x_PxG.sum(1), len(index_V))  # noqa: E731
  whole = (sums(x).astype(np.int32) for x in (exists_PxG, cut_PxG, length_PxG))
  count_V, truncated_V, tokens_V = whole
  mass_V = np.minimum(sums(mass_PxG), count_V)
  truncated_mass_V = np.minimum(sums(mass_PxG * cut_PxG), mass_V)
  G = length_PxG.shape[1]
  rows = np.repeat(chosen_P, G), exists_PxG.ravel(), np.repeat(slot_P, G)
  mixed_V = outcomes.mixed(np.asarray(score_BxK)[rows[0]], *rows[1:], len(index_V))
  found = index_V, mass_V, count_V, truncated_V, tokens_V, mixed_V, truncated_mass_V
  return Evidence(*(x[count_V > 0] for x in found))

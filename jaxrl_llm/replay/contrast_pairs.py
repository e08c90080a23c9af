"""Pairs of rollouts with opposite advantages, and a batch resampled from them. arXiv:2508.05612 (Shuffle-R1)."""

from __future__ import annotations

import numpy as np

from jaxrl_llm.replay import group_batches
from jaxrl_llm.types import Batch, JsonObject, Settings

_EPS = 1e-6  # of the official code, beside the standard deviation


class ContrastPairs:
  """Learns pairs of the step's own rollouts as often as they are drawn: 0 to `draws` times."""

  rows = 0  # that join the groups of fresh rows

  def __init__(self, share: float, draws: int):
    """`share` of a group's pairs are kept; the batch consists of `draws` sub-batches."""
    self.share, self.draws = share, draws

  def slots(self, prompts: int) -> int:
    """No slot beside those of the sampled prompts."""
    del prompts
    return 0

  def join(self, batch: Batch, seed: int, step: int) -> Batch:
    """Weighs each row by its copies in the resampled batch, drawn by (seed, step)."""
    return resampled(batch, self.share, self.draws, np.random.default_rng((seed, 8, step)))

  def keep(self, batch: Batch, mixed_P: np.ndarray, step: int) -> None:
    """Stores nothing: no rollout is learned after its step."""

  def metrics(self, batch: Batch, fresh: int) -> dict[str, float]:
    """Metrics of a weighted batch: rows that are learned, and the number of equal weights with the same variance."""
    del fresh
    weight_B = np.asarray(batch.rollout.weight_B, float) * (batch.rollout.length_B > 0)
    effective = weight_B.sum() ** 2 / max((weight_B**2).sum(), 1e-9)
    return {'replay/rows': int((weight_B > 0).sum()), 'replay/effective_rows': float(effective)}

  def state_dict(self) -> JsonObject:
    """No state."""
    return {}

  def load_state_dict(self, state: Settings) -> None:
    """No state."""


def resampled(
  batch: Batch, share: float, draws: int, random: np.random.Generator | np.random.RandomState
) -> Batch:
  """The batch whose rows count as often as they are drawn. Advantages stay those of whole groups."""
  length_B, P = np.asarray(batch.rollout.length_B), len(batch.prompts.index_P)
  length_PxG, reward_PxG = length_B.reshape(P, -1), np.asarray(batch.reward_B).reshape(P, -1)
  advantage_PxG = _advantage(reward_PxG, length_PxG)
  pair_Nx2 = pairs(advantage_PxG, length_PxG > 0, share)
  contrast_N = np.abs(advantage_PxG.ravel()[pair_Nx2]).sum(1)
  copies_B = np.zeros(len(length_B))
  copies_B[pair_Nx2] = draw(contrast_N, draws, random)[:, None]
  return group_batches.in_copies(batch, copies_B)


def pairs(advantage_PxG: np.ndarray, exists_PxG: np.ndarray, share: float) -> np.ndarray:
  """Rows of the batch (best, worst) [N, 2]: the i-th best of a group with its i-th worst.

  The first `share` of pairs, at least one. Equal advantages are in the order of their rows. Of an odd number of rows
  the one in the middle has no partner.
  """
  found, G = [], advantage_PxG.shape[1]
  for p, (advantage_G, exists_G) in enumerate(zip(advantage_PxG, exists_PxG, strict=True)):
    row_n = np.flatnonzero(exists_G)
    row_n = p * G + row_n[np.argsort(-advantage_G[row_n], kind='stable')]
    kept = max(int(len(row_n) // 2 * share), min(len(row_n) // 2, 1))
    found.append(np.stack([row_n[:kept], row_n[::-1][:kept]], axis=1))
  return np.concatenate(found)


def draw(
  contrast_N: np.ndarray, draws: int, random: np.random.Generator | np.random.RandomState
) -> np.ndarray:
  """Copies of each pair in `draws` sub-batches of N / draws pairs: int [N].

  Each sub-batch is drawn without replacement, with p ∝ |A⁺| + |A⁻|; pairs without contrast are never drawn.
  """
  copies_N, N = np.zeros(len(contrast_N), int), len(contrast_N)
  size = min(max(N // draws, 1), int((contrast_N > 0).sum()))
  for _ in range(draws if size else 0):
    chosen = random.choice(N, size, replace=False, p=contrast_N / contrast_N.sum())
    copies_N[chosen] += 1
  return copies_N


def _advantage(reward_PxG: np.ndarray, length_PxG: np.ndarray) -> np.ndarray:
  """(R − mean_g) / (std_g + eps), std unbiased; 0 for empty rows and where all rewards are equal."""
  exists_PxG, reward_PxG = length_PxG > 0, reward_PxG.astype(float)
  n_Px1 = np.maximum(exists_PxG.sum(1, keepdims=True), 1)
  mean_Px1 = (reward_PxG * exists_PxG).sum(1, keepdims=True) / n_Px1
  off_PxG = (reward_PxG - mean_Px1) * exists_PxG
  off_PxG[np.abs(off_PxG) < _EPS] = 0  # rounding of equal rewards is no contrast
  std_Px1 = np.sqrt((off_PxG**2).sum(1, keepdims=True) / np.maximum(n_Px1 - 1, 1))
  return off_PxG / (std_Px1 + _EPS)

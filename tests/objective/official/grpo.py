"""GRPO with the plain clip, by verl: dual clip out of reach."""

from __future__ import annotations

from jaxrl_llm.objective import advantage, aggregation, clip_masks
from tests.objective.official import lib, verl_core

OFFICIAL = lib.Official(*verl_core.PINNED)
SETTINGS = dict(trust_region=dict(fn='clip', low=0.2, high=0.2), aggregation='sequence_mean')
MUTANTS = {
  'biased deviation': (
    advantage,
    'jnp.maximum(n_Px1 - 1, 1))\n  return centered / (std',
    'jnp.maximum(n_Px1, 1))\n  return centered / (std',
  ),
  'no sign': (clip_masks, 'up = (advantage > 0) & (ratio > high)', 'up = ratio > high'),
  'rows': (
    aggregation,
    'return mask_BxT / jnp.maximum(length_Bx1, 1) / _rows',
    'return mask_BxT / (length_Bx1 + 1) / _rows',
  ),
}


def official(torch, read, data):
  return verl_core.policy(
    torch, read, data, 'vanilla', 'grpo', 'seq-mean-token-mean', clip_ratio_c=1e9
  )


lib.main(__name__)

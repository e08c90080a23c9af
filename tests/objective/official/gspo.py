"""GSPO, by verl, with bounds a hundred times as wide as usual: these few rows do not come near those of 3e-4."""

from __future__ import annotations

import numpy as np

from jaxrl_llm.objective import clip_masks, ratio
from tests.objective.official import lib, verl_core

OFFICIAL = lib.Official(*verl_core.PINNED)
SETTINGS = dict(
  ratio='sequence', trust_region=dict(fn='clip', low=0.03, high=0.04), aggregation='sequence_mean'
)
SEEDS = (0, 1)
MUTANTS = {
  'product': (ratio, 'row_mean(token(tokens)', 'row_sum(token(tokens)'),
  'up': (clip_masks, 'up = (advantage > 0)', 'up = (advantage < 0)'),
}


def draw(seed):
  """As everywhere; rows of the second draw are near the bounds."""
  data = lib.draw(seed)
  if seed:
    data['old'] = np.round(data['logp'] - 0.15 * (data['logp'] - data['old']), 4)
  return data


def official(torch, read, data):
  return verl_core.policy(
    torch,
    read,
    data,
    'gspo',
    'grpo',
    'seq-mean-token-mean',
    clip_ratio_low=0.03,
    clip_ratio_high=0.04,
  )


lib.main(__name__)

"""Dual-clip PPO, by verl."""

from __future__ import annotations

from jaxrl_llm.objective import clip_masks
from tests.objective.official import lib, verl_core

OFFICIAL = lib.Official(*verl_core.PINNED)
SETTINGS = dict(
  trust_region=dict(fn='dual_clip', low=0.2, high=0.2, most=3.0), aggregation='token_mean'
)
MUTANTS = {
  'gains': (clip_masks, 'far = (advantage < 0)', 'far = (advantage > 0)'),
  'never': (clip_masks, '(ratio > most)\n', '(ratio > 9 * most)\n'),
}


def official(torch, read, data):
  return verl_core.policy(torch, read, data, 'vanilla', 'grpo', 'token-mean')


lib.main(__name__)

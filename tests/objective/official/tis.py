"""Truncated importance sampling, by slime: its weight on its clipped loss, the mean over rows."""

from __future__ import annotations

import types

from jaxrl_llm.objective import importance_correction
from tests.objective.official import lib, slime_core

OFFICIAL = slime_core.OFFICIAL
SETTINGS = dict(
  importance_correction=dict(fn='token_truncate', low=0.9, high=1.1),
  trust_region=dict(fn='clip', low=0.2, high=0.2),
)
MUTANTS = {
  'upside down': (
    importance_correction,
    'tokens.old_BxT - tokens.behavior_BxT',
    'tokens.behavior_BxT - tokens.old_BxT',
  ),
}


def official(torch, read, data):
  with slime_core.in_float64(torch):
    x = lib.tensors(torch, data)
    utils = lib.functions(read(slime_core.UTILS), ('compute_policy_loss',), torch=torch)
    loss = lib.functions(read(slime_core.LOSS), ('vanilla_tis_function',), torch=torch)
    weighed, _, _ = loss.vanilla_tis_function(
      types.SimpleNamespace(tis_clip_low=0.9, tis_clip=1.1),
      pg_loss=slime_core.clipped(torch, utils, x),
      train_log_probs=slime_core.rows(x, 'old'),
      rollout_log_probs=slime_core.rows(x, 'behavior'),
      loss_masks=slime_core.masks(torch, x),
    )
    return lib.outputs(x, slime_core.row_mean(torch, x, weighed))


lib.main(__name__)

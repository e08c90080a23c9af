"""IcePop, by slime: its weight on its clipped loss, the mean over tokens."""

from __future__ import annotations

import types

from jaxrl_llm.objective import importance_correction
from tests.objective.official import lib, slime_core

OFFICIAL = slime_core.OFFICIAL
SETTINGS = dict(
  importance_correction=dict(fn='token_mask', low=0.8, high=1.25),
  trust_region=dict(fn='clip', low=0.2, high=0.2),
  aggregation='token_mean',
)
MUTANTS = {
  'truncated': (
    importance_correction,
    'rho = exp(_log_rho(tokens))\n  return rho, _within(rho, low, high)',
    'rho = exp(_log_rho(tokens))\n  return jnp.clip(rho, low, high), _within(rho, 0.0, 99.0)',
  ),
}


def official(torch, read, data):
  with slime_core.in_float64(torch):
    x = lib.tensors(torch, data)
    utils = lib.functions(read(slime_core.UTILS), ('compute_policy_loss',), torch=torch)
    loss = lib.functions(read(slime_core.LOSS), ('icepop_function',), torch=torch)
    weighed, _, _ = loss.icepop_function(
      types.SimpleNamespace(tis_clip_low=0.8, tis_clip=1.25),
      pg_loss=slime_core.clipped(torch, utils, x),
      train_log_probs=slime_core.rows(x, 'old'),
      rollout_log_probs=slime_core.rows(x, 'behavior'),
      loss_masks=slime_core.masks(torch, x),
    )
    return lib.outputs(x, weighed.mean())


lib.main(__name__)

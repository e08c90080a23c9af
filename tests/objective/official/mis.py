"""Masked importance sampling of rows, by slime's helper: its weights and masks on its clipped loss, the mean over rows."""

from __future__ import annotations

import types

from jaxrl_llm.objective import importance_correction
from tests.objective.official import lib, slime_core

OFFICIAL = slime_core.OFFICIAL
SETTINGS = dict(
  importance_correction=dict(fn='sequence_mask', low=0.7, high=1.4),
  trust_region=dict(fn='clip', low=0.2, high=0.2),
)
NAMES = (
  *('compute_mis_weights', 'masked_sum', 'masked_mean', 'masked_min', 'masked_max', 'mask'),
  'metrics_append',
)
MUTANTS = {
  'truncated': (
    importance_correction,
    'return _spread(rho, tokens), _spread(_within(rho, low, high), tokens)',
    'return _spread(jnp.clip(rho, low, high), tokens), _spread(_within(rho, 0.0, 1e9), tokens)',
  ),
  'mean of the row': (
    importance_correction,
    'rho = exp(row_sum(_log_rho(tokens), tokens.mask_BxT))',
    'rho = exp(row_mean(_log_rho(tokens), tokens.mask_BxT))',
  ),
}


def official(torch, read, data):
  with slime_core.in_float64(torch):
    x = lib.tensors(torch, data)
    utils = lib.functions(read(slime_core.UTILS), ('compute_policy_loss',), torch=torch)
    helper = lib.functions(
      read(slime_core.MISMATCH), NAMES, torch=torch, add_ppl_metrics=lambda *_: None
    )
    settings = types.SimpleNamespace(
      use_tis=True, tis_level='sequence', tis_mode='mask', tis_lower_bound=0.7, tis_upper_bound=1.4,
      use_rs=False, rs_lower_bound=None, rs_upper_bound=None, tis_batch_normalize=False,
    )  # fmt: skip
    weights, kept, _ = helper.compute_mis_weights(
      settings,
      train_log_probs=slime_core.rows(x, 'old'),
      rollout_log_probs=slime_core.rows(x, 'behavior'),
      loss_masks=slime_core.masks(torch, x),
    )
    loss = slime_core.clipped(torch, utils, x) * torch.cat(weights) * torch.cat(kept)
    return lib.outputs(x, slime_core.row_mean(torch, x, loss))


lib.main(__name__)

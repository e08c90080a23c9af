"""DeepSeek-V3.2, by slime: masked negative rows, and the KL term with a ratio, the mean over rows."""

from __future__ import annotations

import types

from jaxrl_llm.objective import importance_correction, kl
from tests.objective.official import lib, slime_core

OFFICIAL = slime_core.OFFICIAL
SETTINGS = dict(
  importance_correction=dict(fn='divergent_negatives', delta=0.2),
  trust_region=dict(fn='clip', low=0.2, high=0.2),
  kl=dict(fn='ratio_k3', coef=0.3),
)
SEEDS = (0, 1, 2)
MUTANTS = {
  'positive rows, too': (importance_correction, '(tokens.advantage_BxT < 0) & (gap', '(gap'),
  'no ratio': (
    kl,
    'return coef * v * d, v * (exp(d) - d - 1)',
    'return coef * (exp(d) - 1), v * (exp(d) - d - 1)',
  ),
}


def official(torch, read, data):
  with slime_core.in_float64(torch):
    x = lib.tensors(torch, data)
    names = ('compute_policy_loss', 'compute_opsm_mask', 'compute_approx_kl')
    utils = lib.functions(read(slime_core.UTILS), names, torch=torch)
    logp, old, reference = (slime_core.rows(x, k) for k in ('logp', 'old', 'reference'))
    kept, _ = utils.compute_opsm_mask(
      types.SimpleNamespace(opsm_delta=0.2),
      full_log_probs=logp,
      full_old_log_probs=old,
      advantages=slime_core.advantages(torch, x),
      loss_masks=slime_core.masks(torch, x),
    )
    assert 0 < kept.sum() < len(kept)
    loss = slime_core.clipped(torch, utils, x) * kept.detach()
    ratio = torch.exp(torch.cat(logp) - torch.cat(old))
    loss = loss + 0.3 * utils.compute_approx_kl(
      torch.cat(logp), torch.cat(reference), 'k3', importance_ratio=ratio
    )
    return lib.outputs(x, slime_core.row_mean(torch, x, loss))


lib.main(__name__)

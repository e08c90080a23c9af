"""VCPO: gradients of single rows, their baseline of least variance and the learning rate's factor, as in its scripts.

The actor's own method adds up the gradients of the rows. Its loss of one row, w·mean(log π) with w capped, is written
here, and the norm of the row's gradient is drawn: the official one is that of this loss, and so has w in it once more
than the paper's.
"""

from __future__ import annotations

import ast
import dataclasses
import types

import numpy as np

from jaxrl_llm import objective
from jaxrl_llm.objective import advantage, lr_scale, trust_region
from tests.objective.official import lib, verl_core

UTILS = 'recipe/fully_async_policy/staleness_utils.py'
ACTOR = 'verl/workers/actor/megatron_actor.py'
OFFICIAL = lib.Official(
  'mit-han-lab/vcpo', 'c7f030f0b77237cfb0e75e720669e2917a1bb56e', (UTILS, ACTOR), 'Apache-2.0'
)
SETTINGS = dict(
  advantage=dict(fn='least_variance', by_std=True),
  ratio='direct_product',
  trust_region=dict(fn='cap', most=8.0),
  lr_scale=dict(fn='effective_sample_size', base=1.0),
)
SEEDS = (0, 1, 2, 3)
WITHOUT = {'empty rows': 'the official batch has none'}
MUTANTS = {
  'std over n − 1': (advantage, 'keepdims=True) / n_Px1)', 'keepdims=True) / (n_Px1 - 1))'),
  'equal rewards divided': (advantage, 'std_Px1 > 1e-8', 'std_Px1 > -1'),
  'weights once in the baseline': (advantage, 'jnp.exp(2 * (leverage', 'jnp.exp(1 * (leverage'),
  'no floor of the baseline': (advantage, 'floor * jnp.exp(-2 * jnp', '0 * jnp.exp(-2 * jnp'),
  'sample size of capped weights': (
    lr_scale,
    'jnp.where(exists_B, jnp.exp(log_w_B - top), 0.0)',
    'jnp.where(exists_B, jnp.exp(jnp.minimum(log_w_B, jnp.log(8.0)) - top), 0.0)',
  ),
  'no root': (lr_scale, 'jnp.sqrt(jnp.minimum(', '(jnp.minimum('),
  'no cap': (
    trust_region,
    'jnp.minimum(exp(log_ratio_BxT), most), tokens)\n\n\ndef cap_above',
    'exp(log_ratio_BxT), tokens)\n\n\ndef cap_above',
  ),
}
NAMES = (
  'TrajRecord', 'compute_is_info', 'compute_ess_info', 'compute_grad_info', 'rearrange_minibatch',
  'compute_opob_baseline', 'get_weighted_mean',
)  # fmt: skip


def draw(seed):
  """As everywhere without an empty row, with graded rewards, equal in one group, and norms of gradients.

  Odd seeds: a few rows whose weight is tiny, so that the official 1e-8 in the denominators counts.
  """
  data, r = lib.draw(seed), np.random.default_rng((seed, 1))
  data['length'][2] = 3
  data['reward'] = np.round(data['correct'] + 0.3 * r.random(lib.B), 4)
  data['reward'][lib.G : 2 * lib.G] = 1
  data['norm'] = np.round(r.uniform(0.5, 30, lib.B), 4)
  data['behavior'] = np.round(data['logp'] + 0.7 * (data['behavior'] - data['logp']), 4)
  if seed % 2:
    data['behavior'][8:12] = np.round(data['logp'][8:12] + 3.5, 4)
  return data


def official(torch, read, data):
  x = lib.tensors(torch, data)
  code = _code(torch, read)
  gaps = ((x.logp - x.behavior) * x.mask).sum(1)
  config = verl_core.Numbers(
    scope='group', use_is_weights=True, use_clipped_is_ratios=False, normalize_by_length=False, agg_mode='mean'
  )  # fmt: skip
  actor = types.SimpleNamespace(
    config=types.SimpleNamespace(grad_baselining=config), actor_module=None
  )
  batch = types.SimpleNamespace(
    meta_info=dict(n_resp_per_rollout=lib.G),
    non_tensor_batch=dict(
      uid=x.uid, traj_uid=np.arange(len(x.uid)), reward_scalar=x.reward.numpy()
    ),
  )
  info = code.compute_grad_info(batch).meta_info
  total, score, records = torch.zeros_like(x.logp), torch.zeros_like(x.logp), []
  for b in range(len(x.uid)):
    empty = {f.name: None for f in dataclasses.fields(code.TrajRecord)}
    record = code.TrajRecord(
      **empty | dict(uid=b, group_uid=x.uid[b], reward_scalar=float(x.reward[b]))
    )
    record = code.compute_is_info(
      record, x.behavior[b : b + 1], x.logp[b : b + 1].detach(), x.mask[b : b + 1], 8.0
    )
    record.grad_norm_unscaled = float(x.norm[b])
    records.append(record)
    weight = torch.exp(gaps[b].detach().clamp(-20, 20)).clamp(max=8.0)  # as its rollout_corr_helper
    loss = -weight * (x.logp[b] * x.mask[b]).sum() / x.mask[b].sum() / len(x.uid)
    code.row = torch.autograd.grad(loss, x.logp, retain_graph=True)[0]
    code.update(
      actor, total, score, records, float(x.reward[b]), info['reward_std_by_traj_uid'][b], 0.0, x.uid[b], 1.0,
      norm_by_std=True, is_last_traj_in_scope=info['is_last_traj_in_scope'][b], grad_baselining=True,
    )  # fmt: skip
  ratio = code.compute_ess_info(records, 8.0)['ess_ratio']
  gradient_BxT = total.numpy() * x.mask.numpy()
  return dict(gradient=gradient_BxT, lr_scale=[min(1.0, ratio) ** 0.5])


def _code(torch, read):
  """The official functions in float64, with the buffers of gradients as plain tensors."""
  double = types.SimpleNamespace(**vars(torch) | dict(float32=torch.float64))
  parallel = types.SimpleNamespace(
    get_data_parallel_group=lambda **_: None,
    get_tensor_model_parallel_rank=lambda: 0,
    get_pipeline_model_parallel_rank=lambda: 0,
  )
  globals_ = dict(
    torch=double, mpu=parallel, asdict=dataclasses.asdict, defaultdict=verl_core.collections.defaultdict,
    allgather_dict_into_list=lambda records, group: records,
  )  # fmt: skip
  code = lib.functions(read(UTILS), NAMES, **globals_)
  code.TrajRecord = dataclasses.dataclass(code.TrajRecord)
  actor = next(
    n for n in ast.parse(read(ACTOR)).body if getattr(n, 'name', '') == 'MegatronPPOActor'
  )
  method = next(n for n in actor.body if getattr(n, 'name', '') == '_update_grad_buffers')
  code.update = lib.functions(
    ast.unparse(method), ('_update_grad_buffers',), torch=torch,
    compute_opob_baseline=code.compute_opob_baseline,
    accumulate_grad_buffers=lambda module, buffer, scale: buffer.add_(scale * code.row),
    move_grad_buffers=lambda src, dest, scale: dest.add_(scale * src),
    zero_grad_accum_buffers=lambda buffer: buffer.zero_(),
  )._update_grad_buffers  # fmt: skip
  return code


def ours(data):
  method = objective.method(lib.settings(SETTINGS))
  batch = lib.batch(data, needs_old=True)
  gap_B = ((data['logp'] - data['behavior']) * lib.mask(data)).sum(1)
  target = objective.targets(method, batch, lib.G, leverage_B=np.log(data['norm']) + gap_B)
  c_BxT, _ = objective.coefficients(method, target, data['logp'])
  return dict(
    gradient=-np.asarray(c_BxT),
    lr_scale=[objective.learning_rate_scale(method, target, data['logp'])],
  )


lib.main(__name__)

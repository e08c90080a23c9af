"""AReaL's log-linear proximal log-probs, inside the whole loss of its actor: decoupled and clipped.

Advantages are by its own normalization of groups. Its versions are training steps, ours are optimizer steps; seed k
counts k + 1 optimizer steps as one training step. Here the project has taken one training step on the batch.

The official code takes the policy that it trains as one training step past the proximal one in every minibatch, and
gives the weights at the start of a batch the version of the policy that it trains: a token that is d > 0 training steps
old has α = (d − 1)/d. The project counts the steps taken on the batch: after b of n, α = d·n/(d·n + b), which is 1 in
the first minibatch. That difference is not compared. Nor are the shift by one token between log-probs and versions in
the official batch, its bound of 5 on the weight of the sampler, and its scale of rewards: the config has none of them.
"""

from __future__ import annotations

import enum
import math
import types
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxrl_llm import objective
from jaxrl_llm.learner import minibatch
from jaxrl_llm.objective import importance_correction, old_policy, trust_region
from tests.objective.official import lib, slime_core

ACTOR, LOSS = 'areal/trainer/ppo/actor.py', 'areal/utils/functional/functional.py'
DATA, CONSTANTS = 'areal/utils/data.py', 'areal/utils/constants.py'
OFFICIAL = lib.Official(
  'inclusionAI/AReaL',
  '4aef98d8d818af55b43621aaadba047ae10f4e77',
  (ACTOR, LOSS, DATA, CONSTANTS),
  'Apache-2.0',
)
VERSION = 6  # of the weights at the start of the batch, in training steps
EPS = 1e-5  # of its normalization
SETTINGS = dict(
  advantage=dict(fn='group_normalized', eps=EPS),
  old_policy='interpolated',
  importance_correction='token',
  trust_region=dict(fn='clip', low=0.2, high=0.2),
  aggregation='token_mean',
)
SEEDS = (0, 1, 2)
WITHOUT = {'empty rows': 'the official groups have none'}
MUTANTS = {
  'linear in probability': (
    old_policy,
    'return tokens.behavior_BxT + jnp.clip(alpha, 0.0, 1.0).astype(step.dtype) * step',
    'return tokens.behavior_BxT + jnp.log1p(jnp.clip(alpha, 0.0, 1.0) * jnp.expm1(step))',
  ),
  'one step more': (
    old_policy,
    '(age_BxT - batch_steps_BxT) /',
    '(age_BxT - batch_steps_BxT - 1) /',
  ),
  'one step less': (
    old_policy,
    '(age_BxT - batch_steps_BxT) /',
    '(age_BxT - batch_steps_BxT + 1) /',
  ),
  'the other way': (
    old_policy,
    'tokens.logp_BxT - tokens.behavior_BxT',
    'tokens.behavior_BxT - tokens.logp_BxT',
  ),
  'steps of the batch do not count': (minibatch, 'state.step - inputs.began', '0 * inputs.began'),
  'one version for each row': (
    minibatch,
    'age_BxT=state.step - version_BxT,',
    'age_BxT=state.step - version_BxT[:, :1] + 0 * version_BxT,',
  ),
  'correction upside down': (
    importance_correction,
    'tokens.old_BxT - tokens.behavior_BxT',
    'tokens.behavior_BxT - tokens.old_BxT',
  ),
  'lower bound': (
    trust_region,
    'return clip_masks.clip(log_ratio_BxT, tokens.advantage_BxT, 1 - low, 1 + high)',
    'return clip_masks.clip(log_ratio_BxT, tokens.advantage_BxT, 1 - 2 * low, 1 + high)',
  ),
}


def draw(seed):
  """As everywhere without an empty row. A row begins at its age, and some tokens are of later versions than the last.

  `old` is the behavior: no other log-probs are known.
  """
  data, r = lib.draw(seed), np.random.default_rng((seed, 1))
  data['length'][2] = 2
  later_BxT = np.cumsum(r.random((lib.B, lib.T)) < 0.25, axis=1)
  version_BxT = np.minimum(VERSION - data['age'][:, None] + later_BxT, VERSION)
  return data | dict(old=data['behavior'], version=version_BxT, unit=seed + 1)


def official(torch, read, data):
  with slime_core.in_float64(torch):
    x = lib.tensors(torch, data)
    norm = lib.functions(read(DATA), ('Normalization',), torch=torch, np=np, dist=Offline)
    settings = dict(mean_level='group', mean_leave1out=False, std_level='group', std_unbiased=True)
    group = types.SimpleNamespace(**settings, group_size=lib.G, eps=EPS)
    a_B = norm.Normalization(group)(x.reward)
    loss = actor(torch, read).grpo_loss_fn(
      x.logp,
      x.entropy,
      dict(
        logprobs=x.behavior,
        advantages=a_B[:, None].expand_as(x.logp),
        loss_mask=x.mask,
        versions=torch.tensor(data['version']),
      ),
      eps_clip=0.2,
      eps_clip_higher=None,
      c_clip=None,
      rejection_sampling=types.SimpleNamespace(
        level='token', action='clamp', metric='ratio', agg='mean', upper=math.inf, lower=None
      ),
      current_version=VERSION,
      prox_logp_method='loglinear',
      use_decoupled_loss=True,
    )
    return lib.outputs(x, loss)


def actor(torch, read):
  """The loss of its actor, without its logs."""
  kinds = lib.functions(read(CONSTANTS), ('ProxLogpMethod', 'ProxApproxMethod'), Enum=enum.Enum)
  names = ('ppo_actor_loss_fn', 'apply_rejection_sampling', '_check_bounds')
  losses = lib.functions(
    read(LOSS), names, torch=torch, RejectionSamplingResult=types.SimpleNamespace
  )
  names = ('grpo_loss_fn', '_resolve_proximal_logp', 'compute_prox_logp_approximations')
  quiet = dict.fromkeys(
    ('_log_proximal_approximation_stats', '_log_version_staleness_stats'), lambda **_: None
  )
  logs = types.SimpleNamespace(**dict.fromkeys(('denominator', 'stat', 'scalar'), lambda **_: None))
  methods = {f'PROX_LOGP_METHOD_{kind.name}': kind.value for kind in kinds.ProxLogpMethod}
  methods |= {f'PROX_APPROX_METHOD_{kind.name}': kind.value for kind in kinds.ProxApproxMethod}
  return lib.functions(
    read(ACTOR),
    names,
    torch=torch,
    stats_tracker=logs,
    infer_token_denominator=lambda *_: None,
    ProxLogpMethod=kinds.ProxLogpMethod,
    ppo_actor_loss_fn=losses.ppo_actor_loss_fn,
    **quiet,
    **methods,
  )


class Offline:
  """In place of torch.distributed."""

  @staticmethod
  def is_initialized() -> bool:
    return False


def ours(data):
  """The targets of a minibatch after `unit` optimizer steps on its batch, with versions in optimizer steps."""
  method, unit = objective.method(lib.settings(SETTINGS)), int(data['unit'])
  spec: Any = types.SimpleNamespace(
    objective=types.SimpleNamespace(method=method, score_centering=None),
    layout=types.SimpleNamespace(group=lib.G, slots_per_prompt=1),
  )
  batch = lib.batch(data, needs_old=True)
  version_BxT = jnp.asarray(unit * data['version'], jnp.int32)
  batch = batch._replace(rollout=batch.rollout._replace(version_BxT=version_BxT))
  step = jnp.int32(unit * VERSION)
  state: Any = types.SimpleNamespace(step=step)
  target = minibatch.minibatch_targets(
    spec, state, batch, minibatch.MinibatchInputs(began=step - unit)
  )
  c_BxT, _ = objective.coefficients(method, target, data['logp'], data['entropy'])
  return dict(gradient=-np.asarray(c_BxT))


lib.main(__name__)

"""What official repositories built on verl share: its advantages and denominators, read from their own copy."""

from __future__ import annotations

import collections
import types
from typing import Any

import numpy as np

from tests.objective.official import lib

CORE = 'verl/trainer/ppo/core_algos.py'
FUNCTIONAL = 'verl/utils/torch_functional.py'
MEANS = ('masked_sum', 'masked_mean', 'masked_var', 'masked_whiten')


class Numbers(types.SimpleNamespace):
  """A config whose fields are read as attributes, by get() and with `in`."""

  def get(self, name, default=None):
    return getattr(self, name, default)

  def __contains__(self, name):
    return hasattr(self, name)


def core(torch: Any, read: Any, *names: str, **more: Any) -> types.SimpleNamespace:
  """The named functions of verl's core_algos, and `verl_F` with its masked means."""
  means = lib.functions(read(FUNCTIONAL), MEANS, torch=torch)
  more = dict(torch=torch, np=np, verl_F=means, defaultdict=collections.defaultdict) | more
  out = lib.functions(read(CORE), names, **more)
  out.verl_F = means
  return out


def grpo(core: types.SimpleNamespace, x: types.SimpleNamespace, **how: Any) -> Any:
  """Advantages [rows, T] of the rewards, paid at the last token of a row."""
  return core.compute_grpo_outcome_advantage(at_the_end(x), x.mask, x.uid, **how)[0]


def at_the_end(x: types.SimpleNamespace) -> Any:
  """Rewards [rows, T] at the last token of each row."""
  last = x.mask.cumsum(1) == x.mask.sum(1, keepdim=True)
  return x.reward[:, None] * last * x.mask


def without_epsilon(x: types.SimpleNamespace, mode: str) -> Any:
  """What takes the 1e-8 out of verl's denominators: they count (n + 1e-8), the project counts n."""
  n = x.mask.sum() if mode == 'token-mean' else x.mask.sum(1, keepdim=True)
  return (n + 1e-8) / n


PINNED = (
  'volcengine/verl',
  'b178a3cd56f58b2d502255daba591e92833930a7',
  (CORE, FUNCTIONAL),
  'Apache-2.0',
)

TRAINER = 'verl/trainer/ppo/ray_trainer.py'
PINNED_WITH_TRAINER = (*PINNED[:2], (CORE, FUNCTIONAL, TRAINER), PINNED[3])


class Tensors(dict):
  """A batch by name, with its size."""

  batch_size: tuple[int, ...] = ()


def penalized(torch: Any, read: Any, x: types.SimpleNamespace, kind: str, coef: float) -> Any:
  """Rewards of tokens [rows, T] after verl's `apply_kl_penalty` with a fixed coefficient."""
  code = core(torch, read, 'kl_penalty', 'kl_penalty_forward', 'FixedKLController')
  batch = Tensors(
    response_mask=x.mask,
    token_level_scores=at_the_end(x),
    old_log_probs=x.old,
    ref_log_prob=x.reference,
  )
  batch.batch_size = (len(x.uid),)
  apply = lib.functions(
    read(TRAINER),
    ('apply_kl_penalty',),
    torch=torch,
    core_algos=code,
    masked_mean=code.verl_F.masked_mean,
  ).apply_kl_penalty
  data = types.SimpleNamespace(batch=batch)
  return apply(data, code.FixedKLController(coef), kind)[0].batch['token_level_rewards']


def policy(torch: Any, read: Any, data: dict, loss: str, advantage: str, mode: str, **config: Any):
  """Outputs of verl's own `compute_policy_loss_LOSS` with advantages of its `compute_ADVANTAGE_outcome_advantage`.

  `config` is what the loss reads of its config; in it `module` is what the loss takes for torch.
  """

  class ActorConfig(Numbers):
    pass

  class AlgoConfig(Numbers):
    pass

  x = lib.tensors(torch, data)
  name, estimator = f'compute_policy_loss_{loss}', f'compute_{advantage}_outcome_advantage'
  means = ActorConfig if loss in ('gspo', 'sapo', 'cispo') else Numbers
  module, kinds = config.pop('module', torch), dict(ActorConfig=ActorConfig, AlgoConfig=AlgoConfig)
  code = core(module, read, name, estimator, 'agg_loss', **kinds)
  how = (
    dict(clip_ratio=0.2, clip_ratio_low=None, clip_ratio_high=None, global_batch_info={}) | config
  )
  options = how.pop('advantage', {})
  a_BxT = getattr(code, estimator)(at_the_end(x), x.mask, index=x.uid, **options)[0]
  value, _ = getattr(code, name)(x.old, x.logp, a_BxT, x.mask, mode, means(**how))
  exact = mode != 'seq-mean-token-mean'
  return lib.outputs(x, value, 1.0 if exact else without_epsilon(x, mode))

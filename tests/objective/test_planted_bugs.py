"""Bugs of the usual kinds, planted into a function, break the identities of the other tests."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from objective_table import METHODS, G, batch, data, known, leverage, policies, settings, signal

from jaxrl_llm import objective
from jaxrl_llm.objective import (
  advantage,
  advantage_modulation,
  aggregation,
  clip_masks,
  credit_assignment,
  importance_correction,
  kl,
  old_policy,
  ratio,
  token_inputs,
  token_weighting,
  trust_region,
)

# (module, what stands there, what is planted, a method that must notice)
BUGS = {
  'sign of the ratio': (
    ratio,
    'tokens.logp_BxT - tokens.old_BxT',
    'tokens.old_BxT - tokens.logp_BxT',
    'grpo',
  ),
  'max for min': (
    clip_masks,
    'jnp.minimum(ratio * advantage',
    'jnp.maximum(ratio * advantage',
    'grpo',
  ),
  'swapped bounds': (
    trust_region,
    'clip_masks.clip(log_ratio_BxT, tokens.advantage_BxT, 1 - low, 1 + high)',
    'clip_masks.clip(log_ratio_BxT, tokens.advantage_BxT, 1 - high, 1 + low)',
    'dapo',
  ),
  'no clip': (clip_masks, 'jnp.where(up | down, 0.0, ratio)', 'ratio', 'grpo'),
  'clip without the sign': (
    clip_masks,
    'up = (advantage > 0) & (ratio > high)',
    'up = ratio > high',
    'grpo',
  ),
  'dual clip of gains': (
    clip_masks,
    'far = (advantage < 0)',
    'far = (advantage > 0)',
    'ppo_dual',
  ),
  'floor for cap': (
    trust_region,
    'jnp.minimum(exp(log_ratio_BxT), most), tokens)',
    'jnp.maximum(exp(log_ratio_BxT), most), tokens)',
    'cispo_cap',
  ),
  'mean for sum': (ratio, 'row_sum(token(tokens)', 'row_mean(token(tokens)', 'vespo'),
  'prefix with itself': (ratio, 'axis=1)[:, :-1]', 'axis=1)[:, 1:]', 'minpro'),
  'biased std': (
    advantage,
    'jnp.maximum(n_Px1 - 1, 1))\n  return centered / (std',
    'jnp.maximum(n_Px1, 1))\n  return centered / (std',
    'grpo',
  ),
  'tokens for rows': (aggregation, '(mask_BxT.sum(1) > 0).sum()', 'mask_BxT.sum()', 'grpo'),
  'rho upside down': (
    importance_correction,
    'tokens.old_BxT - tokens.behavior_BxT',
    'tokens.behavior_BxT - tokens.old_BxT',
    'tis',
  ),
  'truncation from below': (
    importance_correction,
    'jnp.clip(exp(_log_rho(tokens)), low, high)',
    'jnp.maximum(exp(_log_rho(tokens)), high)',
    'tis',
  ),
  'age upside down': (
    old_policy,
    '(age_BxT - batch_steps_BxT) /',
    'batch_steps_BxT /',
    'areal_interpolated',
  ),
  'mask of the good': (
    importance_correction,
    '(tokens.advantage_BxT < 0)',
    '(tokens.advantage_BxT > 0)',
    'opsm',
  ),
  'gradient of k1 for k3': (
    kl,
    'return coef * (exp(d) - 1), exp',
    'return -coef * jnp.ones_like(d), exp',
    'k3',
  ),
  'reference upside down': (
    kl,
    'present(tokens.reference_BxT) - tokens.logp_BxT',
    'tokens.logp_BxT - present(tokens.reference_BxT)',
    'k2',
  ),
  'value of the token itself for the next one': (
    credit_assignment,
    'discount * next_B - value_B',
    'discount * value_B - value_B',
    'ppo',
  ),
  'what was for what is to come': (
    credit_assignment,
    'row_sum(x_BxT, mask_BxT) - jnp.cumsum(x_BxT, axis=1) + x_BxT',
    'jnp.cumsum(x_BxT, axis=1)',
    'prime',
  ),
  'mean of the batch for that of the group': (
    credit_assignment,
    'mean_B = group_sum(reward_BxS.sum(1), group_B)',
    'mean_B = group_sum(reward_BxS.sum(1), group_B * 0)',
    'oprl',
  ),
  'sure for unsure': (
    advantage_modulation,
    'standard(1 - present(tokens.confidence_BxT))',
    'standard(present(tokens.confidence_BxT))',
    'echo',
  ),
  'likely for unlikely': (
    token_weighting,
    '1 - jnp.exp(score - mean)',
    'jnp.exp(score - mean) - 1',
    'xrpo',
  ),
}


@pytest.fixture(autouse=True)
def float64():
  with jax.enable_x64(True):
    yield


def agrees(name):
  """Gradient and value of a method of the table against its written loss."""
  d, row = data(4), METHODS[name]
  method = objective.method(settings(**row.settings))
  target = objective.targets(
    method, batch(d), G, signal(method, d), leverage(d), policies=policies(method, d)
  )
  target = target.with_arrays(**known(method, d))
  c, sums = objective.coefficients(method, target, d.x, d.entropy, d.confidence, d.collision)
  value, gradient = jax.value_and_grad(lambda x: row.loss(x, d.x, d))(jnp.asarray(d.x))
  kl = method.token_stages.kl
  coef = kl.keywords.get('coef', 0.0) if kl else 0.0
  logged = float(sums['pg_loss']) + coef * float(sums['kl_loss'])
  return np.allclose(c, -gradient * d.mask, atol=1e-10) and np.isclose(logged, value)


@pytest.mark.parametrize('bug', BUGS)
def test_a_planted_bug_is_noticed(bug, monkeypatch):
  module, there, planted, name = BUGS[bug]
  source = inspect.getsource(module)
  assert source.count(there) == 1, 'the text to replace is gone, or not alone'
  assert agrees(name)
  broken = dict(vars(module))
  exec(compile(source.replace(there, planted), module.__file__, 'exec'), broken)
  for key, fn in vars(module).items():
    if inspect.isfunction(fn) and fn.__module__ == module.__name__:
      monkeypatch.setattr(fn, '__code__', broken[key].__code__)
  assert not agrees(name)


def test_a_bug_in_what_all_share_is_noticed(monkeypatch):
  monkeypatch.setattr(token_inputs.row_mean, '__code__', token_inputs.row_sum.__code__)
  assert not agrees('gspo')

"""An entropy bonus with a fixed coefficient, by verl: the gradient with respect to the logits."""

from __future__ import annotations

from jaxrl_llm.models import logprob
from tests.objective.official import entropy_core, lib, verl_core

OFFICIAL = lib.Official(*verl_core.PINNED)
SETTINGS = dict(trust_region=dict(fn='clip', low=0.2, high=0.2), aggregation='token_mean')
COEF = 0.37
MUTANTS = {
  'no gradient': (logprob, 'log_total - mean', 'jax.lax.stop_gradient(log_total - mean)'),
  'weights without a gradient': (
    logprob,
    '(jnp.exp(shifted - log_total[..., None]) * shifted)',
    '(jax.lax.stop_gradient(jnp.exp(shifted - log_total[..., None])) * shifted)',
  ),
}
draw = entropy_core.draw


def official(torch, read, data):
  x = entropy_core.tensors(torch, data)
  verl_F = lib.functions(
    read(verl_core.FUNCTIONAL),
    ('entropy_from_logits', *verl_core.MEANS),
    torch=torch,
  )
  code = verl_core.core(
    torch, read, 'compute_grpo_outcome_advantage', 'compute_policy_loss', 'agg_loss'
  )
  entropy = lib.functions(
    read(verl_core.CORE),
    ('compute_entropy_loss', 'agg_loss'),
    torch=torch,
    verl_F=verl_F,
  ).compute_entropy_loss(x.logits, x.mask, 'token-mean')
  a_BxT = verl_core.grpo(code, x)
  value = code.compute_policy_loss(
    x.old, x.logp, a_BxT, x.mask, cliprange=0.2, clip_ratio_c=1e9, loss_agg_mode='token-mean'
  )[0]
  return entropy_core.outputs(x, value - COEF * entropy)


def ours(data):
  return entropy_core.gradient(SETTINGS, data, COEF)


lib.main(__name__)

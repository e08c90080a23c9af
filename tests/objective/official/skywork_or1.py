"""Skywork-OR1: the coefficient of its entropy bonus over 40 batches, and the gradient with that of one of them."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.objective import entropy_bonus
from tests.objective.official import entropy_core, lib, verl_core

OFFICIAL = lib.Official(
  'SkyworkAI/Skywork-OR1',
  '64e96afa213ae89d0ad21932106d3b8aafe9ace2',
  (verl_core.CORE, verl_core.FUNCTIONAL),
  'Apache-2.0',
)
SETTINGS = dict(trust_region=dict(fn='clip', low=0.2, high=0.2), aggregation='token_mean')
RULE = dict(target=0.3, coef=0.1, delta=0.05, low=0.0, high=0.3)
SHOWN = 9  # the batch whose coefficient the gradient has
MUTANTS = {
  'always active': (entropy_bonus, 'state.coef * state.active', 'state.coef'),
  'the other way': (entropy_bonus, 'entropy < self.target', 'entropy >= self.target'),
  'no upper end': (entropy_bonus, 'self.low, self.high)', 'self.low, 9.0)'),
  'no lower end': (entropy_bonus, 'self.low, self.high)', '-9.0, self.high)'),
}


def draw(seed):
  """Entropies below the target, far above it, and around it."""
  r = np.random.default_rng((seed, 3))
  centers = np.concatenate([np.full(10, 0.2), np.full(12, 0.5), np.full(18, 0.3)])
  return entropy_core.draw(seed) | dict(entropies=np.round(centers + 0.08 * r.normal(size=40), 4))


def official(torch, read, data):
  verl_F = lib.functions(
    read(verl_core.FUNCTIONAL), ('entropy_from_logits', *verl_core.MEANS), torch=torch
  )
  code = lib.functions(
    read(verl_core.CORE),
    ('EntController', 'compute_policy_loss', 'compute_grpo_outcome_advantage'),
    torch=torch,
    np=np,
    verl_F=verl_F,
    defaultdict=verl_core.collections.defaultdict,
  )
  names = ('init_ent_coef', 'max_ent_coef', 'min_ent_coef', 'delta_ent_coef', 'target_ent')
  values = (RULE[k] for k in ('coef', 'high', 'low', 'delta', 'target'))
  rule = code.EntController(**dict(zip(names, values, strict=True)), use_adapt_ent=True)
  coefs = []
  for entropy in data['entropies']:
    coefs.append(rule.value * rule.entropy_loss_enabled)
    rule.update(float(entropy))
  x = entropy_core.tensors(torch, {k: v for k, v in data.items() if k != 'entropies'})
  a_BxT = code.compute_grpo_outcome_advantage(verl_core.at_the_end(x), x.mask, x.uid)[0]
  value = code.compute_policy_loss(x.old, x.logp, a_BxT, x.mask, 0.2)[0]
  entropy = verl_F.masked_mean(verl_F.entropy_from_logits(x.logits), x.mask)
  return dict(coefs=coefs, **entropy_core.outputs(x, value - entropy * coefs[SHOWN]))


def ours(data):
  rule, coefs = entropy_bonus.adaptive(**RULE), []
  state = rule.init()
  state = state._replace(coef=jnp.asarray(RULE['coef']))  # in float64
  for entropy in data['entropies']:
    coefs.append(float(rule.coefficient(state)))
    state = rule.observe(state, jnp.asarray(entropy), jnp.bool_(True))
  return dict(coefs=coefs) | entropy_core.gradient(SETTINGS, data, coefs[SHOWN])


lib.main(__name__)

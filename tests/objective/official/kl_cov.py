"""KL-Cov, by verl; a tenth of the tokens in place of 0.0002, which is one of these few."""

from __future__ import annotations

from jaxrl_llm.objective import kl
from tests.objective.official import lib, verl_core

OFFICIAL = lib.Official(*verl_core.PINNED)
SETTINGS = dict(
  trust_region='none', kl=dict(fn='covariance', coef=1.0, share=0.1), aggregation='token_mean'
)
MUTANTS = {
  'square': (kl, '-coef * jnp.sign(moved)', '-coef * moved'),
  'smallest': (kl, '.ravel())[::-1]\n  count = jnp.maximum', '.ravel())\n  count = jnp.maximum'),
  'up': (kl, 'jnp.floor(share', 'jnp.ceil(share'),
}


def official(torch, read, data):
  return verl_core.policy(
    torch,
    read,
    data,
    'kl_cov',
    'grpo',
    'token-mean',
    policy_loss=verl_core.Numbers(kl_cov_ratio=0.1, ppo_kl_coef=1.0),
  )


lib.main(__name__)

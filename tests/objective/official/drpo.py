"""DRPO: the policy loss with the numbers of the 1.5B script; its hinge is a mean over tokens, rows go by prompt."""

from __future__ import annotations

import numpy as np

from jaxrl_llm.objective import kl, method_spec, trust_region
from tests.objective.official import lib, verl_core

CORE, FUNCTIONAL = f'verl/{verl_core.CORE}', f'verl/{verl_core.FUNCTIONAL}'
OFFICIAL = lib.Official(
  'Optimization-AI/DRPO', '405f70268c7943f4e1fb253fd50170bca0de772b', (CORE, FUNCTIONAL), 'MIT'
)
SETTINGS = dict(
  advantage=dict(fn='raw', baseline=0.5),
  ratio='one',
  trust_region=dict(fn='listwise', max_tokens=lib.T, temperature=10.0, length_rate=0.1),
  kl=dict(fn='hinge', coef=1e3, delta=1e-4),
  aggregation='sequence_mean',
)
SEEDS = (0, 1, 2, 3)
WITHOUT = {
  'empty rows': 'the official batch has none',
  'ratios far above and below 1 for both signs': 'the loss has no bounds on ratios',
}
MUTANTS = {
  'hinge over sequences': (method_spec, 'None if default is None else', 'None if default else'),
  'slack of the hinge': (kl, '- delta)', '- 2 * delta)'),
  'temperature': (trust_region, '(score - jnp.max(score)) / temperature', 'score - jnp.max(score)'),
  'length rate': (
    trust_region,
    '(1 - length / max_tokens) / length_rate',
    '(1 - length / max_tokens)',
  ),
  'prompts that have both': (
    trust_region,
    'prompts = jnp.where(exists,',
    'prompts = jnp.where(exists & both,',
  ),
}


def draw(seed):
  """Without an empty row: the official code wants groups of one size. Odd seeds drift to where the hinge is still."""
  data = lib.draw(seed)
  data['length'][2] = 3
  gap = data['logp'] - data['old']
  data['old'] = np.round(
    data['logp'] + (-1) ** (seed + 1) * np.abs(gap) * 0.1 * gap.clip(-1, 1) ** 2, 4
  )
  return data


def official(torch, read, data):
  x = lib.tensors(torch, data)
  means = lib.functions(read(FUNCTIONAL), ('masked_mean',), torch=torch)
  code = lib.functions(read(CORE), ('compute_policy_loss_drpo',), torch=torch, verl_F=means)
  loss, *_ = code.compute_policy_loss_drpo(
    x.old, x.logp, x.mask, torch.tensor(x.uid), x.reward, 1e-4, 1e3, 10, 0.1, 'kl'
  )
  return lib.outputs(x, loss)


lib.main(__name__)

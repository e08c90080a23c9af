"""HPT: the loss of one microbatch, rollouts by an unclipped ratio beside demonstrations of prompts that are all wrong.

The official sum over rollouts is divided by the cap alone, the project's also by the number of rows. `official` divides
it, too: the weight of demonstrations against rollouts is the project's, what a token of either counts is official.
"""

from __future__ import annotations

import jax
import numpy as np

from jaxrl_llm import objective
from jaxrl_llm.objective import advantage, demonstration_terms, ratio, sft_loss, trust_region
from tests.objective.official import lib, verl_core

CORE, FUNCTIONAL = f'hpt/verl/{verl_core.CORE}', f'hpt/verl/{verl_core.FUNCTIONAL}'
MIX = 'hpt/verl/verl/mix_src/mix_core_alg.py'
OFFICIAL = lib.Official(
  'TsinghuaC3I/Unify-Post-Training',
  'ae332f5fa4dc8b4c3d3cd77ebc9cff3a3abab2d0',
  (CORE, FUNCTIONAL, MIX),
  'MIT',
)
SETTINGS = dict(
  advantage='group_centered',
  trust_region='none',
  aggregation='fixed',
  sft_loss=dict(fn='replace', gate=0, weight=0.3),
)
SEEDS = (0, 1)
MUTANTS = {
  'no ratio': (
    trust_region,
    'ratio = exp(log_ratio_BxT)\n  return ratio, ratio *',
    'ratio = exp(0 * log_ratio_BxT)\n  return ratio, ratio *',
  ),
  'ratio upside down': (
    ratio,
    'tokens.logp_BxT - tokens.old_BxT, 0.0)',
    'tokens.old_BxT - tokens.logp_BxT, 0.0)',
  ),
  'gate': (
    sft_loss,
    'jnp.where(right_P <= gate, has_P, 0)',
    'jnp.where(right_P <= gate + 1, has_P, 0)',
  ),
  'weight': (sft_loss, 'weight * replaced_P, _uniform)', 'replaced_P, _uniform)'),
  'rollouts beside the demonstration': (
    sft_loss,
    'Plan(1 - replaced_P,',
    'Plan(1 - 0 * replaced_P,',
  ),
  'demonstrations row by row': (
    demonstration_terms,
    'jnp.maximum(counted_PxT.sum(), 1)',
    'jnp.maximum(counted_PxT.sum(1, keepdims=True), 1)',
  ),
  'baseline': (
    advantage,
    '(reward_PxG - _mean(reward_PxG, exists)) * exists',
    'reward_PxG * exists',
  ),
}


def draw(seed):
  """As everywhere, two groups all wrong, and a demonstration of each prompt."""
  data, r = lib.draw(seed), np.random.default_rng((seed, 1))
  data['correct'][8:12] = 0
  data['reward'] = np.round(data['correct'] + 0.2 * r.random(lib.B), 4)
  data['demo_logp'] = np.round(np.log(r.uniform(0.03, 0.9, (lib.P, lib.T))), 4)
  data['demo_length'] = r.integers(2, lib.T + 1, lib.P)
  return data


def official(torch, read, data):
  """Rows of prompts with a right answer, and one demonstration of each of the others, as its trainer puts them."""
  means = lib.functions(read(FUNCTIONAL), ('masked_mean',), torch=torch)
  code = lib.functions(read(CORE), ('compute_policy_loss',), torch=torch, verl_F=means)
  mix = lib.functions(
    read(MIX), ('compute_sft_pure_loss', 'compute_grpo_outcome_advantage_split'),
    torch=torch, verl_F=means, defaultdict=verl_core.collections.defaultdict,
  )  # fmt: skip
  demo = torch.tensor(data['demo_logp'], requires_grad=True)
  columns = torch.arange(lib.T)[None]
  demo_mask = (columns < torch.tensor(data['demo_length'])[:, None]).double()
  lost = torch.tensor(data['correct'].reshape(lib.P, lib.G).sum(1) == 0)
  x = lib.tensors(torch, {k: v for k, v in data.items() if not k.startswith('demo')})
  fresh = ~lost[torch.tensor(x.uid)]
  on_policy = torch.ones(len(x.uid), dtype=torch.bool)
  a, _ = mix.compute_grpo_outcome_advantage_split(
    verl_core.at_the_end(x), x.mask, x.uid, on_policy, use_std=False
  )
  loss, *_ = code.compute_policy_loss(
    x.old[fresh], x.logp[fresh], a[fresh], x.mask[fresh], 0.2, loss_remove_token_mean=True, loss_remove_clip=True
  )  # fmt: skip
  sft = mix.compute_sft_pure_loss(demo[lost], demo_mask[lost])
  out = lib.outputs(x, loss / len(x.uid) + 0.3 * sft)
  return out | dict(demo_gradient=demo.grad.numpy())


def ours(data):
  method = objective.method(lib.settings(SETTINGS))
  batch = lib.batch(data, needs_old=False)
  one_a_prompt = jax.tree.map(lambda x: x[: lib.P], batch.rollout)
  demo = one_a_prompt._replace(logp_BxT=np.zeros((lib.P, lib.T)), length_B=data['demo_length'])
  batch = batch._replace(demo=demo)
  target = objective.targets(method, batch, lib.G)
  target, plan, weigh, _ = objective.plan_demonstrations(method, target, batch, lib.G, 0)
  c_BxT, _ = objective.coefficients(method, target, data['logp'])
  demo_PxT = objective.demonstration_coefficients(weigh, plan, data['demo_logp'])
  return dict(gradient=-np.asarray(c_BxT), demo_gradient=-np.asarray(demo_PxT))


lib.main(__name__)

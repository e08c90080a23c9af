"""CHORD: rollouts beside weighted demonstrations in one batch, for CHORD-φ and CHORD-μ, and the schedule of μ.

Not covered: several microbatches, each with its own token mean in the official code. The official trainer counts its
steps from 1, the project's optimizer steps begin at 0; both get the same number here.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import objective
from jaxrl_llm.objective import advantage, clip_masks, demonstration_terms, sft_loss
from tests.objective.official import lib, trinity_core

FOLDER = 'trinity/algorithm'
CHORD = f'{FOLDER}/policy_loss_fn/chord_policy_loss.py'
PPO, SFT = f'{FOLDER}/policy_loss_fn/ppo_policy_loss.py', f'{FOLDER}/policy_loss_fn/sft_loss.py'
GRPO = f'{FOLDER}/advantage_fn/grpo_advantage.py'
OFFICIAL = lib.Official(*trinity_core.pinned(CHORD, PPO, SFT, GRPO))
SETTINGS = dict(
  trust_region=dict(fn='dual_clip', low=0.2, high=0.2, most=3.0),
  aggregation='token_mean',
  sft_loss=dict(fn='chord', high=0.1, low=0.1, warmup=0, decay=0, uncertain=True),
)
SCHEDULED = dict(fn='chord', high=0.9, low=0.05, warmup=0, decay=200, uncertain=False)
STEP = 37  # of the scheduled one
# (high, low, warmup, decay): CHORD-φ, CHORD-μ, the official example, short ones
SCHEDULES = (
  *((0.1, 0.1, 0, 0), (0.9, 0.05, 0, 200), (0.5, 0.02, 200, 400)),
  *((0.8, 0.2, 5, 7), (0.2, 0.6, 1, 3), (0.9, 0.05, 4, 0)),
)
STEPS = (*range(15), 100, 199, 200, 201, 400, 599, 600, 601, 5000)
SEEDS = (0, 1)
MUTANTS = {
  'likely tokens': (sft_loss, 'return p * (1 - p)', 'return p'),
  'plain likelihood': (sft_loss, '_uncertainty if uncertain else _uniform', '_uniform'),
  'always uncertain': (sft_loss, '_uncertainty if uncertain else _uniform', '_uncertainty'),
  'rollouts count whole': (sft_loss, '(1 - share) * jnp.ones_like', 'jnp.ones_like'),
  'demonstrations count whole': (sft_loss, ', share * has_P, _unc', ', has_P, _unc'),
  'linear fall': (sft_loss, '(1 + jnp.cos(jnp.pi * place)) / 2', '(1 - place)'),
  'fall during warmup': (sft_loss, '(step - warmup) / decay', 'step / decay'),
  'a step at the peak without a decay': (sft_loss, 'if decay else 1.0', 'if decay else 0.0'),
  'no warmup': (sft_loss, 'jnp.where(step < warmup, high', 'jnp.where(step < 0, high'),
  'beyond the fall': (sft_loss, 'decay, 0.0, 1.0)', 'decay, 0.0, 2.0)'),
  'demonstrations row by row': (
    demonstration_terms,
    'jnp.maximum(counted_PxT.sum(), 1)',
    'jnp.maximum(counted_PxT.sum(1, keepdims=True), 1)',
  ),
  'no dual clip': (clip_masks, '(ratio > most)', '(ratio > 1e9)'),
  'biased std': (
    advantage,
    'jnp.maximum(n_Px1 - 1, 1))\n  return centered',
    'jnp.maximum(n_Px1, 1))\n  return centered',
  ),
}


def draw(seed):
  """As everywhere, and a demonstration of each prompt but one."""
  data, r = lib.draw(seed), np.random.default_rng((seed, 1))
  data['demo_logp'] = np.round(np.log(r.uniform(0.03, 0.97, (lib.P, lib.T))), 4)
  data['demo_length'] = r.integers(2, lib.T + 1, lib.P)
  data['demo_length'][2] = 0
  return data


def official(torch, read, data):
  space = dict(torch=trinity_core.Wide(torch), PolicyLossFn=trinity_core.Base, math=math)
  names = ('aggregate_loss', 'masked_sum', 'masked_mean')
  space |= vars(lib.functions(read(trinity_core.UTILS), names, torch=torch))
  space |= vars(lib.functions(read(PPO), ('PPOPolicyLossFn',), **space))
  space |= vars(lib.functions(read(SFT), ('SFTLossFn',), **space))
  names = ('mu_schedule_function', 'phi_function', 'SFTPhiLossFn', 'MIXCHORDPolicyLossFn')
  code = lib.functions(read(CHORD), names, **space)
  grouped = lib.functions(
    read(GRPO), ('GRPOGroupedAdvantage',), **space, GroupAdvantage=trinity_core.Base
  ).GRPOGroupedAdvantage
  out = mixture(torch, code, grouped(), data, SETTINGS['sft_loss'], 0)
  scheduled = mixture(torch, code, grouped(), data, SCHEDULED, STEP)
  shares = [
    [code.mu_schedule_function(step, warmup, decay, high, low) for step in STEPS]
    for high, low, warmup, decay in SCHEDULES
  ]
  return out | {f'scheduled_{name}': x for name, x in scheduled.items()} | dict(shares=shares)


def mixture(torch, code, estimator, data, settings, step):
  """Loss of one batch: the rollouts, then the demonstrations, which have no advantage and no old log-probs."""
  x = lib.tensors(torch, {k: v for k, v in data.items() if not k.startswith('demo')})
  exists = data['demo_length'] > 0
  demo = torch.tensor(data['demo_logp'][exists], requires_grad=True)
  length = torch.tensor(data['demo_length'][exists])
  demo_mask = (torch.arange(lib.T)[None] < length[:, None]).double()
  rows, zeros = (len(x.uid), len(length)), torch.zeros_like(demo)
  defaults = code.MIXCHORDPolicyLossFn.default_args()
  loss = code.MIXCHORDPolicyLossFn(
    **defaults
    | dict(
      mu_warmup_steps=settings['warmup'],
      mu_decay_steps=settings['decay'],
      mu_peak=settings['high'],
      mu_valley=settings['low'],
      enable_phi_function=settings['uncertain'],
      use_dynamic_bsz=True,
      ppo_mini_batch_size=sum(rows),
      train_batch_size_usual=rows[0],
      train_batch_size_expert=rows[1],
    )
  )
  value, _ = loss(
    logprob=torch.cat([x.logp, demo]),
    old_logprob=torch.cat([x.old, zeros]),
    action_mask=torch.cat([x.mask, demo_mask]),
    advantages=torch.cat([trinity_core.advantages(torch, estimator, x), zeros]),
    expert_mask=torch.arange(sum(rows)) >= rows[0],
    step=torch.full((sum(rows),), step),
  )
  out = lib.outputs(x, value, (x.mask.sum() + 1e-8) / x.mask.sum())
  gradient = np.zeros(data['demo_logp'].shape)
  gradient[exists] = (demo.grad * (demo_mask.sum() + 1e-8) / demo_mask.sum()).numpy()
  return out | dict(demo_gradient=gradient)


def own(data, settings, step):
  """Gradients of the project's rollouts and demonstrations."""
  method = objective.method(lib.settings(SETTINGS | dict(sft_loss=settings)))
  batch = lib.batch(data, needs_old=False)
  one_a_prompt = jax.tree.map(lambda x: x[: lib.P], batch.rollout)
  demo = one_a_prompt._replace(logp_BxT=np.zeros((lib.P, lib.T)), length_B=data['demo_length'])
  batch = batch._replace(demo=demo)
  target = objective.targets(method, batch, lib.G)
  target, plan, weigh, _ = objective.plan_demonstrations(method, target, batch, lib.G, step)
  c_BxT, _ = objective.coefficients(method, target, data['logp'])
  demo_PxT = objective.demonstration_coefficients(weigh, plan, data['demo_logp'])
  return dict(gradient=-np.asarray(c_BxT), demo_gradient=-np.asarray(demo_PxT))


def ours(data):
  out = own(data, SETTINGS['sft_loss'], 0)
  scheduled = own(data, SCHEDULED, STEP)
  shares, one = [], jnp.ones(1)
  for high, low, warmup, decay in SCHEDULES:
    plans = [
      sft_loss.chord(
        one, one, jnp.asarray(float(step)), high=high, low=low, warmup=warmup, decay=decay
      )
      for step in STEPS
    ]
    shares.append([float(plan.demo_weight_P[0]) for plan in plans])
  return out | {f'scheduled_{name}': x for name, x in scheduled.items()} | dict(shares=shares)


lib.main(__name__)

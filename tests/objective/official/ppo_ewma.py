"""PPO-EWMA: its loss around given proximal log-probs, and its averaged weights after optimizer steps with that loss.

The policy is a table of log-probs, so that weights are log-probs. `gradient` is of one minibatch. `weights` and
`average` are those after STEPS runs of the official training step, and of the project's optimizer step on coefficients
around the average before it: plain gradient descent in place of Adam. The average is compared to four decimals, because
the project computes the share of a step in float32; no value is close to where its rounding changes.

The official code caps π/π_b at 100, the project π_old/π_b. Both caps agree where π = π_old, as for a token here, and
where neither binds, as for all others. Not compared: the project's pass that scores tokens by the average, and what
its config leaves out: value function, entropy bonus, normalized advantages.
"""

from __future__ import annotations

import ast
import copy
import math
import types
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

from jaxrl_llm import objective
from jaxrl_llm.learner import minibatch
from jaxrl_llm.objective import importance_correction, trust_region
from jaxrl_llm.types import TrainState
from tests.objective.official import clpo_core, lib

LOSS, MODEL, UTILS = 'ppo_ewma/ppo.py', 'ppo_ewma/ppg.py', 'ppo_ewma/torch_util.py'
OFFICIAL = lib.Official(
  'openai/ppo-ewma', '625dac7aceb9fb8bfdc3eff9dba597ec8f685ac7', (LOSS, MODEL, UTILS), 'MIT'
)
CLIP, CAP, DECAY = 0.2, 100.0, 0.889
STEPS, RATE = 12, 8.0
SETTINGS = dict(
  advantage='raw',
  importance_correction=dict(fn='token_truncate', low=0.0, high=CAP),
  old_policy=dict(fn='average', decay=DECAY),
  trust_region=dict(fn='clip', low=CLIP, high=CLIP),
  aggregation='token_mean',
)
MUTANTS = {
  'the start does not count': (
    minibatch,
    'state.step.astype(jnp.float32) + 2',
    'state.step.astype(jnp.float32) + 1',
  ),
  'no bias correction': (
    minibatch,
    'share = (1 - decay) / -jnp.expm1(weights * math.log(decay))',
    'share = (1 - decay)',
  ),
  'the other share': (minibatch, 'x + (1 - share) * (mean - x)', 'x + share * (mean - x)'),
  'weights before the step': (
    minibatch,
    '(mean - x), state.average, params)',
    '(mean - x), state.average, state.params)',
  ),
  'correction upside down': (
    importance_correction,
    'tokens.old_BxT - tokens.behavior_BxT',
    'tokens.behavior_BxT - tokens.old_BxT',
  ),
  'no cap': (
    importance_correction,
    'jnp.clip(exp(_log_rho(tokens)), low, high)',
    'exp(_log_rho(tokens))',
  ),
  'another lower cap': (
    importance_correction,
    'jnp.clip(exp(_log_rho(tokens)), low, high)',
    'jnp.clip(exp(_log_rho(tokens)), 0.5, high)',
  ),
  'upper bound': (
    trust_region,
    'return clip_masks.clip(log_ratio_BxT, tokens.advantage_BxT, 1 - low, 1 + high)',
    'return clip_masks.clip(log_ratio_BxT, tokens.advantage_BxT, 1 - low, 1 + 2 * high)',
  ),
}


def draw(seed):
  """As everywhere, with rewards of both signs, and a token above the cap whose policy is the proximal one.

  The steps begin at `first`; `sampler` is what sampled there.
  """
  data, r = lib.draw(seed), np.random.default_rng((seed, 1))
  data['reward'] = np.round((2 * data['correct'] - 1) * r.uniform(0.3, 1.5, lib.B), 4)
  data['behavior'] = np.round(data['old'] + 0.6 * r.normal(size=data['old'].shape), 4)
  data['old'][4, 0] = data['logp'][4, 0]
  data['behavior'][4, 0] = data['old'][4, 0] - math.log(CAP) - 0.5
  first_BxT = data['reference']
  sampler_BxT = np.round(first_BxT + 0.4 * r.normal(size=first_BxT.shape), 4)
  return data | dict(first=first_BxT, sampler=sampler_BxT)


def official(torch, read, data):
  x = lib.tensors(torch, data)
  utils = lib.functions(read(UTILS), ('sum_nonbatch',)).sum_nonbatch
  tu = types.SimpleNamespace(
    sum_nonbatch=utils, warn_no_gradient=lambda *_: None, sync_grads=lambda *_, **__: None
  )
  losses = lib.functions(read(LOSS), ('compute_losses',), th=torch, math=math, tu=tu)
  averaged = lib.functions(
    read(MODEL), ('EwmaModel',), th=torch, deepcopy=copy.deepcopy, PpoModel=torch.nn.Module
  ).EwmaModel
  settings = dict(clip_param=CLIP, vfcoef=0.0, entcoef=0.0, kl_penalty=0.0, imp_samp_max=CAP)

  x.logp = torch.nn.Parameter(x.logp.detach())
  proximal = averaged(table(torch, x.old), DECAY)
  arrays = inputs(torch, x, x.behavior)
  loss, _ = losses.compute_losses(table(torch, x.logp), proximal, **arrays, **settings)
  model = table(torch, x.first)
  average = averaged(model, DECAY)
  step = clpo_core.run(
    clpo_core.statement(read(LOSS), ast.FunctionDef, 'opt.zero_grad()\n'),
    compute_losses=losses.compute_losses,
    model=model,
    model_ewma=average,
    tu=tu,
    params=[*model.parameters()],
    grad_weight=1,
    get_weight=lambda _: 1.0,
    **settings,
  )['train_with_losses_and_opt']
  descent, arrays = torch.optim.SGD(model.parameters(), lr=RATE), inputs(torch, x, x.sampler)
  for _ in range(STEPS):
    step(['pi'], descent, **arrays)
  both = dict(weights=model, average=average.model_ewma)
  both = {name: rows(data, module.logp.detach().numpy(), x.exists) for name, module in both.items()}
  return lib.outputs(x, loss['pi']) | both | dict(average=rounded(both['average'], sure=True))


def table(torch, logp):
  """A policy whose weights are its log-probs, in the shape of the official models."""

  class Table(torch.nn.Module):
    def __init__(self):
      super().__init__()
      self.logp = logp if isinstance(logp, torch.nn.Parameter) else torch.nn.Parameter(logp.clone())

    def forward(self, ob, first, state_in):
      del first, state_in
      tokens = self.logp[ob][None]
      distribution = types.SimpleNamespace(
        log_prob=lambda _: tokens, entropy=lambda: torch.zeros_like(tokens)
      )
      return distribution, torch.zeros_like(tokens), {}, None

  return Table()


def inputs(torch, x, behavior):
  """The tokens of all rows as one row, with what its loss reads of them; `ob` says where they are."""
  where = x.mask > 0
  advantage = x.reward[:, None].expand_as(x.mask)[where][None]
  zero = torch.zeros_like(advantage)
  arrays = dict(logp=behavior[where][None], rec_logp=zero, vtarg=zero, adv=advantage)
  return arrays | dict(ob=where, ac=None, first=None, state_in=None)


def rows(data, values, exists=slice(None)):
  """Values of tokens in all rows, 0 elsewhere: [B, T]."""
  out = np.zeros((lib.B, lib.T))
  out[exists] = values
  return out * lib.mask(data)


def rounded(values, sure=False):
  """Values to four decimals; with `sure`, raises where an error of 5e-7 would change one."""
  off = np.abs(values * 1e4 % 1 - 0.5).min() / 1e4
  if sure and off < 5e-7:
    raise ValueError(f'a value is {off:.1e} from where its rounding changes; choose another seed')
  return np.round(values, 4)


def ours(data):
  """The gradient by `old`, and the weights by the average of each step before it is taken."""
  once = lib.gradient(SETTINGS, data)
  method = objective.method(lib.settings(SETTINGS))
  spec: Any = types.SimpleNamespace(
    update=types.SimpleNamespace(activation_noise=None, optimizer=optax.sgd(RATE)),
    objective=types.SimpleNamespace(refresh=None, average_decay=DECAY),
  )
  first = dict(logp=jnp.asarray(data['first']))
  zero = jnp.int32(0)
  state = TrainState(first, spec.update.optimizer.init(first), zero, zero, zero, average=first)
  batch = lib.batch(data | dict(behavior=data['sampler']), method.needs_old)
  for _ in range(STEPS):
    policies = objective.OtherPolicies(state.average['logp'])
    target = objective.targets(method, batch, lib.G, policies=policies)
    c_BxT, _ = objective.coefficients(method, target, state.params['logp'])
    gradient = minibatch.Gradient(dict(logp=-c_BxT), None)
    state, _ = minibatch._apply(spec, state, gradient, None)
  both = dict(weights=state.params, average=state.average)
  both = {name: rows(data, np.asarray(x['logp'])) for name, x in both.items()}
  return once | both | dict(average=rounded(both['average']))


lib.main(__name__)

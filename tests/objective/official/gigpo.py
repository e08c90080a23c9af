"""GiGPO in the code of its first author: episodes and turns from the same state, with and without their deviation."""

from __future__ import annotations

import collections
import types
import uuid

import numpy as np

from jaxrl_llm.objective import credit_assignment
from tests.objective.official import lib, verl_core

OFFICIAL = lib.Official(
  'langfengQ/DrMAS',
  '19c632bc0f75730b6db98d90b5035ee9bb7f66d1',
  (verl_core.CORE, verl_core.FUNCTIONAL),
  'Apache-2.0',
)
WEIGHT, DISCOUNT = 0.7, 0.95
SETTINGS = dict(
  advantage='group_normalized',
  credit_assignment=dict(fn='gigpo', weight=WEIGHT, discount=DISCOUNT),
  trust_region=dict(fn='clip', low=0.2, high=0.2),
  aggregation='token_mean',
)
CENTERED = SETTINGS | dict(
  advantage='group_centered',
  credit_assignment=dict(fn='gigpo', weight=WEIGHT, discount=DISCOUNT, by_std=False),
)
MODES = {'gradient': SETTINGS, 'mean_norm': CENTERED}
NAMES = (
  *('to_hashable', 'compute_step_discounted_returns', 'episode_norm_reward', 'step_norm_reward'),
  *('build_step_group', 'compute_gigpo_outcome_advantage', 'compute_policy_loss', 'agg_loss'),
)
MUTANTS = {
  'all turns of a group are alike': (
    credit_assignment,
    '_turn_advantage(inputs, present(inputs.state_BxT)',
    '_turn_advantage(inputs, 0 * present(inputs.state_BxT)',
  ),
  'no discount': (credit_assignment, 'x + discount * total', 'x + total'),
  'biased': (
    credit_assignment,
    'jnp.maximum(n - 1, 1))\n  return jnp.where',
    'jnp.maximum(n, 1))\n  return jnp.where',
  ),
  'always divided': (credit_assignment, 'eps if by_std else 1.0', 'eps'),
}


def draw(seed):
  """Rows of up to three turns of one to three tokens, each paid; some turns of a group start from the same state."""
  data, r = lib.draw(seed), np.random.default_rng(seed + 1)
  data['turn'] = np.minimum(np.cumsum(r.integers(0, 2, data['logp'].shape), axis=1), 2)
  data['turn'] -= data['turn'][:, :1]
  data['paid'] = np.round(r.normal(size=data['logp'].shape), 4) * lib.turn_ends(data)
  of_turn = r.integers(0, 4, (len(data['length']), 3))
  data['state'] = np.take_along_axis(of_turn, data['turn'], axis=1)
  return data


def ours(data):
  """The gradients of both modes."""
  of = {name: lib.gradient(changes, data) for name, changes in MODES.items()}
  return {name: found['gradient'] for name, found in of.items()}


def official(torch, read, data):
  # Its returns are in float32 alone.
  text = read(verl_core.CORE).replace('float32', 'float64')
  means = lib.functions(read(verl_core.FUNCTIONAL), verl_core.MEANS, torch=torch)
  space = dict(torch=torch, np=np, verl_F=means, defaultdict=collections.defaultdict, uuid=uuid)
  code = lib.functions(text, NAMES, **space, print=lambda *_: None)
  with_std = _gradient(torch, code, data, 'mean_std_norm')
  centered = _gradient(torch, code, data, 'mean_norm')
  return with_std | dict(mean_norm=centered['gradient'])


def _gradient(torch, code, data, mode):
  """Loss and gradient of a batch whose rows are turns, as each call of the model is one there."""
  x = lib.tensors(torch, data)
  row, number, own_RxT = lib.turns(torch, x)
  columns = dict(
    rewards=(x.paid[row] * own_RxT).sum(1).numpy(),
    traj_uid=np.array(row),
    active_masks=np.ones(len(row)),
    env_step=np.array(number),
  )
  rows = types.SimpleNamespace(non_tensor_batch=columns, batch=dict(input_ids=own_RxT))
  state = [int(x.state[b][own > 0][0]) for b, own in zip(row, own_RxT, strict=True)]
  episodes = types.SimpleNamespace(mask=own_RxT, reward=x.reward[row])
  a_RxT, _ = code.compute_gigpo_outcome_advantage(
    verl_core.at_the_end(episodes),
    code.compute_step_discounted_returns(rows, DISCOUNT),
    own_RxT,
    np.array(state, dtype=object),
    x.uid[row],
    np.array(row),
    step_advantage_w=WEIGHT,
    mode=mode,
  )
  loss, *_ = code.compute_policy_loss(
    x.old[row],
    x.logp[row],
    a_RxT,
    own_RxT,
    cliprange=0.2,
    clip_ratio_c=float('inf'),  # the second clip of its PPO is not GiGPO's
  )
  return lib.outputs(x, loss, verl_core.without_epsilon(x, 'token-mean'))


lib.main(__name__)

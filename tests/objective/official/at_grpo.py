"""AT-GRPO: turns of two agents in groups by its own numbering, and the advantages of its copy of verl."""

from __future__ import annotations

import types

import numpy as np

from jaxrl_llm.objective import credit_assignment
from tests.objective.official import lib, verl_core

CORE = 'verl/' + verl_core.CORE
FUNCTIONAL = 'verl/' + verl_core.FUNCTIONAL
TRAINER = 'pettingllms/trainer/multi_agents_ppo_trainer.py'
OFFICIAL = lib.Official(
  'pettingllms-ai/PettingLLMs',
  'a054fb18b83f4dc7c1d49aba3b71669d1f93ca71',
  (CORE, FUNCTIONAL, TRAINER),
  'MIT',
)
AGENTS = 2
SETTINGS = dict(
  advantage='raw',
  credit_assignment=dict(fn='turn_grouped'),
  trust_region=dict(fn='clip', low=0.2, high=0.2),
  aggregation='token_mean',
)
IDLE = ('advantage.baseline',)  # of R, which is not used
MUTANTS = {
  'all turns of a group are one': (
    credit_assignment,
    '_turn_advantage(inputs, turn_BxT, discount',
    '_turn_advantage(inputs, 0 * turn_BxT, discount',
  ),
  'the last token of a turn alone': (
    credit_assignment,
    'jnp.where(last > 0, x, later), (x_BxT, last_BxT))',
    'jnp.where(last > 0, x, 0 * later), (x_BxT, last_BxT))',
  ),
  'biased': (
    credit_assignment,
    'jnp.maximum(n - 1, 1))\n  return jnp.where',
    'jnp.maximum(n, 1))\n  return jnp.where',
  ),
}


def draw(seed):
  """Rows of up to three turns of one to three tokens, each paid; some third turns are alone in their group."""
  data, r = lib.draw(seed), np.random.default_rng(seed + 1)
  data['turn'] = np.minimum(np.cumsum(r.integers(0, 2, data['logp'].shape), axis=1), 2)
  data['turn'] -= data['turn'][:, :1]
  data['paid'] = np.round(r.normal(size=data['logp'].shape), 4) * lib.turn_ends(data)
  return data


def official(torch, read, data):
  x = lib.tensors(torch, data)
  of_row, number, own_RxT = lib.turns(torch, x)
  paid_RxT = x.paid[of_row] * own_RxT
  columns = dict(
    env_idx=np.flatnonzero(x.exists)[of_row],
    turn_idx=np.array(number),
    agent_idx=np.array(number) % AGENTS,
    reward=paid_RxT.sum(1).numpy(),
  )
  assign = lib.method(
    read(TRAINER),
    'MultiAgentsPPOTrainer',
    '_assign_consistent_uids',
    print=_quiet,
    colorful_print=_quiet,
  )
  rows = assign(None, _Rows(columns), sample_num=lib.G)
  means = lib.functions(read(FUNCTIONAL), verl_core.MEANS, torch=torch)
  names = ('compute_grpo_outcome_advantage', 'compute_policy_loss', 'agg_loss')
  space = dict(torch=torch, verl_F=means, np=np, defaultdict=verl_core.collections.defaultdict)
  code = lib.functions(read(CORE), names, **space)
  a_RxT, _ = code.compute_grpo_outcome_advantage(paid_RxT, own_RxT, rows.non_tensor_batch['uid'])
  loss, *_ = code.compute_policy_loss(x.old[of_row], x.logp[of_row], a_RxT, own_RxT, 0.2)
  return lib.outputs(x, loss, verl_core.without_epsilon(x, 'token-mean'))


class _Rows(types.SimpleNamespace):
  """A batch of the official code, with what it reads of it."""

  def __init__(self, columns):
    super().__init__(non_tensor_batch=columns)

  def __len__(self):
    return len(self.non_tensor_batch['reward'])


def _quiet(*_):
  pass


lib.main(__name__)

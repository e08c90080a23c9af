"""CoMAS: rewards of a discussion from its score, standardized over the tokens of all turns, and its clipped loss.

The code is read from a public copy of xxyQwQ/CoMAS. Its file of rewards is the official one as far as can be seen; the
copy changed the reading of scores, which is not part of the golden. The formula of the normalization is that of
TsinghuaC3I/MARTI@786f1ce, on which CoMAS is built.
"""

from __future__ import annotations

import types

import numpy as np

from jaxrl_llm.environments import discussion
from jaxrl_llm.objective import credit_assignment
from tests.objective.official import lib

REWARDS = 'marti/verifiers/comas_reward.py'
BUFFER = 'marti/trainers/replay_buffer.py'
LOSS = 'marti/models/loss.py'
MEANS = 'marti/models/model_utils.py'
OFFICIAL = lib.Official(
  'wt-2048/comas',
  '144962ff7ef3eca2cfcbc9e82e51cf4d90cff4bc',
  (REWARDS, BUFFER, LOSS, MEANS),
  'MIT',
)
ROLES = ('solver_step', 'evaluator_step', 'scorer_step')
SETTINGS = dict(
  advantage='raw',
  credit_assignment=dict(fn='turn_reward_whitened'),
  trust_region=dict(fn='clip', low=0.2, high=0.2),
  aggregation='token_mean',
)
MUTANTS = {
  'the evaluator is paid as the solver': (discussion, '1 - share, 0.0', 'share, 0.0'),
  'scores from 0': (discussion, '(score - 1) / 2', 'score / 2'),
  'no penalty of a malformed score': (discussion, '0.0, 0.0, -1.0', '0.0, 0.0, 0.0'),
  'a malformed score costs all': (discussion, '0.0, 0.0, -1.0', '-1.0, -1.0, -1.0'),
  'not centered': (
    credit_assignment,
    'off_BxT = (reward_BxT - (reward_BxT * mask_BxT).sum() / n) * mask_BxT\n  return off_BxT / jnp.sqrt(jnp',
    'off_BxT = reward_BxT * mask_BxT\n  return off_BxT / jnp.sqrt(jnp',
  ),
  'unbiased': (
    credit_assignment,
    'jnp.maximum((off_BxT**2).sum() / n, eps)',
    'jnp.maximum((off_BxT**2).sum() / (n - 1), eps)',
  ),
  'all turns of a row are one': (
    credit_assignment,
    '_turn_ends(mask_BxT, present(inputs.turn_BxT))\n  reward_BxT',
    '_turn_ends(mask_BxT, 0 * present(inputs.turn_BxT))\n  reward_BxT',
  ),
  'the last token of a turn alone': (
    credit_assignment,
    '_spread(present(inputs.turn_reward_BxT).astype(mask_BxT.dtype), last_BxT)',
    'present(inputs.turn_reward_BxT).astype(mask_BxT.dtype)',
  ),
}


def draw(seed):
  """Rows of three turns of one to four tokens, and a score from 1 to 3 of each; 0 where there is none."""
  data, r = lib.draw(seed), np.random.default_rng(seed + 1)
  length_B = np.where(data['length'] > 0, np.maximum(data['length'], len(ROLES)), 0)
  turn_BxT = np.zeros(data['logp'].shape, int)
  for b in np.flatnonzero(length_B):
    later = np.sort(r.choice(np.arange(1, length_B[b]), len(ROLES) - 1, replace=False))
    turn_BxT[b] = (np.arange(lib.T)[:, None] >= later).sum(1)
  return data | dict(length=length_B, turn=turn_BxT, score=r.integers(0, 4, lib.B))


def official(torch, read, data):
  x = lib.tensors(torch, data)
  of_row, number, own_RxT = lib.turns(torch, x)
  kind = lib.functions(
    read(REWARDS), ('CoMASReward',), parse=None, verify=None, verify_coding_answer=None
  ).CoMASReward
  discussions = [_discussion(int(score) or None) for score in x.score]
  problem = dict(round_list=[dict(discussion_list=discussions)])
  kind().run(dict(problem_list=[problem]), [''], ['none'])
  reward_R = [
    discussions[b][ROLES[k]]['chat_history']['reward'] for b, k in zip(of_row, number, strict=True)
  ]
  # Without discount and penalty, the return of each token is the reward of its completion.
  items = [
    types.SimpleNamespace(advantages=torch.full((int(own_T.sum()),), r), action_mask=None)
    for r, own_T in zip(reward_R, own_RxT, strict=True)
  ]
  text = read(BUFFER).replace('.float()', '.double()').replace('torch.float32', 'torch.float64')
  normalize = lib.method(text, 'NaiveReplayBuffer', 'normalize', torch=torch)
  alone = types.SimpleNamespace(all_reduce=lambda x, how: x)
  normalize(types.SimpleNamespace(items=items), 'advantages', alone)
  # Packed completions are one row of tokens.
  of_turn = list(zip(of_row, own_RxT > 0, strict=True))

  def packed(y):
    return torch.cat([y[b][own_T] for b, own_T in of_turn])[None]

  masked_mean = lib.functions(read(MEANS), ('masked_mean',), torch=torch).masked_mean
  PolicyLoss = lib.functions(  # noqa: N806
    read(LOSS), ('PolicyLoss',), torch=torch, nn=torch.nn, masked_mean=masked_mean
  ).PolicyLoss
  a_1xN = torch.cat([item.advantages for item in items])[None]
  loss = PolicyLoss(0.2)(packed(x.logp), packed(x.old), a_1xN)
  return lib.outputs(x, loss)


def ours(data):
  """With the rewards that the environment pays for the scores."""
  paid_BxT = np.zeros(data['logp'].shape)
  for b, score in enumerate(data['score']):
    of_turn = discussion._rewards(int(score) or None)
    paid_BxT[b] = np.take(of_turn, data['turn'][b])
  return lib.gradient(SETTINGS, data | dict(paid=paid_BxT * lib.turn_ends(data)))


def _discussion(score):
  out = {role: dict(chat_history={}) for role in ROLES}
  out['solver_step']['solution_content'] = ''
  out['scorer_step']['generated_score'] = score
  return out


lib.main(__name__)

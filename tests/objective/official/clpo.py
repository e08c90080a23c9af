"""CLPO: groups that are neither all right nor all wrong, and a KL loss that counts half for hard prompts."""

from __future__ import annotations

import ast
import types

import numpy as np

from jaxrl_llm.objective import kl_scale, policy_gradient
from jaxrl_llm.types import FROM_HARD, FROM_MEDIUM, PLAIN
from tests.objective.official import clpo_core, lib, verl_core

PATHS = (clpo_core.TRAINER, clpo_core.ACTOR, verl_core.CORE, verl_core.FUNCTIONAL)
OFFICIAL = lib.Official(*clpo_core.PINNED, PATHS, 'Apache-2.0')
COEF = 0.2  # 0.001 would not show
SETTINGS = dict(
  trust_region=dict(fn='dual_clip', low=0.2, high=0.2, most=3.0),
  kl=dict(fn='k3', coef=COEF),
  kl_scale=dict(fn='by_difficulty', hard=clpo_core.HARD, hard_scale=0.5, other_scale=1.0),
  aggregation='token_mean',
  zero_variance='mask',
)
SEEDS = (0, 1)
SOURCES = {PLAIN: 'oqa', FROM_HARD: 'rewritten_hard', FROM_MEDIUM: 'rewritten_medium'}
# Group 2 is hard by its accuracy, 5 only by its source, 7 would be by its accuracy but not by its source.
CONTEXT = np.array([PLAIN] * 5 + [FROM_HARD, PLAIN, FROM_MEDIUM] + [PLAIN] * 2)
MUTANTS = {
  'hard ones count more': (kl_scale, 'jnp.where(hard_PxN, hard_scale, ', 'jnp.where(~hard_PxN, hard_scale, '),
  'the rate of all slots': (kl_scale, '(exists_PxN.sum(1, keepdims=True), 1)', '(exists_PxN.shape[1], 1)'),
  'sources do not count': (kl_scale, 'context_PxN == FROM_HARD, hard_PxN', 'hard_PxN, hard_PxN'),
  'all rewritten ones are hard': (kl_scale, 'context_PxN == FROM_HARD', 'context_PxN < PLAIN'),
  'the policy term, too': (
    policy_gradient,
    'return weight_BxT, kl_weight_BxT * groups.scatter(scale_PxN)[:, None]',
    'return tuple(w * groups.scatter(scale_PxN)[:, None] for w in (weight_BxT, kl_weight_BxT))',
  ),
  'nothing scaled': (policy_gradient, 'kl_weight_BxT * groups.scatter(', 'kl_weight_BxT + 0 * groups.scatter('),
}  # fmt: skip


def draw(seed):
  """Ten groups, three of them of rewritten questions."""
  one, two = lib.draw(seed), lib.draw(seed + 100)
  return {k: np.concatenate([one[k], two[k]]) for k in one} | dict(context=CONTEXT)


class _Rows:
  """A batch by the names that the official code reads."""

  def __init__(self, x, rows, source):
    self.rows = rows
    self.batch = dict(reward_tensor=x.reward[rows, None], token_level_scores=x.reward[rows, None])
    self.non_tensor_batch = dict(uid=x.uid[rows], clpo_source=source[rows])

  def __len__(self):
    return len(self.rows)


def official(torch, read, data):
  """Its filter of groups, its factors on the KL loss, and its two losses."""
  x = lib.tensors(torch, {k: v for k, v in data.items() if k != 'context'})
  source = np.array([SOURCES[c] for c in np.repeat(data['context'], lib.G).tolist()])[x.exists]
  trainer, actor = read(clpo_core.TRAINER), read(clpo_core.ACTOR)
  kept = _kept(trainer, _Rows(x, np.arange(len(x.uid)), source), x, source)
  scale = _scales(torch, trainer, _Rows(x, kept, source))
  for name in ('mask', 'reward', 'old', 'reference', 'uid'):
    setattr(x, name, getattr(x, name)[kept])
  logp_BxT = x.logp[kept]
  code = verl_core.core(
    torch, read, 'compute_policy_loss_vanilla', 'compute_grpo_outcome_advantage', 'agg_loss',
    'kl_penalty', 'kl_penalty_forward', AlgoConfig=_Rows,
  )  # fmt: skip
  config = verl_core.Numbers(
    clip_ratio=0.2, clip_ratio_low=None, clip_ratio_high=None, tis_imp_ratio_cap=0,
    use_kl_loss=True, kl_loss_type='low_var_kl', kl_loss_coef=COEF,
  )  # fmt: skip
  a_BxT = code.compute_grpo_outcome_advantage(verl_core.at_the_end(x), x.mask, x.uid)[0]
  loss = code.compute_policy_loss_vanilla(x.old, logp_BxT, a_BxT, x.mask, config=config)[0]
  node = clpo_core.statement(actor, ast.If, 'kl_loss * self.config.kl_loss_coef')
  out = clpo_core.run(
    node, torch=torch, self=types.SimpleNamespace(config=config), policy_loss=loss,
    model_inputs=dict(ref_log_prob=x.reference, kl_in_loss_scale=scale), log_prob=logp_BxT,
    kl_penalty=code.kl_penalty, agg_loss=code.agg_loss, response_mask=x.mask,
    loss_agg_mode='token-mean', micro_batch_metrics={}, loss_scale_factor=1,
  )  # fmt: skip
  return lib.outputs(x, out['policy_loss'], verl_core.without_epsilon(x, 'token-mean'))


def _kept(trainer, rows, x, source):
  """Numbers of the rows that its filter keeps."""
  node = clpo_core.statement(trainer, ast.FunctionDef, 'def keep_mid_acc')
  keep = clpo_core.run(_plain(node), np=np)['keep_mid_acc']
  rows.select_idxs = lambda kept: _Rows(x, np.array(kept), source)
  return keep(rows).rows


def _plain(node):
  """A function without type hints: its globals do not know them."""
  node.returns = None
  for argument in node.args.args:
    argument.annotation = None
  return node


def _scales(torch, trainer, mixed):
  """Its factors on the KL loss, one per row."""
  node = clpo_core.statement(trainer, ast.Try, "'rewritten_medium':\n")
  numbers = verl_core.Numbers(kl_loss_coef_hard_scale=0.5, kl_loss_coef_nonhard_scale=1.0)
  config = types.SimpleNamespace(
    algorithm={}, actor_rollout_ref=types.SimpleNamespace(actor=numbers)
  )
  limits = dict(clpo_hard_acc_upper=clpo_core.HARD, clpo_med_acc_lower=clpo_core.HARD)
  trainer_ = types.SimpleNamespace(config=config, clpo_med_acc_upper=clpo_core.MEDIUM, **limits)
  clpo_core.run(node, np=np, torch=torch, self=trainer_, mixed=mixed)
  return mixed.batch['kl_in_loss_scale']


lib.main(__name__)

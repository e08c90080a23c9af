"""SPEAR: recalibrated advantages of stored rows, which of them are replayed, and the sum of both terms of the loss.

Rollouts of four steps are stored, then one batch is learned together with all stored rows that the filters leave. The
official code takes an optimizer step for each term; both gradients are of the same weights here. Its Clip-Cov drops
random tokens: as in clip_cov.py, rotations of the candidates give the mean over all draws.
"""

from __future__ import annotations

import collections
import copy
import types

import jax.numpy as jnp
import numpy as np

from jaxrl_llm import objective
from jaxrl_llm.objective import self_imitation as term
from jaxrl_llm.objective import token_weighting
from jaxrl_llm.replay import reuse, self_imitation
from tests.objective.official import lib, verl_core
from tests.objective.official.clip_cov import _Rotated

BUFFER, ACTOR = 'verl/verl/trainer/ppo/ray_trainer_hybrid.py', 'verl/verl/workers/actor/dp_actor.py'
ADVANTAGE, LOSS = 'verl/' + verl_core.CORE, 'verl-agent/' + verl_core.CORE
MEANS = 'verl-agent/' + verl_core.FUNCTIONAL
OFFICIAL = lib.Official(
  'TencentYoutuResearch/SPEAR',
  '7e8431513165640b4b1f78d09ebaae8807ee4f85',
  (BUFFER, ACTOR, ADVANTAGE, LOSS, MEANS),
  'License Terms of SPEAR',
)
CLIP_COV = dict(
  share=0.1, low=0.02, high=0.6, replayed_share=0.2, replayed_low=0.05, replayed_high=0.4
)
SETTINGS = dict(
  advantage='group_centered',
  token_weighting=dict(fn='covariance_clip_by_term', **CLIP_COV),
  trust_region=dict(fn='clip', low=0.2, high=0.28),
  aggregation='fixed',
  zero_variance='keep',
)
SEEDS = (0, 1)
STEPS, PAST = 20, (2, 5, 6, 7)  # of the warm-up; in which rows were stored
BASELINES = 12  # the first step leaves, whose rows are too old, too
MUTANTS = {
  'mean baseline': (self_imitation, 'float(np.median(means))', 'float(np.mean(means))'),
  'all baselines': (self_imitation, '> self.settings.baselines', '> 99 * self.settings.baselines'),
  'stored advantages': (self_imitation, 'reward_B - self.baseline()', 'reward_B - reward_B.min() + 0.1'),
  'stored rows of any sign': (self_imitation, 'mean_P[:, None] > group_batches.SAME)', 'mean_P[:, None] > -9)'),
  'linear warm-up': (self_imitation, '(1 - math.cos(math.pi * progress)) / 2', 'progress'),
  'a step late': (self_imitation, 'weight_at(step + 1)', 'weight_at(step)'),
  'one denominator': (
    term,
    'method.denominators(fresh_BxT, ',
    'method.denominators(mask_BxT, ',
  ),
  'group advantages': (term, 'imitated_BxT * imitation_Bx1', 'imitated_BxT * advantage_BxT'),
  'covariance over both terms': (
    token_weighting,
    'jnp.where(imitated, tokens.mask_BxT, 0.0)',
    'tokens.mask_BxT',
  ),
  'band of sampled rows': (token_weighting, 'low=replayed_low, high=replayed_high', 'low=low, high=high'),
}  # fmt: skip


def draw(seed):
  """A batch, and four more whose rewards differ from step to step, so that means and medians are many."""
  data = lib.draw(seed)
  for number in range(len(PAST)):
    past = lib.draw(seed + 50 + number)
    past['reward'] = past['reward'] * (0.5 + 0.2 * number)
    # Whole rows: the official code has no empty ones, and means of its groups are over all.
    past['length'] = np.maximum(past['length'], 1)
    # Ratios of replayed rows within the clip's bounds, for most, so that their band is not empty.
    past['old'] = np.round(past['logp'] - 0.3 * (past['logp'] - past['old']), 4)
    names = ('logp', 'old', 'length', 'reward', 'correct', 'entropy')
    data |= {f'{name}_{number}': past[name] for name in names}
  return data


class _Rows(dict):
  """Arrays by name of some rows; indexed by a mask, these rows of all."""

  def __getitem__(self, key):
    return (
      dict.__getitem__(self, key)
      if isinstance(key, str)
      else _Rows({k: v[key] for k, v in self.items()})
    )


def _official_buffer(torch, read):
  """Its buffer, empty, with a size that all rows exceed."""
  core = lib.functions(
    read(ADVANTAGE),
    ('compute_grpo_outcome_advantage',),
    torch=torch,
    defaultdict=collections.defaultdict,
  )
  found = lib.functions(
    read(BUFFER), ('TrajectoryBufferBatch',), torch=torch, np=np, deepcopy=copy.deepcopy,
    defaultdict=collections.defaultdict, core_algos=core, print=lambda *x: None,
    AdvantageEstimator=types.SimpleNamespace(GRPO='grpo'),
  )  # fmt: skip
  buffer = found.TrajectoryBufferBatch(
    None, 4, BASELINES, 2, weight_decay_trajectory_replay=-1, adv_estimator='grpo'
  )
  return core, buffer


def _past(torch, data, number):
  """One stored step as tensors, with the place of its rows among those of all."""
  names = ('logp', 'old', 'length', 'reward', 'correct', 'entropy')
  x = lib.tensors(torch, {name: data[f'{name}_{number}'] for name in names})
  x.logp.requires_grad_(False)
  place = torch.arange(lib.B) + (number + 1) * lib.B
  return x, place


def _replayed(torch, read, data):
  """The rows that the official buffer replays, p50, and the number of rows above it."""
  core, buffer = _official_buffer(torch, read)
  called = [dict(messages=[dict(role='assistant', content='', tool_calls=[1])])] * lib.B
  for number, step in enumerate(PAST):
    x, place = _past(torch, data, number)
    rewards = verl_core.at_the_end(x)
    advantages, _ = core.compute_grpo_outcome_advantage(
      rewards.clone(), x.mask, x.uid, norm_adv_by_std_in_grpo=False
    )
    rows = _Rows(
      advantages=advantages, response_mask=x.mask, old_log_probs=x.old, logp=x.logp, place=place
    )
    batch = types.SimpleNamespace(
      batch=rows, non_tensor_batch=dict(uid=x.uid + 100 * step), meta_info={}
    )
    buffer.remove_old()
    buffer.update_batch(called, batch, rewards, {}, lib.G, step)
  assert buffer.is_full_capacity()
  steps = [item[-1] for item in buffer.trajectory_buffer for _ in item[1]]
  p50, std50 = buffer.maintain_reward_statistics(max(steps), steps)[10:12]
  stored = [item[0] for item in buffer.trajectory_buffer]
  whole = types.SimpleNamespace(
    batch=_Concat({k: torch.cat([b.batch[k] for b in stored]) for k in stored[0].batch}),
    non_tensor_batch=dict(uid=np.concatenate([b.non_tensor_batch['uid'] for b in stored])),
    meta_info={},
  )
  rewards = torch.cat([item[1] for item in buffer.trajectory_buffer])
  replayed, _, _ = buffer.prepare_for_selection(whole, rewards, {}, p50, std50)
  return replayed.batch, float(p50), int(buffer.get_buffer_size())


class _Concat(_Rows):
  """Rows with the size of their first array."""

  def size(self, axis):
    return len(next(iter(self.values())))

  def __getitem__(self, key):
    found = _Rows.__getitem__(self, key)
    return found if isinstance(key, str) else _Concat(found)


def _loss(torch, read, rows, logp, is_replay):
  """The mean over all draws of the official loss, and its gradient with respect to the log-probs."""
  limits = verl_core.Numbers(
    **dict(clip_cov_ratio=0.1, clip_cov_lb=0.02, clip_cov_ub=0.6, clip_cov_ratio_replay=0.2),
    **dict(clip_cov_lb_replay=0.05, clip_cov_ub_replay=0.4),
  )
  config = verl_core.Numbers(
    clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.28, policy_loss=limits
  )
  turned, losses, shift = _Rotated(torch, 0), [], 0
  means = lib.functions(read(MEANS), verl_core.MEANS, torch=torch)
  core = lib.functions(
    read(LOSS), ('compute_policy_loss_clip_cov', 'agg_loss'), torch=turned, verl_F=means
  )
  while shift < turned.count:
    turned.shift = shift
    loss, *_ = core.compute_policy_loss_clip_cov(
      rows['old_log_probs'], logp, rows['advantages'], rows['response_mask'],
      'seq-mean-token-sum-norm', config, is_replay=is_replay,
    )  # fmt: skip
    losses.append(loss / len(logp))  # its sum over rows as a mean
    shift += 1
  return sum(losses) / len(losses)


def official(torch, read, data):
  core, _ = _official_buffer(torch, read)
  x = lib.tensors(torch, {k: v for k, v in data.items() if '_' not in k})
  advantages, _ = core.compute_grpo_outcome_advantage(
    verl_core.at_the_end(x), x.mask, x.uid, norm_adv_by_std_in_grpo=False
  )
  fresh = dict(old_log_probs=x.old, advantages=advantages, response_mask=x.mask)
  replayed, p50, count = _replayed(torch, read, data)
  logp = replayed['logp'].clone().requires_grad_()
  space = dict(
    np=np, loss=_loss(torch, read, replayed, logp, True), global_steps=PAST[-1] + 1,
    max_replay_loss_steps=STEPS,
    self=types.SimpleNamespace(config=types.SimpleNamespace(replay_loss_coef=1)),
  )  # fmt: skip
  exec(lib.branch(read(ACTOR), 'global_steps <= max_replay_loss_steps'), space)
  loss = _loss(torch, read, fresh, x.logp, False) + space['loss']
  loss.backward()
  gradient = np.zeros(((1 + len(PAST)) * lib.B, lib.T))
  gradient[np.flatnonzero(x.exists)] = x.logp.grad.numpy()
  gradient[replayed['place'].numpy()] = logp.grad.numpy()
  return dict(loss=float(loss.detach()), gradient=gradient, p50=p50, count=count)


def ours(data):
  """Every group of a past step is another prompt, and so many slots that all of them are replayed."""
  store = reuse.self_imitation(
    share=0.8, fill=0.0, baselines=BASELINES, max_age=3, warm_up_steps=STEPS
  )
  rows = [_with_places(data, '', 0)]
  for number, step in enumerate(PAST):
    rows.append(_with_places(data, f'_{number}', number + 1))
    store.keep(rows[-1], np.zeros(lib.P, bool), step - 1)  # steps are counted from 0 here
  p50 = store.baseline()
  store.buffer.drop_old(PAST[-1])
  count = sum(int((np.asarray(g.batch.reward_B) > p50).sum()) for g in store.buffer.groups.values())
  batch = store.join(rows[0], 0, PAST[-1])
  place_B, logp_BxT = _places(data, batch)
  target = objective.targets(objective.method(lib.settings(SETTINGS)), batch, lib.G)
  method = objective.method(lib.settings(SETTINGS))
  c_BxT, _ = objective.coefficients(method, target, jnp.asarray(logp_BxT))
  gradient = np.zeros(((1 + len(PAST)) * lib.B, lib.T))
  gradient[place_B[place_B >= 0]] = -np.asarray(c_BxT)[place_B >= 0]
  return dict(gradient=gradient, p50=p50, count=count)


def _with_places(data, suffix, number):
  """A batch of these rows, whose version is the number of a row among those of all batches."""
  names = ('logp', 'old', 'length', 'reward', 'correct')
  batch = lib.batch({name: data[name + suffix] for name in names}, needs_old=False)
  place_Bx1 = np.arange(lib.B)[:, None] + number * lib.B
  place_BxT = np.broadcast_to(place_Bx1, batch.rollout.tokens_BxT.shape).astype(np.int32)
  prompts = batch.prompts._replace(index_P=np.arange(lib.P) + 100 * number)
  rollout = batch.rollout._replace(version_BxT=place_BxT)
  return batch._replace(prompts=prompts, rollout=rollout)


def _places(data, batch):
  """(numbers of the rows of a joined batch, −1 for empty ones; their log-probs)."""
  length_B = np.asarray(batch.rollout.length_B)
  place_B = np.where(length_B > 0, batch.rollout.version_BxT[:, 0], -1)
  suffixes = ('', *(f'_{n}' for n in range(len(PAST))))
  logp_NxT = np.concatenate([data['logp' + suffix] for suffix in suffixes])
  return place_B, logp_NxT[place_B]


lib.main(__name__)

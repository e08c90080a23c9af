"""Shuffle-R1: pairs of opposite advantages, sub-batches of them drawn by contrast, and the loss of their concatenation."""

from __future__ import annotations

import collections
import copy
import types

import jax.numpy as jnp
import numpy as np

from jaxrl_llm import objective
from jaxrl_llm.replay import contrast_pairs, group_batches
from tests.objective.official import lib

PAIRS, TRAINER = 'shuffle_r1/custom_algos.py', 'shuffle_r1/ray_trainer.py'
CORE, FUNCTIONAL = 'verl/trainer/core_algos.py', 'verl/utils/torch_functional.py'
OFFICIAL = lib.Official(
  'xiaomi-research/shuffle-r1',
  '31d3ff03c38c8527f9cc6f55b572f0cf798fcfbd',
  (PAIRS, TRAINER, CORE, FUNCTIONAL),
  'Apache-2.0',
)
SETTINGS = dict(
  trust_region=dict(fn='clip', low=0.2, high=0.28), aggregation='token_mean', zero_variance='keep'
)
SEEDS = (0, 1)
SHARE, DRAWS = 0.5, 2  # two sub-batches of five of the ten pairs
WITHOUT = {'empty rows': 'the official code pairs whole groups'}
MUTANTS = {
  'worst with worst': (contrast_pairs, 'row_n[::-1][:kept]', 'row_n[:kept]'),
  'the first pairs by row': (contrast_pairs, 'np.argsort(-advantage_G[row_n], ', 'np.argsort(0 * row_n, '),
  'all pairs': (contrast_pairs, 'kept = max(int(len(row_n) // 2 * share), ', 'kept = max(len(row_n) // 2, '),
  'uniform': (contrast_pairs, 'p=contrast_N / contrast_N.sum()', 'p=(contrast_N > 0) / (contrast_N > 0).sum()'),
  'with replacement': (contrast_pairs, 'replace=False', 'replace=True'),
  'one sub-batch more': (contrast_pairs, 'for _ in range(draws if', 'for _ in range(draws + 1 if'),
  'each pair once': (contrast_pairs, 'copies_N[chosen] += 1', 'copies_N[chosen] = 1'),
  'mean over all tokens': (
    group_batches,
    'scale = length_B.sum() / max((copies_B * length_B).sum(), 1)',
    'scale = 1.0',
  ),
  'mean over rows': (
    group_batches,
    'scale = length_B.sum() / max((copies_B * length_B).sum(), 1)',
    'scale = len(length_B) / max(copies_B.sum(), 1)',
  ),
}  # fmt: skip


def draw(seed):
  """Ten groups without empty rows, whose rewards are of several sizes."""
  one, two = lib.draw(seed), lib.draw(seed + 100)
  data = {name: np.concatenate([one[name], two[name]]) for name in one}
  data['length'] = np.maximum(data['length'], 1)
  r = np.random.default_rng(seed)
  data['reward'] = data['reward'] + 0.5 * data['reward'] * r.integers(0, 2, len(data['reward']))
  return data | dict(random=np.array(seed + 7))


class _Rows(list):
  """Row numbers, in place of the official batches."""

  @staticmethod
  def concat(parts):
    return _Rows(sum(parts, []))


def official(torch, read, data):
  """Its pairs, its sub-batches, and its loss of one batch that holds all of them."""
  x = lib.tensors(torch, {k: v for k, v in data.items() if k != 'random'})
  names = ('compute_pairwise_purning_grpo_advantage', 'normalize_advantage')
  methods = ['power', 'softmax', 'log_softmax', 'inverse', 'std', 'buffer']
  algorithms = lib.functions(
    read(PAIRS), names, torch=torch, np=np, defaultdict=collections.defaultdict,
    EXPERIENCE_SAMPLING_METHODS=methods,
  )  # fmt: skip
  rewards_BxT = torch.zeros_like(x.mask)
  rewards_BxT[torch.arange(len(x.mask)), x.mask.sum(1).long() - 1] = x.reward
  a_BxT, _, found = algorithms.compute_pairwise_purning_grpo_advantage(
    rewards_BxT, x.mask, x.uid, purning=True, purning_ratio=1 - SHARE
  )
  rows = _resampled(read(TRAINER), algorithms.normalize_advantage, methods, found, data)
  means = lib.functions(read(FUNCTIONAL), ('masked_mean',), torch=torch)
  core = lib.functions(read(CORE), ('compute_policy_loss_v2',), torch=torch, np=np, VF=means)
  loss, *_ = core.compute_policy_loss_v2(
    x.old[rows], x.logp[rows], a_BxT[rows], x.mask[rows], 0.2, 0.2, 0.28
  )
  tokens = float(x.mask[rows].sum())
  return lib.outputs(x, loss, scale=(tokens + 1e-8) / tokens)


def _resampled(text, normalize, methods, found, data):
  """Rows of the official batch after its resampling."""
  groups = len(data['length']) // lib.G
  space = types.SimpleNamespace
  numpy = space(array=np.array, random=np.random.RandomState(int(data['random'])))
  trainer = lib.method(
    text, 'RayPPOTrainer', 'experience_resampling', np=numpy, int=int, min=min,
    deepcopy=copy.deepcopy, DataProto=_Rows, normalize_advantage=normalize,
    EXPERIENCE_SAMPLING_METHODS=methods, EXPERIENCE_SAMPLING_WEIGHT_TARGET=['sum'],
  )  # fmt: skip
  actor = space(purning_ratio=1 - SHARE, global_batch_size=4)
  config = space(
    worker=space(actor=actor, rollout=space(n=lib.G)),
    trainer=space(sampling_method='power', sampling_weight='sum', sampling_coeff=1, replay_times=DRAWS),
    data=space(rollout_batch_size=groups),
  )  # fmt: skip
  pairs = [dict(pair, pair_data=_Rows(pair['pair_index'])) for pair in found]
  return list(trainer(space(config=config, global_step=0, training_steps=1), pairs))


def ours(data):
  method = objective.method(lib.settings(SETTINGS))
  batch = lib.batch(data, needs_old=False)
  random = np.random.RandomState(int(data['random']))
  batch = contrast_pairs.resampled(batch, SHARE, DRAWS, random)
  target = objective.targets(method, batch, lib.G)
  c_BxT, _ = objective.coefficients(method, target, jnp.asarray(data['logp']), data['entropy'])
  return dict(gradient=-np.asarray(c_BxT))


lib.main(__name__)

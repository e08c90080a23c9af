"""MoPPS: posteriors after a visit, Thompson draws from them, and the prompts whose draws are nearest to the target.

The project's `Curriculum` with the config of MoPPS runs beside the official sampler: same windows of candidates, same
success counts, and Beta draws by inverse distribution function of the same uniform numbers. Besides the config as it
stands, the two official settings are run: 16 batches of candidates without decay (MATH), 8 with decay 0.5 (others).

Not covered: the remainder of an epoch, which the official loader drops and the project's stream joins to the next
epoch (64 prompts fill whole windows here); scores between 0 and 1, which the official trainer rounds down and the
project counts as they are; the strategies `threshold` and `uniform`; the posteriors that `bandit_init` reads from a
file; the objective of the config.
"""

from __future__ import annotations

import ast
import functools
import types
from typing import Any
from unittest import mock

import numpy as np
from scipy import special

from jaxrl_llm.config import loading
from jaxrl_llm.curriculum import (
  Curriculum,
  candidates,
  curriculum,
  evidence_decay,
  rate_estimate,
  selection,
  slot_assignment,
  utility,
)
from tests.objective.official import clpo_core, lib

SAMPLER, TRAINER = 'recipe/ours/mopps.py', 'recipe/ours/our_ray_trainer.py'
OFFICIAL = lib.Official(
  'thu-rllab/MoPPS', 'a883f519bb2ec9e6bea3cb586639ee9c4f4cf146', (SAMPLER, TRAINER), 'Apache-2.0'
)
N, SLOTS, G, STEPS = 64, 4, 8, 20  # prompts of the data, prompts of a step, rollouts of each, steps
# seed → candidates in batches, decay, and the changes of the config that set them
CASES = (
  (16, 0.5, {}),
  (16, 1.0, dict(evidence_decay=dict(fn='visit', decay=1.0))),
  (8, 0.5, dict(candidates=dict(fn='stream', multiple=8))),
)
WITHOUT = {'*': 'its inputs are success counts of prompts'}
SEEDS = (0, 1, 2)
MUTANTS = {
  'no decay': (evidence_decay, 'return float(decay) if visited else 1.0', 'return 1.0'),
  'decay of all at each step': (evidence_decay, 'float(decay) if visited else 1.0', 'float(decay)'),
  'another prior': (curriculum, 'return np.float32(1) + evidence', 'return np.float32(2) + evidence'),
  'right and wrong exchanged': (
    curriculum,
    'np.stack([evidence.right_V, evidence.count_V - evidence.right_V])',
    'np.stack([evidence.count_V - evidence.right_V, evidence.right_V])',
  ),
  'parameters exchanged': (rate_estimate, 'random.beta(alpha, beta)', 'random.beta(beta, alpha)'),
  'no draw': (rate_estimate, 'return random.beta(alpha, beta)', 'return alpha / (alpha + beta)'),
  'the furthest': (utility, 'return -((rate - target) ** 2)', 'return (rate - target) ** 2'),
  'another target': (utility, '-((rate - target) ** 2)', '-((rate - target - 0.1) ** 2)'),
  'unordered': (selection, 'return order[np.argsort(-utility[order]', 'return order[np.argsort(order'),
  'one order of all epochs': (candidates, '(seed, 1, epoch)', '(seed, 1, 0)'),
  'only the chosen are consumed': (
    slot_assignment,
    'consumed = np.ones(len(pool), bool)',
    'consumed = np.isin(np.arange(len(pool)), chosen)',
  ),
}  # fmt: skip


def draw(seed):
  """The windows of the project's stream, a uniform number for each candidate, and successes of all prompts."""
  r, multiple = np.random.default_rng(seed), CASES[seed][0]
  window = SLOTS * multiple
  every, epochs = np.ones(N, bool), range(STEPS * window // N)
  orders = [candidates.stream(every, N, 0, np.full(N, e, np.int32), r, multiple=1) for e in epochs]
  rate_N = np.round(r.beta(0.6, 0.6, N), 2)
  return dict(
    case=np.array(seed),
    window=np.concatenate(orders).reshape(STEPS, window),
    uniform=np.round(r.uniform(0.001, 0.999, (STEPS, window)), 6),
    right=r.binomial(G, rate_N, (STEPS, N)),
  )


class Inverse(np.random.Generator):
  """A generator with the given uniform numbers behind its Beta draws."""

  def __init__(self, uniform):
    super().__init__(np.random.PCG64(0))
    self.uniform = uniform

  def beta(self, a, b, size=None):
    assert size is None
    return special.betaincinv(np.asarray(a, float), np.asarray(b, float), self.uniform)


def official(torch, read, data):
  """Its sampler, updated by its trainer's success rates of groups."""
  multiple, decay, _ = CASES[int(data['case'])]
  assert data['window'].shape[1] == SLOTS * multiple
  numpy = types.SimpleNamespace(array=np.array, argsort=np.argsort)
  space = dict(np=numpy, torch=torch)
  sampler = lib.functions(read(SAMPLER), ('PosteriorSampler',), **space).PosteriorSampler(
    settings(decay), N
  )
  reward = lib.functions(read(TRAINER), ('our_group_reward',), torch=torch, np=np).our_group_reward
  binary = clpo_core.statement(read(TRAINER), ast.If, "tasksampler.bandit_metric == 'acc'")
  config = types.SimpleNamespace(tasksampler=types.SimpleNamespace(bandit_metric='acc'))
  names: dict[str, Any] = dict(torch=torch, self=types.SimpleNamespace(config=config))
  chosen, posterior = [], []
  for window, uniform, right in zip(data['window'], data['uniform'], data['right'], strict=True):
    numpy.random = Inverse(uniform)
    batch, _ = sampler.sample_batch(dict(index=window))
    index = batch['index']
    scores = np.arange(G)[None] < right[index][:, None]
    names['reward_extra_infos_dict'] = dict(acc=scores.reshape(-1).astype(float).tolist())
    names = clpo_core.run(binary, **names)
    rows = types.SimpleNamespace(non_tensor_batch=dict(uid=np.repeat(index, G)))
    reward(rows, names['acc'].tolist(), sampler, batch, {})
    chosen.append(index)
    posterior.append(parameters(sampler, index))
  return dict(chosen=chosen, posterior=posterior, last=parameters(sampler, range(N)))


def settings(decay):
  """The fields of its config that the sampler reads; target 0.5 and `topk` are those of our_trainer.yaml."""
  return types.SimpleNamespace(
    data=types.SimpleNamespace(train_batch_size=SLOTS),
    tasksampler=types.SimpleNamespace(
      bandit_decay_ratio=decay,
      bandit_target_mean=0.5,
      bandit_sample_strategy='topk',
      bandit_lower_bound=0.3,
      bandit_upper_bound=0.7,
      bandit_no_update=False,
    ),
    actor_rollout_ref=types.SimpleNamespace(rollout=types.SimpleNamespace(n=G)),
  )


def parameters(sampler, index):
  """α and β of these prompts; those of the prior where the sampler has none yet."""
  return [(float(sampler.alpha.get(str(i), 1)), float(sampler.beta.get(str(i), 1))) for i in index]


@functools.cache
def configured() -> Any:
  """The curriculum of the config."""
  settings: Any = loading.load('mopps').curriculum
  return settings.to_dict()


def ours(data):
  """The same by `Curriculum`; the generator of a step is the one with the given uniform numbers."""
  own = Curriculum(configured() | CASES[int(data['case'])][2], N, group=G)
  fresh = np.random.default_rng
  chosen, posterior = [], []
  for step, (uniform, right) in enumerate(zip(data['uniform'], data['right'], strict=True)):

    def generator(seed, step=step, uniform=uniform):
      return Inverse(uniform) if seed == (0, 0, step) else fresh(seed)

    with mock.patch.object(np.random, 'default_rng', generator):
      proposal = own.propose(step, SLOTS)
    own.accept(proposal)
    own.observe(proposal.index, right[proposal.index], np.full(SLOTS, G))
    chosen.append(proposal.index)
    posterior.append(np.transpose(own.posterior(proposal.index)))
  last = np.transpose(own.posterior(np.arange(N)))
  return dict(chosen=np.array(chosen), posterior=np.array(posterior), last=last)


lib.main(__name__)

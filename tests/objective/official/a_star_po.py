"""A*-PO: the regression of whole rows, with V* of the rewards of their group."""

from __future__ import annotations

import types

import numpy as np

from jaxrl_llm.objective import advantage, kl
from tests.objective.official import lib

LOSS, VALUE = 'verl/trainer/apo/core_algos.py', 'verl/utils/dataset/rl_dataset.py'
OFFICIAL = lib.Official(
  'ZhaolinGao/A-PO', 'c8823a32aeec5a4197b118c6c5222ba1b385c15e', (LOSS, VALUE), 'Apache-2.0'
)
BETA1, BETA2 = 0.5, 0.3
SETTINGS = dict(
  advantage=dict(fn='log_mean_exp', temperature=BETA1),
  ratio='one',
  trust_region='none',
  kl=dict(fn='sequence_quadratic', coef=BETA2 / (1 + BETA1)),
  aggregation='sequence_sum',
)
MUTANTS = {
  'sign': (kl, 'return -coef * moved_Bx1 * shared', 'return coef * moved_Bx1 * shared'),
  'mean of the row': (
    kl,
    'return -coef * moved_Bx1 * shared',
    'return -coef * moved_Bx1 / length_Bx1 * shared',
  ),
  'sum over the group': (
    advantage,
    'jnp.maximum(_mean(jnp.exp(scaled - top), exists), 1e-37)',
    'jnp.maximum(2 * _mean(jnp.exp(scaled - top), exists), 1e-37)',
  ),
}


class Frame(dict):
  """Stands for the data frame of prompts: `eval_i` is the reward of a prompt's i-th rollout."""

  def __init__(self, reward_PxG):
    super().__init__({f'eval_{i}': x for i, x in enumerate(np.transpose(reward_PxG))})
    self.columns = types.SimpleNamespace(tolist=lambda: list(self))

  def __len__(self):
    return len(self['eval_0'])

  def __getitem__(self, key):
    if not isinstance(key, list):
      return super().__getitem__(key)
    return types.SimpleNamespace(to_numpy=lambda: np.stack([self[k] for k in key], 1))


def values(read, x):
  """V* of each row, of the existing rows of its group: a frame for each group, as they differ in number."""
  process = lib.method(read(VALUE), 'RLHFDataset', '_process_values', np=np, print=lambda *_: None)
  out = np.zeros(len(x.uid))
  for group in np.unique(x.uid):
    rows = x.uid == group
    dataset = types.SimpleNamespace(
      dataframe=Frame(x.reward.numpy()[None, rows]), beta1=BETA1, num_gen_to_use=rows.sum()
    )
    process(dataset)
    out[rows] = dataset.dataframe['v_star'][0]
  return out


def ours(data):
  """The gradient and the loss, Σ A² / B + (x − x_ref)·g at the middle of x and x_ref: it is quadratic in the log-probs."""
  change = data['logp'] - data['reference']
  middle = lib.gradient(SETTINGS, data | dict(logp=data['reference'] + change / 2))['gradient']
  reward_PxG, length_PxG = (data[k].reshape(-1, lib.G) for k in ('reward', 'length'))
  a_PxG = advantage.log_mean_exp(reward_PxG, length_PxG, temperature=BETA1) * (1 + BETA1)
  loss = (np.square(a_PxG)).sum() / (length_PxG > 0).sum()
  loss += 2 * BETA2 * (1 + BETA1) * (change * middle).sum()
  return lib.gradient(SETTINGS, data) | dict(loss=loss)


def official(torch, read, data):
  x = lib.tensors(torch, data)
  loss = lib.functions(read(LOSS), ('compute_policy_loss',), torch=torch).compute_policy_loss
  last_BxT = x.mask * (x.mask.cumsum(1) == x.mask.sum(1, keepdim=True))
  value = loss(
    attention_mask=x.mask,
    ref_log_probs=x.reference,
    log_probs=x.logp,
    response_length=x.mask.shape[1],
    token_level_rewards=last_BxT * x.reward[:, None],
    v_star=torch.tensor(values(read, x)),
    beta2=BETA2,
  )
  return lib.outputs(x, value, 1 / (2 * BETA2 * (1 + BETA1)))


lib.main(__name__)

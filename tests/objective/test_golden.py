"""Values and gradients of TRL, stored by make_golden.py, and verl's formulas in numpy."""

from __future__ import annotations

import json
import pathlib

import jax
import numpy as np
import pytest
from objective_table import settings

from jaxrl_llm import objective
from jaxrl_llm.types import Batch, Prompts, Rollout

GOLDEN = json.loads(pathlib.Path(__file__).with_name('golden.json').read_text())
DATA = {k: np.array(v) for k, v in GOLDEN['data'].items()}
B, T = DATA['logp'].shape
G = 4
MASK = (np.arange(T)[None] < DATA['length'][:, None]).astype(float)
NORMALIZED = dict(fn='group_normalized', eps=1e-4)

# TRL's name → ours. TRL multiplies rows or tokens of ratio 0 into the loss; here they are not kept.
CASES = {
  'grpo': {},
  'dapo': dict(trust_region=dict(fn='clip', low=0.2, high=0.28), aggregation='token_mean'),
  'bnpo': dict(aggregation='token_mean'),
  'dr_grpo': dict(aggregation='fixed'),
  'delta': dict(trust_region=dict(fn='dual_clip', most=1.25)),
  'cispo': dict(trust_region=dict(fn='cap', most=1.2), aggregation='token_mean'),
  'sapo': dict(trust_region='sigmoid'),
  'vespo': dict(ratio='product', trust_region='gamma', aggregation='token_mean'),
  'gspo': dict(ratio='sequence', trust_region=dict(fn='clip', low=0.03, high=0.04)),
  'luspo': dict(ratio='sequence', aggregation='sequence_sum'),
  'gmpo': dict(trust_region=dict(fn='geometric', low=0.3, high=0.3)),
  'k3': dict(kl=dict(fn='k3', coef=0.1)),
  'k3_corrected': dict(kl=dict(fn='ratio_k3', coef=0.1)),
  'token_truncate': dict(importance_correction=dict(fn='token_truncate', high=1.2)),
  'token_mask': dict(importance_correction=dict(fn='token_mask', low=0.8, high=1.2)),
  'sequence_truncate': dict(importance_correction=dict(fn='sequence_truncate', high=1.2)),
  'sequence_mask': dict(importance_correction=dict(fn='sequence_mask', high=1.5)),
  'opsm': dict(importance_correction=dict(fn='divergent_negatives', delta=0.01)),
  'forking': dict(token_weighting=dict(fn='forking', share=0.4), aggregation='token_mean'),
}


@pytest.fixture(autouse=True)
def float64():
  with jax.enable_x64(True):
    yield


def run(**choices):
  """Coefficients and sums of a method on the stored tensors."""
  method = objective.method(settings(**(dict(advantage=NORMALIZED) | choices)))
  rollout = Rollout(
    np.zeros((B, T), np.int32),
    DATA['behavior'] if method.needs_old else DATA['old'],
    DATA['length'],
    np.ones(B, np.int8),
    np.zeros((B, T), np.int32),
    np.ones(B),
    np.zeros((B, 0)),
  )
  P = B // G
  prompts = Prompts(
    np.zeros((P, 2), np.int32), np.full(P, 2, np.int32), *[np.arange(P)] * 2, np.zeros(P)
  )
  batch = Batch(prompts, rollout, DATA['reward'], (DATA['reward'] > 0.5).astype(float))
  target = objective.targets(method, batch, G).with_arrays(
    old_BxT=DATA['old'] if method.needs_old else None,
    reference_BxT=DATA['reference'] if method.needs_reference else None,
  )
  return *objective.coefficients(method, target, DATA['logp'], DATA['entropy']), target


def test_every_stored_case_is_compared():
  assert set(CASES) == set(GOLDEN['cases'])


@pytest.mark.parametrize('name', CASES)
def test_loss_and_gradient_are_those_of_trl(name):
  c, sums, _ = run(**CASES[name])
  stored = GOLDEN['cases'][name]
  np.testing.assert_allclose(-c, stored['gradient'], atol=1e-8)
  value = float(sums['pg_loss']) + 0.1 * float(sums['kl_loss'])
  np.testing.assert_allclose(value, stored['loss'], atol=1e-7)  # TRL's SAPO has float32 in it
  plain = GOLDEN['cases']['bnpo' if CASES[name].get('aggregation') == 'token_mean' else 'grpo']
  if name not in ('grpo', 'bnpo'):
    moved = np.abs(np.array(stored['gradient']) - plain['gradient']).max()
    assert moved > 1e-4, 'the case shows nothing'


# verl's formulas: https://github.com/volcengine/verl, core_algos.py, written out anew.


def verl_mean(loss, mode):
  if mode == 'token-mean':
    return (loss * MASK).sum() / MASK.sum()
  rows = (loss * MASK).sum(1)
  return {
    'seq-mean-token-sum': rows.mean(),
    'seq-mean-token-mean': (rows / MASK.sum(1)).mean(),
    'seq-mean-token-sum-norm': rows.sum() / (B * T),
  }[mode]


def verl_advantage(kind):
  group = DATA['reward'].reshape(-1, G)
  centered = group - group.mean(1, keepdims=True)
  if kind == 'grpo':
    centered = centered / (group.std(1, ddof=1, keepdims=True) + 1e-6)
  if kind == 'rloo':
    centered = centered * G / (G - 1)
  if kind == 'opo':
    length = DATA['length'].reshape(-1, G)
    centered = group - (group * length).sum(1, keepdims=True) / length.sum(1, keepdims=True)
  a = centered.reshape(-1, 1) * MASK
  if kind == 'reinforce_plus_plus_baseline':
    tokens = a[MASK > 0]
    a = (a - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8) * MASK
  return a


def verl_vanilla(a, low=0.2, high=0.2, dual=3.0):
  r = np.exp(np.clip(DATA['logp'] - DATA['old'], -20, 20))
  worse = np.maximum(-a * r, -a * np.clip(r, 1 - low, 1 + high))
  return np.where(a < 0, np.minimum(-a * dual, worse), worse)


def verl_gspo(a, low=0.03, high=0.04):
  gap = ((DATA['logp'] - DATA['old']) * MASK).sum(1) / MASK.sum(1)
  r = np.exp(np.minimum(gap, 10))[:, None]
  return np.maximum(-a * r, -a * np.clip(r, 1 - low, 1 + high))


def verl_cispo(a, low=0.1, high=0.2):
  r = np.exp(DATA['logp'] - DATA['old'])
  return -np.clip(r, 1 - low, 1 + high) * a * DATA['logp']


@pytest.mark.parametrize(
  'mode, aggregate',
  [
    ('token-mean', 'token_mean'),
    ('seq-mean-token-sum', 'sequence_sum'),
    ('seq-mean-token-mean', 'sequence_mean'),
    ('seq-mean-token-sum-norm', 'fixed'),
  ],
)
@pytest.mark.parametrize(
  'loss, choices',
  [
    (verl_vanilla, dict(trust_region='dual_clip')),
    (verl_gspo, dict(ratio='sequence', trust_region=dict(fn='clip', low=0.03, high=0.04))),
    (verl_cispo, dict(trust_region=dict(fn='cap_band', low=0.1, high=0.2))),
  ],
)
def test_losses_and_denominators_are_those_of_verl(mode, aggregate, loss, choices):
  if loss is verl_gspo and not aggregate.startswith('sequence'):
    pytest.skip('verl itself aggregates GSPO by sequences alone')
  _, sums, _ = run(advantage=dict(fn='group_normalized'), aggregation=aggregate, **choices)
  want = verl_mean(loss(verl_advantage('grpo')), mode)
  np.testing.assert_allclose(float(sums['pg_loss']), want, atol=1e-8)


@pytest.mark.parametrize(
  'kind, name',
  [
    ('grpo', 'group_normalized'),
    ('rloo', 'leave_one_out'),
    ('opo', 'length_weighted'),
    ('reinforce_plus_plus_baseline', 'group_whitened'),
  ],
)
def test_advantages_are_those_of_verl(kind, name):
  _, _, target = run(advantage=name)
  np.testing.assert_allclose(target.advantage_BxT, verl_advantage(kind), atol=1e-8)


@pytest.mark.parametrize(
  'name, value',
  [
    ('k1', lambda x, r: x - r),
    ('k2', lambda x, r: 0.5 * (x - r) ** 2),
    ('k3', lambda x, r: np.clip(np.exp(np.clip(r - x, -20, 20)) - (r - x) - 1, -10, 10)),
  ],
)
def test_kl_values_are_those_of_verl(name, value):
  _, sums, _ = run(kl=name, aggregation='token_mean')
  want = verl_mean(value(DATA['logp'], DATA['reference']), 'token-mean')
  np.testing.assert_allclose(float(sums['kl_loss']), want, atol=1e-8)

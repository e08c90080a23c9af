"""Every method of the table: its coefficients are the gradient of its written loss, whatever the batch looks like."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from objective_table import (
  METHODS,
  ORDERED,
  B,
  G,
  P,
  T,
  batch,
  data,
  known,
  leverage,
  policies,
  settings,
  signal,
)

from jaxrl_llm import objective
from jaxrl_llm.config import stages
from jaxrl_llm.objective import (
  aggregation,
  importance_correction,
  method_spec,
  ratio,
  trust_region,
)
from jaxrl_llm.types import UserError

SLICED = [
  n
  for n, row in METHODS.items()
  if not objective.method(settings(**row.settings)).needs_rows or n == 'vcpo'
]


@pytest.fixture(autouse=True)
def float64():
  with jax.enable_x64(True):
    yield


def target_of(method, d):
  target = objective.targets(
    method, batch(d), G, signal(method, d), leverage(d), policies=policies(method, d)
  )
  return target.with_arrays(**known(method, d))


def coefficients(name, d):
  method = objective.method(settings(**METHODS[name].settings))
  c, sums = objective.coefficients(
    method, target_of(method, d), d.x, d.entropy, d.confidence, d.collision
  )
  return np.asarray(c), sums


@pytest.mark.parametrize('name', METHODS)
@pytest.mark.parametrize('seed', [0, 1, 4])  # 1 moves BAPO's bounds, 4 trips DRPO's hinge
def test_coefficients_are_the_gradient_of_the_written_loss(name, seed):
  d = data(seed)
  c, sums = coefficients(name, d)
  gradient = jax.grad(lambda x: METHODS[name].loss(x, d.x, d))(jnp.asarray(d.x))
  np.testing.assert_allclose(c, -gradient * d.mask, rtol=1e-9, atol=1e-10)
  assert np.abs(c).max() > 1e-3 and all(np.isfinite(float(v)) for v in sums.values())
  if METHODS[name].value:
    kl = objective.method(settings(**METHODS[name].settings)).token_stages.kl
    coef = (kl.func.__kwdefaults__ or {}) | kl.keywords if kl else {}
    value = float(sums['pg_loss']) + coef.get('coef', 0.0) * float(sums['kl_loss'])
    np.testing.assert_allclose(value, METHODS[name].loss(d.x, d.x, d), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize('name', METHODS)
def test_three_coordinates_agree_with_finite_differences(name):
  d, step = data(2), 1e-6
  c, _ = coefficients(name, d)
  places = np.argwhere(d.mask > 0)
  for b, t in np.random.default_rng(0).permutation(places)[:3]:
    nudge = np.zeros((B, T))
    nudge[b, t] = step
    loss = lambda x: float(METHODS[name].loss(jnp.asarray(x), d.x, d))  # noqa: B023, E731
    slope = (loss(d.x + nudge) - loss(d.x - nudge)) / (2 * step)
    np.testing.assert_allclose(-slope, c[b, t], rtol=1e-5, atol=1e-8)


def names(module):
  return sorted(stages.choices(module))


@pytest.mark.parametrize('region', [n for n in names(trust_region) if n != 'listwise'])
def test_on_policy_every_choice_is_reinforce(region):
  """Every ratio with every trust region, denominator and correction: where no policy has moved, c = w·A."""
  d, seen = data(drift=0, mismatch=0), 0
  advantage = dict(advantage='raw') if region == 'taper' else {}
  for log_ratio in names(ratio):
    for denominator in names(aggregation):
      try:
        choice = settings(
          ratio=log_ratio, trust_region=region, aggregation=denominator, **advantage
        )
        method = objective.method(choice)
      except UserError as refused:  # by a contract: tests/objective/test_contracts.py
        assert 'does not go with' in str(refused)
        continue
      seen += 1
      target = target_of(method, d)
      c, sums = objective.coefficients(method, target, d.x, d.entropy, d.confidence, d.collision)
      want = target.weight_BxT * target.advantage_BxT
      np.testing.assert_allclose(c, want, rtol=1e-12, err_msg=f'{log_ratio} {denominator}')
      assert float(sums['clipped']) == float(sums['rejected']) == 0
      assert np.abs(c).max() > 1e-3
  assert seen >= 2 or region == 'geometric'


@pytest.mark.parametrize('name', names(importance_correction))
def test_on_policy_every_correction_is_one(name):
  d = data(drift=0, mismatch=0)
  method = objective.method(settings(importance_correction=name))
  target = target_of(method, d)
  c, _ = objective.coefficients(method, target, d.x, d.entropy, d.confidence, d.collision)
  np.testing.assert_allclose(c, target.weight_BxT * target.advantage_BxT, rtol=1e-12)


@pytest.mark.parametrize('name', [n for n, row in METHODS.items() if row.on_policy])
def test_on_policy_every_method_is_reinforce(name):
  d = data(drift=0, mismatch=0)
  method = objective.method(settings(**METHODS[name].settings))
  target = target_of(method, d)
  c, _ = objective.coefficients(method, target, d.x, d.entropy, d.confidence, d.collision)
  np.testing.assert_allclose(c, target.weight_BxT * target.advantage_BxT, rtol=1e-12, atol=1e-15)


def change(d, **new):
  return type(d)(**(vars(d) | new))


ARRAYS = (
  *('x', 'old', 'behavior', 'reference', 'entropy', 'confidence', 'collision', 'values'),
  'process',
  'deviation',
)
TOKENS = (*ARRAYS, 'mask', 'age', 'moved', 'tokens')


@pytest.mark.parametrize('name', METHODS)
def test_padding_columns_and_what_stands_in_them_change_nothing(name):
  d = data()
  c, _ = coefficients(name, d)
  for poison in (-np.inf, 200.0, np.nan):
    bad = change(d, **{k: np.where(d.mask > 0, getattr(d, k), poison) for k in ARRAYS})
    again, sums = coefficients(name, bad)
    np.testing.assert_array_equal(c, again)
    assert all(np.isfinite(float(v)) for v in sums.values())
  chosen = METHODS[name].settings
  if chosen.get('aggregation') == 'fixed' or 'buffer_tokens' in chosen.get('reward_shaping', ()):
    return  # whose denominator, or whose cap, is the number of columns
  pad = lambda x: np.pad(x, ((0, 0), (0, 3)))  # noqa: E731
  wide, _ = coefficients(name, change(d, **{k: pad(getattr(d, k)) for k in TOKENS}))
  np.testing.assert_allclose(wide[:, :T], c, rtol=1e-12, atol=1e-15)
  assert (wide[:, T:] == 0).all()


def permuted(d, order):
  rows = ('reward', 'correct', 'length', 'norm', 'parts', *TOKENS)
  return change(d, **{k: getattr(d, k)[order] for k in rows})


@pytest.mark.parametrize('name', [n for n in METHODS if n not in ORDERED])
def test_order_of_groups_and_of_rows_in_a_group_does_not_matter(name):
  d, r = data(), np.random.default_rng(1)
  order = np.concatenate([p * G + r.permutation(G) for p in r.permutation(P)])
  c, _ = coefficients(name, d)
  mixed_up, _ = coefficients(name, permuted(d, order))
  np.testing.assert_allclose(mixed_up, c[order], rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize('name', SLICED)
def test_slices_of_any_size_give_the_same_coefficients_and_sums(name):
  """What a step relies on when it works out coefficients slice by slice."""
  d = data()
  method = objective.method(settings(**METHODS[name].settings))
  target = target_of(method, d)
  whole, sums = objective.coefficients(method, target, d.x, d.entropy, d.confidence, d.collision)
  for size in (1, 2, 8):
    parts = []
    for start in range(0, B, size):
      rows = slice(start, start + size)
      piece = jax.tree.map(lambda x: x[rows], target)  # noqa: B023
      more = d.entropy[rows], d.confidence[rows], d.collision[rows]
      parts.append(objective.coefficients(method, piece, d.x[rows], *more))
    np.testing.assert_allclose(np.concatenate([c for c, _ in parts]), whole, rtol=1e-12, atol=1e-16)
    for key, value in sums.items():
      np.testing.assert_allclose(
        sum(float(s[key]) for _, s in parts), float(value), rtol=1e-9, atol=1e-12
      )


@pytest.mark.parametrize('name', [n for n in METHODS if n not in SLICED])
def test_a_method_of_whole_batches_says_so(name):
  """Worked out slice by slice, its coefficients would be others."""
  d = data()
  method = objective.method(settings(**METHODS[name].settings))
  target = target_of(method, d)
  whole, _ = objective.coefficients(method, target, d.x, d.entropy, d.confidence, d.collision)
  parts = []
  for start in range(0, B, 2):
    rows = slice(start, start + 2)
    piece = jax.tree.map(lambda x: x[rows], target)  # noqa: B023
    more = d.entropy[rows], d.confidence[rows], d.collision[rows]
    parts.append(objective.coefficients(method, piece, d.x[rows], *more)[0])
  assert np.abs(np.concatenate(parts) - whole).max() > 1e-6


@pytest.mark.parametrize('name', METHODS)
def test_log_ratios_of_200_and_empty_rows_are_finite(name):
  d = data()
  length = d.length.copy()
  length[:3] = 0
  length[2 * G : 3 * G] = 0
  far = np.where(np.arange(B)[:, None] % 2, 200.0, -200.0)
  mask = (np.arange(T)[None] < length[:, None]).astype(float)
  for changed in (
    dict(behavior=d.x + far),
    dict(old=d.x + far),
    dict(reference=d.x + far),
    dict(x=d.x - 200),
  ):
    c, sums = coefficients(name, change(d, length=length, mask=mask, **changed))
    assert np.isfinite(c).all() and all(np.isfinite(float(v)) for v in sums.values())
    assert (c[:3] == 0).all() and (c[2 * G : 3 * G] == 0).all()


def test_an_empty_batch_is_finite():
  d = data()
  empty = change(d, length=0 * d.length, mask=0 * d.mask)
  for name in METHODS:
    c, sums = coefficients(name, empty)
    assert (c == 0).all() and all(np.isfinite(float(v)) for v in sums.values()), name


# Rows of the table are of one turn; these credits are enumerated in test_credit.py.
OF_TURNS = {'gigpo', 'turn_grouped', 'turn_reward_whitened', 'turn_whitened'}


def test_every_choice_of_every_stage_is_in_a_method_of_the_table():
  chosen = {}
  for row in METHODS.values():
    c = settings(**row.settings)
    for stage in (
      'reward_kl',
      'reward_shaping',
      'advantage',
      'credit_assignment',
      'auxiliary_model',
      'importance_correction',
      'old_policy',
      'ratio',
      'trust_region',
      'token_weighting',
      'aggregation',
      'kl',
      'lr_scale',
    ):
      chosen.setdefault(stage, set()).add(c[stage].fn)
  for stage, used in chosen.items():
    module = inspect.getmodule(stages.pick(method_spec.STAGES[stage], settings()[stage]).func)
    assert set(names(module)) - OF_TURNS == used, stage


def test_a_mismatch_is_never_corrected_twice():
  with pytest.raises(UserError, match='counts the mismatch'):
    objective.method(settings(ratio='direct', importance_correction='token_truncate'))


@pytest.mark.parametrize(
  'choices, message',
  [
    (dict(advantage=dict(fn='pass_at_k', k=5)), 'advantage.k=5 must be from 1 to the 4 rollouts'),
    (
      dict(importance_correction=dict(fn='token_divergence', estimator='k1')),
      "estimator='k1' is unknown; choose one of: k2, k3",
    ),
    (
      dict(importance_correction=dict(fn='sequence_divergence', reduction='min')),
      "reduction='min' is unknown; choose one of: mean, sum, max",
    ),
  ],
)
def test_settings_without_a_formula_are_refused(choices, message):
  d, method = data(), objective.method(settings(**choices))
  with pytest.raises(UserError, match=message):
    objective.coefficients(method, target_of(method, d), d.x)

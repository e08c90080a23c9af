"""The schedule, what weight decay touches, and optimizers by name."""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm.config import loading as configs
from jaxrl_llm.config import schema
from jaxrl_llm.learner.optimizer import check, make_optimizer
from jaxrl_llm.types import UserError


def settings(**changes):
  c = configs.default().optimizer
  c.update(changes)
  return c


@pytest.mark.parametrize(
  'changes, rates',
  [
    (dict(decay='constant'), [1, 1, 1, 1, 1]),
    (dict(decay='linear'), [1, 0.75, 0.5, 0.25, 0]),
    (dict(decay='cosine'), [1, 0.5 + 0.5**1.5, 0.5, 0.5 - 0.5**1.5, 0]),
    (dict(decay='linear', warmup_steps=2), [0.5, 1, 1, 0.5, 0]),
  ],
)
def test_schedules(changes, rates):
  _, schedule = make_optimizer(settings(learning_rate=1.0, **changes), 4)
  np.testing.assert_allclose([schedule(i) for i in range(5)], rates, atol=1e-6)


def test_an_unknown_decay_lists_the_known_ones():
  with pytest.raises(UserError, match='constant, cosine, linear'):
    make_optimizer(settings(decay='exponential'), 4)


def test_the_gradient_is_clipped_by_its_global_norm_and_only_matrices_decay():
  optimizer, _ = make_optimizer(
    settings(learning_rate=0.1, weight_decay=0.5, clip_norm=1.0, b1=0.0, b2=0.0, eps=1e3), 4
  )
  params = dict(kernel=jnp.ones((2, 2)), scale=jnp.ones(2), bias=jnp.ones((3, 2)))  # of experts
  grads = dict(kernel=jnp.full((2, 2), 30.0), scale=jnp.full(2, 40.0), bias=jnp.full((3, 2), 20.0))
  updates, _ = optimizer.update(grads, optimizer.init(params), params)
  norm = float(optax.tree.norm(grads))
  # With eps far above the gradient, Adam's step is gradient / eps: clipping shows in its size.
  np.testing.assert_allclose(updates['scale'], -0.1 * 40 / norm / 1e3, rtol=1e-2)
  np.testing.assert_allclose(updates['bias'], -0.1 * 20 / norm / 1e3, rtol=1e-2)
  np.testing.assert_allclose(updates['kernel'], -0.1 * (30 / norm / 1e3 + 0.5), rtol=1e-2)


def steps_of(config, count=2):
  """The first updates of a layer's matrix, an embedding and a vector."""
  optimizer, _ = make_optimizer(config, 4)
  params = dict(
    layers=[dict(kernel=jnp.ones((4, 6)) * 2, scale=jnp.ones(3))], embed=jnp.ones((5, 4)) * 2
  )
  grads = jax.tree.map(lambda x: jnp.arange(1.0, x.size + 1).reshape(x.shape) / 100, params)
  state = optimizer.init(params)
  for _ in range(count):
    updates, state = optimizer.update(grads, state, params)
  return params, grads, updates


@pytest.mark.parametrize('fn', ['adafactor', 'lion', 'muon'])
def test_optimizers_by_name_are_those_of_optax(fn):
  """Weight decay is that of the config, and of matrices only."""
  config = settings(fn=fn, learning_rate=0.1, weight_decay=0.5, clip_norm=1e9)
  check(schema.OptimizerConfig(**config.to_dict()))
  params, grads, updates = steps_of(config)
  reference = dict(
    adafactor=lambda **k: optax.adafactor(0.1, weight_decay_rate=0.5, weight_decay_mask=k['mask']),
    lion=lambda **k: optax.lion(0.1, weight_decay=0.5, **k),
    muon=lambda **k: optax.contrib.muon(
      0.1,
      weight_decay=0.5,
      weight_decay_mask=k['mask'],
      muon_weight_dimension_numbers=lambda p: dict(
        layers=[dict(kernel=optax.contrib.MuonDimensionNumbers(), scale=None)], embed=None
      ),
    ),
  )[fn](mask=dict(layers=[dict(kernel=True, scale=False)], embed=True))
  state = reference.init(params)
  for _ in range(2):
    wanted, state = reference.update(grads, state, params)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), updates, wanted)


def test_muon_orthogonalizes_the_matrices_of_layers_alone():
  _, _, updates = steps_of(settings(fn='muon', learning_rate=1.0))
  singular = np.linalg.svd(np.asarray(updates['layers'][0]['kernel']), compute_uv=False)
  # The gradient has rank 2: of the four singular values two are near 1 and the others 0, up to the scale of the shape.
  assert singular[1] > 0.5 * singular[0] and singular[2] < 1e-2 * singular[0]
  embed = np.asarray(updates['embed'])
  np.testing.assert_allclose(embed, embed.mean(), rtol=1e-3)  # Adam's first steps are of equal size


OWN = """
import optax

def signs(learning_rate, weight_decay):
  return optax.sign_sgd(lambda step: learning_rate(step) * (1 + weight_decay))

def wrong(learning_rate):
  return learning_rate(0)

def fails(learning_rate):
  return optax.nothing(learning_rate)
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
  (tmp_path / 'own_optimizer.py').write_text(OWN)
  monkeypatch.syspath_prepend(str(tmp_path))
  monkeypatch.delitem(sys.modules, 'own_optimizer', raising=False)


def test_an_optimizer_of_ones_own_gets_the_schedule_and_what_it_names(own):
  config = settings(fn='own_optimizer:signs', learning_rate=0.1, weight_decay=0.5, decay='linear')
  _, _, updates = steps_of(config, 1)
  np.testing.assert_allclose(updates['embed'], -0.15, rtol=1e-6)
  config = settings(fn='optax:sgd', learning_rate=0.1, clip_norm=1e9)  # any of optax
  _, grads, updates = steps_of(config, 1)
  np.testing.assert_allclose(updates['embed'], -0.1 * grads['embed'], rtol=1e-6)


@pytest.mark.parametrize(
  'changes, why',
  [
    (dict(fn='adamv'), "fn='adamv' is unknown; choose one of: adafactor, adamw, lion, muon, or"),
    (dict(fn='own_optimizer:absent'), "'own_optimizer' has no function 'absent'"),
    (dict(fn='own_optimizer:wrong'), 'returns float, which has no init'),
    (dict(fn='own_optimizer:fails'), r'AttributeError: .*own_optimizer.py:11: return optax.noth'),
    (dict(fn='lion', b2=0.5), "b2=0.5 is a setting of 'adamw', and config.optimizer.fn='lion'"),
    (dict(decay='step'), 'constant, cosine, linear'),
  ],
)
def test_bad_optimizers_are_one_sentence(changes, why, own):
  with pytest.raises(UserError, match=why):
    check(schema.OptimizerConfig(**settings(**changes).to_dict()))


def test_an_unknown_field_of_the_optimizer_is_no_setting_of_its_function():
  with pytest.raises(
    UserError, match='learning_rte is unknown; did you mean --config.optimizer.learning_rate'
  ):
    configs.load('', ['--config.optimizer.fn=lion', '--config.optimizer.learning_rte=1'])
  kept = configs.load('', ['--config.optimizer.fn=muon', '--config.optimizer.learning_rate=0.5'])
  assert kept.optimizer.fn == 'muon' and kept.optimizer.learning_rate == 0.5
  assert kept.optimizer.clip_norm == configs.default().optimizer.clip_norm

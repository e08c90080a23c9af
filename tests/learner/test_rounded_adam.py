"""Moments in bfloat16: the rounding is unbiased by enumeration, keyed by seed, step and path, and follows float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm.checkpointing import checkpoint, config_changes
from jaxrl_llm.config import loading as configs
from jaxrl_llm.config import schema, validation
from jaxrl_llm.distributed import sharding
from jaxrl_llm.learner import compile as programs
from jaxrl_llm.learner import rounded_adam
from jaxrl_llm.learner import state as train_state
from jaxrl_llm.learner.optimizer import check, make_optimizer
from jaxrl_llm.learner.spec_from_config import make_spec
from jaxrl_llm.models import decoder
from jaxrl_llm.runner import validate
from jaxrl_llm.types import UserError
from tests.learner.test_auxiliary_model import MODEL, G, L, P, T, batch

B1, B2, EPS = 0.9, 0.999, 1e-8


@pytest.mark.parametrize(
  'x',
  [
    *(1.0, -1.0, 0.0, 1.003, -1.003, 3.1e-5, 1.9999999, -0.49999997),
    *(2.0**-126, 1.0001 * 2.0**-126, 123456.789),
  ],
)
def test_the_mean_over_all_random_numbers_is_the_number_itself(x):
  """Exact: every one of the 65,536 random halves once, summed in float64."""
  x = np.float32(x)
  random = jnp.arange(2**16, dtype=jnp.uint32)
  rounded = np.asarray(rounded_adam.round_stochastically(jnp.full(2**16, x), random), np.float64)
  assert rounded.mean() == np.float64(x)
  assert len(set(rounded)) <= 2 and np.ptp(rounded) <= abs(x) * 2.0**-7  # neighbors in bfloat16


def test_only_the_lower_half_of_the_random_number_counts():
  x = jnp.full(4, 1.003)
  words = jnp.asarray([5, 5 + 2**16, 2**16 - 1, 2**32 - 1], jnp.uint32)
  rounded = rounded_adam.round_stochastically(x, words)
  assert rounded[0] == rounded[1] < rounded[2] == rounded[3]


@pytest.mark.parametrize('x', [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_so(x):
  payload = jnp.asarray([0xFFFFFFFF], jnp.uint32).view(jnp.float32)
  values = jnp.concatenate([jnp.full(3, x), payload])
  rounded = rounded_adam.round_stochastically(values, jnp.full(4, 0xFFFF, jnp.uint32))
  np.testing.assert_array_equal(np.asarray(rounded[:3], np.float32), np.full(3, x, np.float32))
  assert np.isnan(np.asarray(rounded[3], np.float32))


def params_of(shape=(64, 64)):
  return dict(layers=[dict(kernel=jnp.zeros(shape), scale=jnp.zeros(3))])


def moment_after(gradient_S):
  """The second moments of 4,096 weights that all have these gradients, one a step."""
  optimizer, params = rounded_adam.scale_by_adam(B1, B2, EPS, seed=0), jnp.zeros(4096)
  take = lambda state, g: (optimizer.update(params + g, state)[1], None)  # noqa: E731
  state, _ = jax.jit(lambda s: jax.lax.scan(take, s, jnp.asarray(gradient_S)))(
    optimizer.init(params)
  )
  return np.asarray(state.nu, np.float64)


def test_the_first_step_is_that_of_optax():
  """Nothing has been rounded before it."""
  gradients = jax.tree.map(
    lambda x: jnp.linspace(-3, 2, x.size).reshape(x.shape), params_of((5, 7))
  )
  ours, theirs = rounded_adam.scale_by_adam(B1, B2, EPS, 0), optax.scale_by_adam(B1, B2, EPS)
  step, _ = ours.update(gradients, ours.init(gradients))
  wanted, _ = theirs.update(gradients, theirs.init(gradients))
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), step, wanted)


def test_the_second_moment_falls_where_rounding_to_the_nearest_keeps_it():
  """200 large gradients, then 2,000 small ones: the mean over 4,096 weights is the float32 moment, within its error."""
  gradients = [1.0] * 200 + [0.01] * 2000
  bfloat16 = jnp.dtype(jnp.bfloat16).type
  exact, nearest, peak = np.float32(0), bfloat16(0), bfloat16(0)
  for g in gradients:
    exact = np.float32(B2) * exact + np.float32(1 - B2) * np.float32(g * g)
    nearest = bfloat16(np.float32(B2) * np.float32(nearest) + np.float32((1 - B2) * g * g))
    peak = nearest if g == 1.0 else peak
  last = moment_after(gradients)
  assert nearest == peak  # it has not moved in 2,000 steps
  error = last.std() / np.sqrt(last.size)
  assert abs(last.mean() - exact) < 5 * error and error < 0.01 * exact
  assert exact < 0.2 * float(peak)


def test_seed_step_and_path_key_the_rounding():
  gradients = dict(a=jnp.full((64, 64), 0.1), b=jnp.full((64, 64), 0.1))

  def states(seed):
    optimizer = rounded_adam.scale_by_adam(B1, B2, EPS, seed)
    state, found = optimizer.init(gradients), []
    for _ in range(2):
      _, state = jax.jit(optimizer.update)(gradients, state._replace(mu=gradients, nu=gradients))
      found.append(jax.tree.map(lambda x: np.asarray(x, np.float32), state))
    return found

  first, second = states(0)
  again, other = states(0)[0], states(1)[0]
  np.testing.assert_array_equal(first.nu['a'], again.nu['a'])
  for x in (first.nu['b'], first.mu['a'], second.nu['a'], other.nu['a']):
    up, reference = x > x.min(), first.nu['a'] > first.nu['a'].min()
    assert 0.2 < np.mean(up) < 0.9 and np.ptp(x) > 0
    assert abs(np.corrcoef(up.ravel(), reference.ravel())[0, 1]) < 0.06  # 4 / √4096


def test_eight_devices_round_as_one():
  kernel = jax.random.normal(jax.random.key(1), (64, 96))
  gradients = dict(layers=[dict(q=dict(kernel=kernel))])
  optimizer = rounded_adam.scale_by_adam(B1, B2, EPS, 3)

  def states(mesh):
    put = jax.device_put(gradients, sharding.layout(gradients, mesh))
    state = jax.jit(optimizer.init)(put)
    for _ in range(3):
      _, state = jax.jit(optimizer.update)(put, state)
    assert len(mesh.devices.flat) == 1 or not jax.tree.leaves(put)[0].is_fully_replicated
    return jax.tree.map(lambda x: np.asarray(x, np.float32), (state.mu, state.nu))

  one = states(sharding.make_mesh({}, jax.devices()[:1]))
  eight = states(sharding.make_mesh(dict(fsdp=4, tensor=2), jax.devices()[:8]))
  jax.tree.map(np.testing.assert_array_equal, one, eight)


def settings(**changes):
  c = configs.default().optimizer
  c.update(changes)
  return schema.OptimizerConfig(**c.to_dict())


def test_decay_and_schedule_are_those_of_the_float32_optimizer():
  params = jax.tree.map(lambda x: x + 2, params_of((5, 7)))
  gradients = jax.tree.map(lambda x: x / x.size, params)
  both = []
  for dtype in ('float32', 'bfloat16'):
    optimizer, _ = make_optimizer(
      settings(weight_decay=0.5, learning_rate=0.1, moments_dtype=dtype), 4
    )
    both.append(optimizer.update(gradients, optimizer.init(params), params))
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), both[0][0], both[1][0])
  sizes = [sum(x.nbytes for x in jax.tree.leaves(state) if x.ndim) for _, state in both]
  assert sizes[0] == 2 * sizes[1]


@pytest.mark.parametrize('fn', ['adafactor', 'lion', 'muon', 'optax:sgd'])
def test_moments_of_other_optimizers_are_refused(fn):
  with pytest.raises(UserError, match="moments_dtype='bfloat16' (is a setting of|changes nothing)"):
    check(settings(fn=fn, moments_dtype='bfloat16'))


def test_an_unknown_type_is_refused():
  config = configs.load('', ['--config.optimizer.moments_dtype=float16'])
  with pytest.raises(UserError, match="optimizer.moments_dtype='float16'.*float32.*bfloat16"):
    validation.check(config)


def step_of(name):
  """The spec of a config for a tiny model, with moments in bfloat16."""
  c = configs.load(name)
  c.prompts, c.rollouts, c.prompt_tokens, c.completion_tokens = P, G, L, T
  c.optimizer.update(decay='constant', learning_rate=1e-2, moments_dtype='bfloat16')
  validate.validate(c)
  return make_spec(c, MODEL, (3,), sharding.make_mesh(c.mesh, jax.devices()[:1]))


@pytest.mark.parametrize('name', ['ppo', 'lora'])
def test_a_restored_run_goes_on_bit_for_bit(name, tmp_path):
  """Bit for bit, with a critic and with an adapter."""
  spec = step_of(name)
  update = programs.compile_update(spec)
  state, _ = update(train_state.init_state(spec, decoder.init(MODEL, 0)), batch())
  checkpoint.save(str(tmp_path), 1, train_state.without_frozen(state), {}, keep=1)
  again, _ = checkpoint.restore(
    str(tmp_path), 1, train_state.without_frozen(train_state.abstract_state(spec))
  )
  again = train_state.with_frozen(spec, again, decoder.init(MODEL, 0))
  found = [jax.device_get(update(x, batch())[0]) for x in (state, again)]
  jax.tree.map(np.testing.assert_array_equal, *found)
  assert rounded(found[0].opt_state) and not rounded(found[0].params)
  if name == 'ppo':
    assert rounded(found[0].auxiliary_model.opt_state)


def rounded(tree):
  """Whether some moments have moved, all in bfloat16."""
  arrays = [x for x in jax.tree.leaves(tree) if x.ndim]
  return all(x.dtype == jnp.bfloat16 for x in arrays) and any(x.any() for x in arrays)


def test_a_run_keeps_the_type_of_its_moments():
  old, new = configs.default(), configs.default()
  old.optimizer.moments_dtype = 'bfloat16'
  with pytest.raises(UserError, match="moments_dtype: 'bfloat16' -> 'float32'.*another --workdir"):
    config_changes.check('runs/x', old.to_dict(), new.to_dict())

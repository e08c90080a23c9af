"""Length head: it learns, its predictions order the queue and change no token. Its formulas: official/lenvm.py."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
import tiny_job

from jaxrl_llm import step as steps
from jaxrl_llm.config import loading as configs
from jaxrl_llm.distributed import sharding
from jaxrl_llm.learner import empty_records
from jaxrl_llm.learner import state as train_state
from jaxrl_llm.learner.spec_from_config import make_spec
from jaxrl_llm.models import decoder
from jaxrl_llm.rollout import length_head
from jaxrl_llm.types import STOPPED, UNFINISHED, ModelConfig, Prompts, UserError

P, G, L, T, V = 8, 4, 4, 24, 12
MODEL = ModelConfig(
  vocab=V, width=16, layers=2, heads=2, kv_heads=1, head_dim=8, mlp=24, max_tokens=64
)
HEAD = dict(fn='discounted_return', learning_rate=1e-2, width=32)
STEPS = 60


def spec(devices=1, head=True, slots=0, order='longest_first'):
  """Rollouts that are nearly the same at each visit to a prompt, and weights that hardly move."""
  c = configs.default()
  c.prompts, c.rollouts, c.prompt_tokens, c.completion_tokens = P, G, L, T
  c.temperature, c.optimizer.learning_rate, c.rollout.slots = 0.3, 1e-9, slots
  c.mesh.data, c.mesh.fsdp = (2, 4) if devices == 8 else (1, 1)
  with c.ignore_type():
    c.rollout.queue_order = dict(fn=order)
    c.rollout.length_head = HEAD if head else dict(fn='none')
  return make_spec(c, MODEL, (3, 7), sharding.make_mesh(c.mesh, jax.devices()[:devices]))


def params():
  return jax.tree.map(lambda x: x * 2.0, decoder.init(MODEL, 0))


def make_prompts(born=0, expected_P=0.0):
  r = np.random.default_rng(0)
  index_P = np.arange(P, dtype=np.int32)
  tokens_PxL = r.integers(0, V, (P, L)).astype(np.int32)
  return Prompts(
    tokens_PxL, index_P % L + 1, index_P, np.full(P, born, np.int32),
    np.full(P, expected_P, np.float32),
  )  # fmt: skip


def train(spec, count):
  """The state after each of `count` steps, with the metrics and the rollout of each."""
  call, batch = steps.compile_step(spec), empty_records.empty_batch(spec)
  state, history = train_state.init_state(spec, params()), []
  for index in range(count):
    prompts = make_prompts(index)
    state, rollout, metrics = call(state, batch, prompts, None, None, np.int32(T))
    rollout = jax.tree.map(np.asarray, rollout)
    right_B = (np.arange(P * G) % 2).astype(np.float32)
    batch = batch._replace(prompts=prompts, rollout=rollout, reward_B=right_B, correct_B=right_B)
    history.append((jax.device_get(state.rollout_head), jax.device_get(metrics), rollout))
  return history


@pytest.fixture(scope='module')
def learned():
  return train(spec(), STEPS)


@functools.cache
def sampling(**changes):
  made = spec(**changes)
  return jax.jit(functools.partial(steps.generate, made))


def sample(state, prompts, **changes):
  rollout, metrics, _ = sampling(**changes)(state, prompts)
  return jax.tree.map(np.asarray, rollout), int(metrics['generate/rounds'])


def test_the_head_learns_lengths_that_follow_from_the_prompt(learned):
  _, metrics, _ = learned[-1]
  state, _, rollout = learned[-2]
  best = metrics['length_head/constant_error_tokens']
  assert metrics['length_head/error_tokens'] < 0.5 * best
  tokens_B = spec().rollout.length_head.remaining_tokens(state, rollout.feature_BxF)
  tokens_P, length_P = (np.asarray(x).reshape(P, G).mean(1) for x in (tokens_B, rollout.length_B))
  assert np.corrcoef(tokens_P, length_P)[0, 1] > 0.9


def test_errors_are_those_before_the_step_beside_the_best_constant(learned):
  """No constant from 0 to T, in tenths of a token, is better than the one that is logged."""
  state, _, rollout = learned[4]
  _, metrics, _ = learned[5]
  tokens_B = spec().rollout.length_head.remaining_tokens(state, rollout.feature_BxF)
  own = np.abs(tokens_B - rollout.length_B).mean()
  constants = np.linspace(0, T, 10 * T + 1)[:, None]
  best = np.abs(constants - rollout.length_B).mean(1).min()
  assert metrics['length_head/error_tokens'] == pytest.approx(own, rel=1e-5)
  assert metrics['length_head/constant_error_tokens'] == pytest.approx(best, rel=1e-5)


def test_the_first_step_has_nothing_to_learn(learned):
  state, metrics, _ = learned[0]
  begun = spec().rollout.length_head.init(MODEL.width, 0)
  jax.tree.map(np.testing.assert_array_equal, state, begun)
  assert metrics['length_head/error_tokens'] == 0 == metrics['length_head/constant_error_tokens']


def test_rows_without_an_end_do_not_count(learned):
  head, (state, _, rollout) = spec().rollout.length_head, learned[0]
  some = rollout._replace(
    reason_B=np.where(np.arange(P * G) < 12, UNFINISHED, STOPPED),
    length_B=np.where(np.arange(P * G) < 20, rollout.length_B, 0),
  )
  alone = rollout._replace(
    length_B=rollout.length_B[12:20], reason_B=np.full(8, STOPPED),
    feature_BxF=rollout.feature_BxF[12:20],
  )  # fmt: skip
  got, want = head.train(state, some), head.train(state, alone)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), got, want)
  none = some._replace(reason_B=np.full(P * G, UNFINISHED))
  jax.tree.map(np.testing.assert_array_equal, head.train(state, none)[0], state)


def test_predictions_order_the_queue_and_change_no_token(learned):
  """The queue is that of a host which states these lengths, and shorter than one without lengths."""
  head, prompts = spec().rollout.length_head, make_prompts(born=STEPS)
  state = train_state.init_state(spec(), params())._replace(rollout_head=learned[-1][0])
  plain, _ = sample(state, prompts, head=False, order='fifo')
  got, rounds = sample(state, prompts, slots=G)
  tokens_P = np.asarray(head.remaining_tokens(state.rollout_head, got.feature_BxF))[::G]
  stated = prompts._replace(expected_P=tokens_P.astype(np.float32))
  on_host, stated_rounds = sample(state, stated, head=False, slots=G)
  _, unordered_rounds = sample(state, prompts, head=False, slots=G)
  for rollout in (got, on_host):
    for name in ('tokens_BxT', 'length_B', 'reason_B'):
      np.testing.assert_array_equal(getattr(rollout, name), getattr(plain, name))
    np.testing.assert_allclose(rollout.logp_BxT, plain.logp_BxT, atol=1e-4)
  assert got.feature_BxF.shape == (P * G, MODEL.width) and plain.feature_BxF.shape == (P * G, 0)
  assert rounds == stated_rounds < unordered_rounds


def test_eight_devices_train_the_head_of_one(learned):
  for one, eight in zip(learned, train(spec(devices=8), 4), strict=False):
    np.testing.assert_array_equal(one[2].tokens_BxT, eight[2].tokens_BxT)
    np.testing.assert_allclose(one[2].feature_BxF, eight[2].feature_BxF, atol=1e-5)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-4), one[0], eight[0])
    for name in ('error_tokens', 'constant_error_tokens'):
      name = f'length_head/{name}'
      assert eight[1][name] == pytest.approx(one[1][name], rel=1e-4)


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path):
  """With a lag and fewer slots than rows, so that the pending step and the order depend on the head."""
  config = tiny_job.config_file(
    tmp_path,
    **tiny_job.UNTAUGHT,
    steps=6,
    mode='lag',
    checkpoint=dict(every=3, keep=2),
    rollout=dict(slots=4, length_head=HEAD, queue_order=dict(fn='longest_first')),
    evaluation=dict(every=0, prompts=8, samples=0),
  )
  tiny_job.finish(tiny_job.start(config, tmp_path / 'whole'))
  tiny_job.finish(tiny_job.start(config, tmp_path / 'run', '--config.steps=3'))
  assert 'resuming at step 3' in tiny_job.finish(tiny_job.start(config, tmp_path / 'run'))
  rows = tiny_job.rows(tmp_path / 'whole')
  assert tiny_job.rows(tmp_path / 'run') == rows
  assert rows[0]['length_head/error_tokens'] == 0, 'there is nothing to learn'
  assert rows[-1]['length_head/error_tokens'] > 0


@pytest.mark.parametrize(
  'settings, message',
  [
    (dict(gamma=1.0), 'gamma=1.0 must be from 0 up to but not including 1'),
    (dict(learning_rate=0.0), 'learning_rate=0.0 must be finite and above 0'),
    (dict(width=0), 'width=0 must be finite and above 0'),
  ],
)
def test_invalid_settings_raise_user_errors(settings, message):
  with pytest.raises(UserError, match=message):
    length_head.discounted_return(**settings)


def test_an_open_discount_reaches_as_far_as_the_longest_completion():
  assert length_head.discounted_return().for_completions(1000).gamma == 0.999
  assert length_head.discounted_return(gamma=0.9).for_completions(1000).gamma == 0.9

"""Demonstrations and a teacher in the compiled update, and in a run that stops and goes on."""

from __future__ import annotations

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_job
from test_step import (
  MODEL,
  G,
  L,
  P,
  T,
  assert_close,
  config,
  graded,
  in_bins,
  make_prompts,
  spec,
)

from jaxrl_llm import data, models, objective, train
from jaxrl_llm import step as steps
from jaxrl_llm.config import loading as configs
from jaxrl_llm.distributed import sharding
from jaxrl_llm.learner import compile as programs
from jaxrl_llm.learner import empty_records
from jaxrl_llm.learner import state as train_state
from jaxrl_llm.learner.spec_from_config import make_spec
from jaxrl_llm.models import decoder
from jaxrl_llm.runner import validate
from jaxrl_llm.types import UserError

ROOT = pathlib.Path(__file__).parents[2]


def chosen(**changes):
  c = config()
  c.optimizer.clip_norm = 1e9  # the first moment is then the gradient, times 1 − b1
  for name, value in changes.pop('objective', {}).items():
    c.objective[name] = value
  for name, value in changes.items():
    c[name] = value
  return c


def make(devices=1, teacher=None, **changes):
  c = chosen(**changes)
  return make_spec(
    c, MODEL, (3, 7), sharding.make_mesh(c.mesh, jax.devices()[:devices]), teacher=teacher
  )


def aside(fn, **keywords):
  return dict(sft_loss=dict(fn=fn, **keywords))


def with_demo(batch, seed=0, length=(3, 0, 6, 2)):
  """Random demonstrations of four prompts, the second without one."""
  tokens = np.random.default_rng(seed).integers(0, 50, (P, T)).astype(np.int32)
  return batch._replace(demo=data.as_rollout(tokens, np.array(length, np.int32)))


def gradient(p, batch, params, **more):
  """What the compiled update took for its gradient, and its metrics."""
  state, metrics = programs.compile_update(p)(train_state.init_state(p, params, **more), batch)
  mu = next(x.mu for x in jax.tree.leaves(state.opt_state, is_leaf=_moments) if _moments(x))
  return jax.tree.map(lambda x: np.asarray(x) / 0.1, mu), {k: float(v) for k, v in metrics.items()}


def _moments(x):
  return hasattr(x, 'mu')


@pytest.fixture(scope='module')
def job():
  params = decoder.init(MODEL, 0)
  return params, with_demo(graded(spec(), params))


def test_the_gradient_is_that_of_the_written_loss(job):
  """CHORD: repeated prompts, a plain forward pass, autodiff; against the update's slices of both kinds."""
  params, batch = job
  p = make(objective=aside('chord', high=0.4, low=0.4))
  target = objective.targets(p.objective.method, batch, G)
  weight_BxT = np.asarray(target.weight_BxT * target.advantage_BxT)

  def logp(params, tokens_BxT, repeats):
    rows = np.zeros((len(tokens_BxT), L + T), np.int32)
    start_B = np.repeat(batch.prompts.length_P, repeats)
    for b, start in enumerate(start_B):
      rows[b, :start] = batch.prompts.tokens_PxL[b // repeats, :start]
      rows[b, start : start + T] = tokens_BxT[b]
    mask = np.arange(L + T)[None] < start_B[:, None] + T
    logp = jax.nn.log_softmax(decoder.forward(MODEL, params, rows, mask))
    logp = jnp.take_along_axis(logp[:, :-1], rows[:, 1:, None], axis=-1)[..., 0]
    return jnp.take_along_axis(logp, start_B[:, None] - 1 + np.arange(T)[None], axis=1)

  mask_PxT = np.arange(T)[None] < batch.demo.length_B[:, None]

  def loss(params):
    x = logp(params, batch.rollout.tokens_BxT, G)
    y = logp(params, batch.demo.tokens_BxT, 1)
    prob = jax.lax.stop_gradient(jnp.exp(y))
    sft = -(mask_PxT * prob * (1 - prob) * y).sum() / mask_PxT.sum()
    return 0.6 * -(weight_BxT * x).sum() + 0.4 * sft

  got, metrics = gradient(p, batch, params)
  assert_close(got, jax.jit(jax.grad(loss))(params), 2e-5)
  y = logp(params, batch.demo.tokens_BxT, 1)
  np.testing.assert_allclose(
    metrics['actor/sft_loss'], -(mask_PxT * y).sum() / mask_PxT.sum(), rtol=1e-4
  )
  np.testing.assert_allclose(metrics['actor/sft_share'], 1.2 / (1.2 + 2.4), rtol=1e-6)


def test_a_gate_of_minus_one_is_rl_and_one_of_g_the_supervised_start(job):
  params, batch = job
  plain, _ = gradient(make(), batch._replace(demo=None), params)
  never, _ = gradient(make(objective=aside('replace', gate=-1)), batch, params)
  assert_close(never, plain, 1e-7)
  full = with_demo(batch, length=(3, 4, 6, 2))
  always, metrics = gradient(make(objective=aside('replace', gate=G)), full, params)
  likelihood = dict(
    advantage=dict(fn='raw'),
    ratio=dict(fn='one'),
    trust_region=dict(fn='none'),
    aggregation=dict(fn='token_mean'),
  )
  ones_P = np.ones(P, np.float32)
  replies = full._replace(rollout=full.demo, reward_B=ones_P, correct_B=ones_P, demo=None)
  start, start_metrics = gradient(make(objective=likelihood, rollouts=1), replies, params)
  assert_close(always, start, 1e-6)
  assert metrics['actor/sft_share'] == 1 and metrics['training/demonstration_tokens'] == 15
  np.testing.assert_allclose(metrics['actor/sft_loss'], start_metrics['actor/ppo_kl'], rtol=1e-5)


@pytest.mark.parametrize('bins', [1, 2])
def test_microbatches_of_any_size_give_the_same_gradient(bins, job):
  params, batch = job
  settings = aside('suffix_weighted')  # a pass of the reference too
  full, metrics = gradient(make(objective=settings), batch, params)
  cut, same = gradient(in_bins(make(objective=settings), bins), batch, params)
  assert_close(cut, full, 1e-6)
  assert np.isfinite(metrics['actor/sft_loss']) and metrics['actor/sft_loss'] > 1
  np.testing.assert_allclose(same['actor/sft_loss'], metrics['actor/sft_loss'], rtol=1e-5)


def test_the_reference_fills_log_probs_that_were_not_recorded(job):
  """Before the first step they are the policy, so that all ratios are 1 and PEAR is supervised learning."""
  params, batch = job
  pear, _ = gradient(make(objective=aside('suffix_weighted', discount=1.0)), batch, params)
  # The second prompt has no demonstration; HPT goes on with its rollouts, PEAR never looks at them.
  rows = np.arange(P * G) // G == 1
  none = batch._replace(reward_B=np.where(rows, 0, batch.reward_B).astype(np.float32))
  plain, _ = gradient(make(objective=aside('replace', gate=G)), none, params)
  assert_close(pear, plain, 1e-6)


TAUGHT = aside('chord', high=0.5, low=0.1, warmup=2, decay=2) | dict(
  distillation=dict(fn='on_policy', scale=1.25),
  importance_correction=dict(fn='token_truncate', high=5.0),
)


def test_one_device_and_eight_agree_on_demonstrations_and_a_teacher(job):
  params, batch = job
  teacher = decoder.init(MODEL, 1)
  known = dict(objective=TAUGHT | dict(teacher='scratch'), teacher=MODEL)
  single, metrics = gradient(make(**known), batch, params, teacher=teacher)
  many = make(**known, devices=8, mesh=dict(data=2, fsdp=2, tensor=2))
  eight, metrics8 = gradient(many, batch, params, teacher=teacher)
  assert_close(single, eight, 1e-5)
  for name, value in metrics.items():
    np.testing.assert_allclose(metrics8[name], value, atol=1e-4, rtol=1e-4, err_msg=name)


def run_two(p, teacher):
  state = train_state.init_state(p, decoder.init(MODEL, 0), teacher)
  fn, batch, history = steps.compile_step(p), empty_records.empty_batch(p), []
  rows = p.rollout.decode.rollouts
  for index in range(3):
    prompts = make_prompts(index)
    state, rollout, metrics = fn(state, batch, prompts, None, None, np.int32(T))
    rollout = jax.tree.map(np.asarray, rollout)
    right = (np.arange(P * rows) % 3 == 0).astype(np.float32)
    right[:rows] = 0
    batch = empty_records.empty_batch(p)._replace(
      prompts=prompts, rollout=rollout, reward_B=right, correct_B=right
    )
    if batch.demo is not None:
      batch = with_demo(batch, index)
    history.append({k: float(v) for k, v in metrics.items()})
  assert fn._cache_size() == 1, 'one compile serves the empty batch too'
  return state, history


@pytest.mark.parametrize('name', ['chord', 'exopd'])
def test_two_real_steps_in_one_program(name):
  """The empty batch moves nothing; then the weights move, and what is frozen stays. The others: test_configs.py."""
  c = configs.load(name)
  c.prompts, c.prompt_tokens, c.completion_tokens = P, L, T
  validate.validate(c)
  frozen = decoder.init(MODEL, 1) if c.objective.teacher else None
  mesh = sharding.make_mesh(c.mesh, jax.devices()[:1])
  p = make_spec(c, MODEL, (3, 7), mesh, teacher=MODEL if frozen else None)
  state, history = run_two(p, frozen)
  assert int(state.step) == 2 and int(state.skipped) == 0
  assert all(np.isfinite(v) for row in history for v in row.values())
  assert (
    history[0]['actor/grad_norm']
    == 0
    < min(history[1]['actor/grad_norm'], history[2]['actor/grad_norm'])
  )
  first = decoder.init(MODEL, 0)
  with pytest.raises(AssertionError):
    assert_close(state.params, first, 1e-7)
  if p.objective.method.needs_reference:
    assert_close(state.reference, first, 0)
  assert (state.teacher is None) == (frozen is None)
  if frozen is not None:
    assert_close(state.teacher, frozen, 0)
    assert history[1]['critic/advantages/max'] > 0 > history[1]['critic/advantages/min']


# What a run adds to that: rows of data become demonstrations, the schedule goes on, the teacher is loaded again.
RUN = dict(
  mode='split',
  steps=4,
  sft=dict(steps=0),
  evaluation=dict(every=0, prompts=0, samples=1),
  objective=TAUGHT | dict(teacher='scratch', aggregation=dict(fn='token_mean')),
  rewards=dict(fn='exact', workers=1),
)


def test_stopped_and_resumed_it_is_the_uninterrupted_run(tmp_path):
  """The batch still to be learned is in the checkpoint with its demonstrations, and the teacher is not."""

  def run(folder, count):
    c = configs.load(tiny_job.config_file(tmp_path, **RUN | dict(steps=count)))
    train.run(c, str(tmp_path / folder), sharding.make_mesh(c.mesh, jax.devices()[:1]))
    return tiny_job.rows(tmp_path / folder)

  want = run('whole', 4)
  run('parts', 2)
  saved = (tmp_path / 'parts/checkpoints/step_000002/manifest.json').read_text()
  assert 'demo' in saved and 'reference' in saved and 'teacher' not in saved
  assert run('parts', 4) == want
  share = [row['actor/sft_share'] for row in want]
  np.testing.assert_allclose(share, [0, 0, 0.25, 0.5], atol=1e-6)
  assert all(row['actor/sft_loss'] > 1 for row in want[1:])


@pytest.mark.parametrize(
  'changes, message',
  [
    (
      dict(distillation=dict(fn='on_policy')),
      "'on_policy' does not go with config.objective.teacher='': distillation needs",
    ),
    (dict(teacher='scratch'), "teacher='scratch' does not go with .*; set"),
    (
      dict(distillation=dict(fn='on_policy'), teacher='smollm9'),
      "config.objective.teacher='smollm9'",
    ),
    (aside('chord', hihg=1.0), 'hihg=1.0 is not a setting'),
    (aside('cord'), "config.objective.sft_loss.fn='cord' is unknown; choose one of: chord"),
  ],
)
def test_bad_choices_are_refused(changes, message, tmp_path):
  c = configs.load(tiny_job.config_file(tmp_path, objective=changes))
  with pytest.raises(UserError, match=message):
    train.run(c, str(tmp_path / 'run'), sharding.make_mesh(c.mesh, jax.devices()[:1]))


def test_a_teacher_with_another_vocabulary_is_refused(tmp_path, monkeypatch):
  changes = dict(distillation=dict(fn='on_policy'), teacher='other')
  c = configs.load(tiny_job.config_file(tmp_path, objective=changes))
  load, letters = models.load, models.load('scratch', scratch=c.scratch)
  backend = type(letters.tokenizer.backend).from_str(
    letters.tokenizer.backend.to_str().replace('"a":', '"α":')
  )
  other = letters._replace(tokenizer=letters.tokenizer._replace(backend=backend))
  monkeypatch.setattr(
    models, 'load', lambda name, **k: other if name == 'other' else load(name, **k)
  )
  with pytest.raises(UserError, match="teacher='other' has other tokens than config.model"):
    train.run(c, str(tmp_path / 'run'), sharding.make_mesh(c.mesh, jax.devices()[:1]))

"""Groups of earlier steps in the compiled update: as if their rows had been sampled now with the log-probs recorded."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from test_step import MODEL, G, L, P, assert_close, config, graded, spec

from jaxrl_llm import step as steps
from jaxrl_llm.distributed import sharding
from jaxrl_llm.learner import compile as programs
from jaxrl_llm.learner import empty_records, spec_from_config
from jaxrl_llm.learner import state as train_state
from jaxrl_llm.learner.spec_from_config import make_spec
from jaxrl_llm.models import decoder
from jaxrl_llm.replay import group_batches, reuse
from jaxrl_llm.types import UserError

REPLAY = dict(reuse=dict(fn='mixed_groups', share=0.5))
HALF = dict(prompts=P // 2, replay=REPLAY)
CORRECTED = dict(
  learner=dict(minibatches=2), objective=dict(importance_correction=dict(fn='token'))
)


def made(changes, **more):
  """The spec of a config with these changes; dicts of an objective are laid over the default."""
  changes = dict(changes) | more
  c = config()
  for stage, value in changes.pop('objective', {}).items():
    c.objective[stage] = value
  return spec(objective=c.objective, **changes)


def stale_batch(params, seed=0):
  """Rollouts that another policy is said to have sampled, with rewards that are all different."""
  batch, r = graded(spec(), params), np.random.default_rng(seed)
  real = np.arange(batch.rollout.logp_BxT.shape[1])[None] < batch.rollout.length_B[:, None]
  logp_BxT = real * (batch.rollout.logp_BxT + 0.3 * r.normal(size=real.shape))
  tokens_BxT = np.where(real, batch.rollout.tokens_BxT, 0)
  length = np.arange(L)[None] < batch.prompts.length_P[:, None]
  prompts = batch.prompts._replace(
    tokens_PxL=np.where(length, batch.prompts.tokens_PxL, 0), index_P=np.arange(P, dtype=np.int32)
  )
  rollout = batch.rollout._replace(logp_BxT=logp_BxT.astype(np.float32), tokens_BxT=tokens_BxT)
  return batch._replace(
    prompts=prompts, rollout=rollout, reward_B=r.random(P * G).astype(np.float32)
  )


def joined(batch):
  """The second half of the slots stored by one step, and behind the first half in the next one."""
  store, half = reuse.mixed_groups(share=0.5), np.arange(P // 2)
  store.keep(group_batches.slots(batch, half + P // 2), np.ones(P // 2, bool), 0)
  return store.join(group_batches.slots(batch, half), 0, 1)


def updated(p, batch, params):
  state, metrics = programs.compile_update(p)(train_state.init_state(p, params), batch)
  return jax.device_get(state), {k: float(v) for k, v in metrics.items()}


@pytest.mark.parametrize('changes', [{}, CORRECTED], ids=['clip', 'corrected'])
def test_the_update_is_that_of_rows_sampled_now_with_these_log_probs(changes):
  params = decoder.init(MODEL, 0)
  batch = stale_batch(params)
  replayed = joined(batch)
  order = replayed.prompts.index_P.astype(int)
  assert sorted(order) == list(range(P)) and order[: P // 2].tolist() == list(range(P // 2))
  sampled = group_batches.slots(batch, order)
  for a, b in zip(jax.tree.leaves(replayed), jax.tree.leaves(sampled), strict=True):
    np.testing.assert_array_equal(a, b)
  want, want_metrics = updated(made(changes), sampled, params)
  got, metrics = updated(made(changes, **HALF), replayed, params)
  assert_close(got.params, want.params, 0)
  assert metrics == want_metrics and metrics['actor/grad_norm'] > 0
  # The recorded log-probs of replayed rows are read: with those of the trained weights, the update is another one.
  fresh = group_batches.slots(graded(spec(), params), order).rollout.logp_BxT
  logp_BxT = np.concatenate([replayed.rollout.logp_BxT[: P * G // 2], fresh[P * G // 2 :]])
  other = replayed._replace(rollout=replayed.rollout._replace(logp_BxT=logp_BxT))
  _, unlike = updated(made(changes, **HALF), other, params)
  assert abs(unlike['actor/grad_norm'] / metrics['actor/grad_norm'] - 1) > 1e-3


def test_groups_of_other_runs_are_learned_as_if_the_present_weights_had_sampled_them():
  """They have no log-probs; the update computes those of its first weights, before the first of two minibatches."""
  params, shared = decoder.init(MODEL, 0), dict(reuse=dict(fn='shared', folder='unused'))
  batch = stale_batch(params)
  fresh_BxT = graded(spec(), params).rollout.logp_BxT
  of_others_Bx1 = (np.arange(P * G) >= P * G // 2)[:, None]

  def recorded(logp_BxT):
    mixed_BxT = np.where(of_others_Bx1, logp_BxT, batch.rollout.logp_BxT).astype(np.float32)
    return batch._replace(rollout=batch.rollout._replace(logp_BxT=mixed_BxT))

  changes = dict(CORRECTED, prompts=P // 2)
  want, want_metrics = updated(made(CORRECTED), recorded(fresh_BxT), params)
  blank = recorded(0)._replace(replayed_B=of_others_Bx1[:, 0].astype(np.float32))
  got, metrics = updated(made(changes, replay=shared), blank, params)
  # Adam moves weights by 0.02, and magnifies roundings of small gradients.
  assert_close(got.params, want.params, 1e-4)
  np.testing.assert_allclose(metrics['actor/grad_norm'], want_metrics['actor/grad_norm'], rtol=1e-5)
  _, unlike = updated(made(CORRECTED), recorded(0), params)
  assert abs(unlike['actor/grad_norm'] / metrics['actor/grad_norm'] - 1) > 1e-3


def test_empty_slots_change_nothing():
  """The first steps of a run, whose buffer is empty, learn from the sampled slots alone."""
  params = decoder.init(MODEL, 0)
  half = group_batches.slots(stale_batch(params), np.arange(P // 2))
  padded = reuse.mixed_groups(share=0.5).join(half, 0, 1)
  want, want_metrics = updated(spec(prompts=P // 2), half, params)
  got, metrics = updated(spec(**HALF), padded, params)
  assert_close(got.params, want.params, 1e-6)
  np.testing.assert_allclose(metrics['actor/grad_norm'], want_metrics['actor/grad_norm'], rtol=1e-5)


def test_eight_devices_learn_the_same():
  params, r = decoder.init(MODEL, 0), np.random.default_rng(0)
  eight = config(prompts=4, replay=REPLAY, learner=dict(minibatches=1))
  eight.mesh.update(dict(data=2, fsdp=2, tensor=2))
  p = make_spec(eight, MODEL, (3, 7), sharding.make_mesh(eight.mesh))
  one = spec(prompts=4, replay=REPLAY)
  batch = stale_batch(params)
  store = reuse.mixed_groups(share=0.5)
  old = batch._replace(
    prompts=batch.prompts._replace(index_P=batch.prompts.index_P + 10),
    reward_B=r.random(P * G).astype(np.float32),
  )
  store.keep(old, np.ones(P, bool), 0)
  whole = store.join(batch, 0, 1)
  want, want_metrics = updated(one, whole, params)
  got, metrics = updated(p, whole, params)
  # One percent of Adam's first step, which divides the smallest gradients by themselves.
  assert_close(got.params, want.params, 1e-4)
  np.testing.assert_allclose(metrics['actor/grad_norm'], want_metrics['actor/grad_norm'], rtol=1e-4)


@pytest.mark.parametrize('fn', ['mixed_groups', 'self_imitation', 'recomposed'])
def test_the_first_batch_of_a_run_has_the_arrays_of_the_others(fn):
  """One compiled program takes both."""
  objective = config().objective
  objective.advantage = dict(fn='group_centered')
  objective.aggregation, objective.zero_variance = dict(fn='token_mean'), dict(fn='keep')
  reused = dict(fn=fn, share=0.5)
  p = spec(prompts=P // 2, replay=dict(reuse=reused), objective=objective)
  half = group_batches.slots(stale_batch(decoder.init(MODEL, 0)), np.arange(P // 2))
  joined = getattr(reuse, fn)(share=0.5).join(half, 0, 1)
  empty = empty_records.empty_batch(p)
  shapes = [jax.tree.map(lambda x: (x.shape, x.dtype), batch) for batch in (joined, empty)]
  assert shapes[0] == shapes[1]


def test_a_step_samples_its_prompts_alone():
  p = spec(**HALF)
  assert (p.layout.prompts, p.layout.replayed, p.layout.slots) == (P // 2, P // 2, P)
  assert len(empty_records.empty_batch(p).reward_B) == P * G
  params, prompts = decoder.init(MODEL, 0), empty_records.empty_prompts(p, P // 2)
  state = train_state.init_state(p, params)
  _, rollout, _ = steps.compile_step(p)(
    state, empty_records.empty_batch(p), prompts, None, None, np.int32(6)
  )
  assert rollout.tokens_BxT.shape[0] == P // 2 * G


@pytest.mark.parametrize(
  'changes, message',
  [
    (dict(share=0.6), 'share=0.6 replays 6 groups beside config.prompts=4'),
    (dict(share=0.05), 'share=0.05 leaves no slot'),
  ],
)
def test_a_share_that_devices_cannot_divide_is_refused(changes, message):
  c = config(replay=dict(reuse=dict(fn='mixed_groups', **changes)))
  c.mesh.update(dict(data=4, fsdp=1, tensor=2))
  with pytest.raises(UserError, match=message):
    spec_from_config.check_rows(c, sharding.make_mesh(c.mesh))

"""Score centering in the update: its gradient through all logits, in chunks of them, and with recorded rollouts."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.config import loading as configs
from jaxrl_llm.distributed import sharding
from jaxrl_llm.learner.spec_from_config import make_spec
from jaxrl_llm.learner.step_spec import evaluation_spec
from jaxrl_llm.objective import score_centering
from jaxrl_llm.rollout.decode_records import TokenRecords
from tests.learner import plain_gradient
from tests.learner.packed_jobs import (
  MODEL,
  SEVERAL,
  B,
  G,
  L,
  P,
  T,
  make,
  make_batch,
  make_state,
  packed,
  weights,
  with_method,
)
from tests.learner.test_packed_rows import check

K = 4
PLAIN = dict(advantage='group_centered', ratio='one', trust_region='none', aggregation='token_mean')
CAPPED = PLAIN | dict(ratio='direct', trust_region=dict(fn='cap', most=1.5))


def spec(choices=None, count=K, devices=1, mesh=None, chunk=10**6):
  plain = with_method(make(devices=devices, mesh=mesh), **(choices or PLAIN))
  term = score_centering.top_k(tokens=count) if count else None
  return plain._replace(
    objective=plain.objective._replace(score_centering=term),
    model=plain.model._replace(head_chunk_tokens=chunk),
  )


def sampled_by(params, count=K):
  """The batch with the records of a sampler of these weights."""
  batch = make_batch()
  chosen = spec()
  logp = jax.jit(functools.partial(plain_gradient.distributions, chosen))(params, batch)
  top, ids = jax.lax.top_k(logp, count)
  drawn = jnp.take_along_axis(logp, jnp.asarray(batch.rollout.tokens_BxT)[..., None], -1)[..., 0]
  rollout = batch.rollout._replace(logp_BxT=drawn, top_id_BxTxK=ids, top_logp_BxTxK=top)
  return jax.tree.map(np.asarray, batch._replace(rollout=rollout))


@pytest.fixture(scope='module')
def batch():
  return sampled_by(weights(9))


@pytest.mark.parametrize('choices, chunk', [(PLAIN, 10**6), (CAPPED, 5)], ids=['one', 'capped'])
def test_the_gradient_is_that_of_whole_rows(choices, chunk, batch):
  chosen = spec(choices, chunk=chunk)
  state = make_state(chosen, weights(0))
  got, _ = check(chosen, state, batch)
  off = spec(choices, count=0)
  without, _ = check(off, make_state(off, weights(0)), batch)
  assert plain_gradient.distance(got, without) > 0.05


def test_one_device_and_four_agree(batch):
  single = plain_gradient.recording(spec(chunk=5), SEVERAL)
  many = spec(devices=4, mesh=dict(data=2, fsdp=2), chunk=5)
  many = plain_gradient.recording(many, SEVERAL)
  (got, ours), (want, theirs) = (
    packed(x, make_state(x, weights(0)), batch) for x in (many, single)
  )
  assert plain_gradient.distance(got, want) < 1e-5
  np.testing.assert_allclose(
    ours['actor/score_centering'], theirs['actor/score_centering'], rtol=1e-4
  )
  assert abs(theirs['actor/score_centering']) > 1e-3


def test_a_sampler_that_is_the_policy_has_no_term():
  batch = sampled_by(weights(0))
  chosen, off = (plain_gradient.recording(x, SEVERAL) for x in (spec(), spec(count=0)))
  (got, metrics), (want, _) = (packed(x, make_state(x, weights(0)), batch) for x in (chosen, off))
  assert plain_gradient.distance(got, want) < 1e-5
  assert abs(metrics['actor/score_centering']) < 1e-6


def test_records_behind_a_row_and_in_rows_without_an_advantage_change_nothing(batch):
  chosen = plain_gradient.recording(spec(), SEVERAL)
  state, length_B = make_state(chosen, weights(0)), batch.rollout.length_B
  real_BxT = np.arange(T)[None] < length_B[:, None]
  learned_BxTx1 = (real_BxT & (np.arange(B) // G != B // G - 1)[:, None])[..., None]  # all wrong
  noise = np.random.default_rng(0).uniform(-3, -1, batch.rollout.top_logp_BxTxK.shape)
  changed = batch.rollout._replace(
    top_logp_BxTxK=np.where(learned_BxTx1, batch.rollout.top_logp_BxTxK, noise.astype('f4')),
    top_id_BxTxK=np.where(learned_BxTx1, batch.rollout.top_id_BxTxK, 1),
  )
  want, _ = packed(chosen, state, batch)
  got, _ = packed(chosen, state, batch._replace(rollout=changed))
  everything = batch.rollout._replace(top_logp_BxTxK=noise.astype('f4'))
  other, _ = packed(chosen, state, batch._replace(rollout=everything))
  jax.tree.map(np.testing.assert_array_equal, got, want)
  assert plain_gradient.distance(other, want) > 1e-2


def test_training_records_the_likeliest_tokens_and_evaluation_none():
  """Evaluation has greedy rows, whose temperature of 0 is no divisor; a small vocabulary is recorded as a whole."""
  c = configs.load('score_centering')
  c.prompts, c.rollouts, c.prompt_tokens, c.completion_tokens = P, G, L, T
  chosen = make_spec(c, MODEL, (3,), sharding.make_mesh(c.mesh, jax.devices()[:1]))
  assert chosen.objective.score_centering == score_centering.top_k(tokens=128)
  assert chosen.rollout.decode.records == TokenRecords(top_tokens=MODEL.vocab)
  assert evaluation_spec(chosen, 2, 1.0).rollout.decode.records == TokenRecords()

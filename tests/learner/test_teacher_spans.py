"""A teacher with another tokenizer in the update: the gradient of whole rows, and its limits."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from objective_table import METHODS

from jaxrl_llm.learner import packing, teacher_spans
from jaxrl_llm.learner.step_spec import RowTokens, teacher_spec
from jaxrl_llm.models import decoder
from jaxrl_llm.types import TeacherTokens
from tests.learner import plain_gradient
from tests.learner.packed_jobs import (
  MODEL,
  SEVERAL,
  SINGLE,
  WHOLE,
  B,
  G,
  L,
  P,
  T,
  make,
  make_batch,
  make_state,
  near_policy,
  packed,
  weights,
  with_method,
)

SIZES = RowTokens(8, 11)  # longer than the policy's
# Another vocabulary, wider and deeper.
TEACHER = dataclasses.replace(MODEL, vocab=31, width=24, layers=2, heads=3, tied=False)
SPANS = dict(fn='on_policy_spans', teacher_prompt_tokens=8, teacher_completion_tokens=11)


def make_tokens(batch, seed=0, sizes=SIZES, vocab=TEACHER.vocab) -> TeacherTokens:
  """Random spans over the beginning of each row; some rows have none, and some are covered to the end."""
  r = np.random.default_rng(seed)
  length_P = np.repeat(r.integers(1, sizes.prompt + 1, P), G).astype(np.int32)
  prompt_BxL = np.repeat(r.integers(0, vocab, (P, sizes.prompt)), G, axis=0).astype(np.int32)
  span_BxT, span_BxE = np.full((B, T), -1, np.int32), np.full((B, sizes.completion), -1, np.int32)
  for b, length in enumerate(np.asarray(batch.rollout.length_B)):
    covered = 0 if b in (4, 9) else length if b % 2 else r.integers(0, length + 1)
    if covered:
      span_BxT[b, :covered] = np.cumsum([0, *(r.random(covered - 1) < 0.6)])
      spans = span_BxT[b].max() + 1
      more = r.integers(0, spans, r.integers(0, sizes.completion - spans + 1))
      taught = np.sort([*range(spans), *more])
      span_BxE[b, : len(taught)] = taught
  tokens_BxE = r.integers(0, vocab, span_BxE.shape).astype(np.int32)
  length_B = (span_BxE >= 0).sum(1).astype(np.int32)
  return TeacherTokens(prompt_BxL, length_P, tokens_BxE, length_B, span_BxE, span_BxT)


def job(name='opsd', seed=0, size=SEVERAL, sizes=SIZES, teacher=TEACHER, **made):
  """Spec, state and a batch near the policy."""
  spec = with_method(make(**made), **METHODS[name].settings | dict(distillation=SPANS))
  spec = plain_gradient.recording(spec, size)
  spec = spec._replace(
    objective=spec.objective._replace(teacher_tokens=sizes),
    model=spec.model._replace(teacher=teacher),
  )
  state = make_state(spec, weights(0), teacher=decoder.init(teacher, 3))
  batch = make_batch(seed)
  batch = batch._replace(teacher_tokens=make_tokens(batch, seed, sizes, teacher.vocab))
  batch = jax.tree.map(jnp.asarray, batch)
  return spec, state, near_policy(batch, plain_gradient.scores(spec, state.params, batch).logp)


@pytest.mark.parametrize('size', [SINGLE, SEVERAL, WHOLE])
def test_the_gradient_is_that_of_whole_rows(size):
  """Log-probs of the teacher behind its own prompts, summed by matrices of which token is in which span."""
  spec, state, batch = job(size=size)
  got, metrics = packed(spec, state, batch)
  want, c_BxT, _, target = plain_gradient.gradient(spec, state, batch)
  assert plain_gradient.distance(got, want) < 1e-5
  inside_BxT = np.asarray(batch.teacher_tokens.own_span_BxT) >= 0
  np.testing.assert_array_equal(np.asarray(c_BxT) != 0, inside_BxT)
  np.testing.assert_allclose(
    c_BxT, np.asarray(target.advantage_BxT) * inside_BxT / inside_BxT.sum(), atol=1e-6
  )
  rows = inside_BxT.any(1)
  assert metrics['training/trained_tokens'] == np.asarray(batch.rollout.length_B)[rows].sum()


def test_averaged_weights_and_shorter_rows_of_the_teacher():
  old = dict(fn='average', decay=0.9)
  spec, state, batch = job('opsd', seed=3, sizes=RowTokens(3, 7))
  spec = spec._replace(
    objective=with_method(
      spec, **METHODS['opsd'].settings | dict(distillation=SPANS, old_policy=old)
    ).objective._replace(teacher_tokens=RowTokens(3, 7))
  )
  state = make_state(spec, weights(0), teacher=state.teacher)
  got, _ = packed(spec, state, batch)
  want, *_ = plain_gradient.gradient(spec, state, batch)
  assert plain_gradient.distance(got, want) < 1e-5


def test_one_device_and_four_agree():
  (one, state, batch), (four, other, _) = job(), job(devices=4, mesh=dict(data=2, fsdp=2))
  batch = jax.device_get(batch)
  want, got = packed(one, state, batch)[0], packed(four, other, batch)[0]
  assert plain_gradient.distance(got, want) < 1e-5


def test_the_same_tokens_on_both_sides_are_plain_distillation():
  """Each token is a span, and the teacher reads what the policy wrote: `on_policy` with scale 1."""
  spec, state, batch = job(sizes=RowTokens(L, T), teacher=MODEL)
  length_B, span_T = np.asarray(batch.rollout.length_B), np.arange(T, dtype=np.int32)
  span_BxT = np.where(span_T < length_B[:, None], span_T, -1)
  prompts = batch.prompts
  batch = batch._replace(
    teacher_tokens=TeacherTokens(
      np.repeat(prompts.tokens_PxL, G, 0), np.repeat(prompts.length_P, G),
      batch.rollout.tokens_BxT, length_B, span_BxT, span_BxT,
    )
  )  # fmt: skip
  state = state._replace(teacher=weights(3))
  got, _ = packed(spec, state, batch)
  settings = METHODS['opsd'].settings | dict(distillation=dict(fn='on_policy', scale=1.0))
  plain = with_method(spec, **settings)
  taught = make_state(plain, weights(0), teacher=state.teacher)
  want, _ = packed(plain, taught, batch._replace(teacher_tokens=None))
  assert plain_gradient.distance(got, want) < 1e-6


def test_log_probs_of_the_teachers_tokens_are_those_of_whole_rows():
  spec, state, batch = job()
  tokens = batch.teacher_tokens
  logp_BxE = jax.jit(functools.partial(teacher_spans.log_probs, spec))(state, batch)
  read = batch._replace(
    prompts=batch.prompts._replace(tokens_PxL=tokens.prompt_BxL, length_P=tokens.prompt_length_B),
    rollout=batch.rollout._replace(tokens_BxT=tokens.tokens_BxE, length_B=tokens.length_B),
  )
  plain_BxE = plain_gradient.scores(teacher_spec(spec), state.teacher, read).logp
  real_BxE = np.arange(SIZES.completion) < np.asarray(tokens.length_B)[:, None]
  np.testing.assert_allclose(logp_BxE, np.where(real_BxE, plain_BxE, 0), atol=1e-5)


def test_padding_does_not_matter():
  spec, state, batch = job()
  tokens = batch.teacher_tokens
  blank = lambda x, length: np.where(np.arange(x.shape[1]) < np.asarray(length)[:, None], x, 7)  # noqa: E731
  other = tokens._replace(
    prompt_BxL=blank(tokens.prompt_BxL, tokens.prompt_length_B),
    tokens_BxE=blank(tokens.tokens_BxE, tokens.length_B),
  )
  assert (other.tokens_BxE != tokens.tokens_BxE).any()
  want, got = (packed(spec, state, batch._replace(teacher_tokens=x))[0] for x in (tokens, other))
  jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize('align', [1, 8])
def test_bins_have_room_for_the_longest_row_of_the_teacher(align):
  spec, *_ = job()
  size = spec.update.packing._replace(align=align, tokens=16)
  spec = spec._replace(update=spec.update._replace(packing=size))
  for prompt in range(1, 20):
    for completion in range(1, 20):
      sizes = RowTokens(prompt, completion)
      own = spec._replace(objective=spec.objective._replace(teacher_tokens=sizes))
      found = teacher_spec(own).update.packing
      row = sum(packing.aligned(align, n) for n in (prompt, completion - 1))
      assert found.tokens >= row and found.predicted >= completion

"""BranchGRPO's trees: each row is a sample with its own noise, and shares what was drawn before a split."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxrl_llm import step as steps
from jaxrl_llm.learner import state as train_state
from jaxrl_llm.models import decoder
from jaxrl_llm.rollout import ring_decode, sampling, tree_decode, tree_rules
from jaxrl_llm.rollout.decode_records import DecodeInputs
from jaxrl_llm.types import UserError
from tests.rollout.test_tree_decode import (
  END,
  MODEL,
  SPEC,
  B,
  G,
  L,
  P,
  T,
  assert_same,
  make_prompts,
  step_spec,
)


@pytest.fixture(scope='module')
def params():
  return jax.tree.map(lambda x: x * 1.5, decoder.init(MODEL, 0))


def run(params, splits, **changes):
  spec, rules = SPEC._replace(**changes), tree_rules.branch_grpo(splits=splits)
  inputs = lambda p, q: DecodeInputs(p, q, jax.random.key(1), 4)  # noqa: E731
  tree = jax.jit(lambda p, q: tree_decode.generate(MODEL, spec, inputs(p, q), rules))
  ring = jax.jit(lambda p, q: ring_decode.generate(MODEL, spec, inputs(p, q))[0])
  rollout, iterations, grown = jax.tree.map(np.asarray, tree(params, make_prompts()))
  # Rows that no fork has filled start right after the last split.
  assert iterations <= max(splits) + T
  return rollout, grown, jax.tree.map(np.asarray, ring(params, make_prompts()))


@pytest.mark.parametrize(
  'changes', [{}, dict(temperature=0.7, token_filter=sampling.TokenFilter(6, 1.0, 0.0))]
)
def test_two_rows_that_fork_at_the_first_token_are_those_of_the_ring_loop(params, changes):
  got, grown, ring = run(params, (0,), rollouts=2, **changes)
  assert grown.forks == P
  assert_same(got, ring)


def test_rows_share_what_was_drawn_before_a_split_and_draw_the_rest_themselves(params):
  splits = (0, 3)
  got, grown, ring = run(params, splits)
  prompts, keys_B = make_prompts(), sampling.row_keys(jax.random.key(1), make_prompts(), G)
  whole = 0
  for b in range(B):
    p, g, n, born = b // G, b % G, got.length_B[b], grown.born_B[b]
    first = grown.parent_B[b] == b and g > 0  # idle at the end of growth: it starts at the prompt
    if first:
      np.testing.assert_array_equal(got.tokens_BxT[b], ring.tokens_BxT[b])
      continue
    if g:
      parent, born_at = {1: (0, 0), 2: (0, 3), 3: (1, 3)}[g]
      # Row 3 is row 0's child where row 1 ended before the second split, and row 2 is row 1's where row 0 did.
      assert grown.parent_B[b] - p * G in (0, 1) and born == born_at
      whole += grown.parent_B[b] - p * G == parent
      np.testing.assert_array_equal(
        got.tokens_BxT[b, :born], got.tokens_BxT[grown.parent_B[b], :born]
      )
    start = prompts.length_P[p]
    row = np.concatenate([prompts.tokens_PxL[p, :start], got.tokens_BxT[b, :n]])[None]
    logits = decoder.forward(MODEL, params, row, np.ones_like(row, bool))[
      0, start - 1 : start + n - 1
    ]
    uniform = sampling.uniforms(jax.numpy.repeat(keys_B[b : b + 1], n, axis=0), np.arange(n))
    token, logp = sampling.sample(logits, uniform, 1.0)
    np.testing.assert_array_equal(token[born:], got.tokens_BxT[b, born:n])
    np.testing.assert_allclose(logp[born:], got.logp_BxT[b, born:n], atol=1e-4)
  assert whole >= P


def test_groups_stop_growing_after_the_last_split(params):
  """Four rows, and two of them at most by forks: the others start at the prompt after it."""
  got, grown, ring = run(params, (2,))
  child = grown.parent_B != np.arange(B)
  assert child.sum() == grown.forks > P / 2 and (grown.born_B[child] == 2).all()
  alone = ~child & (np.arange(B) % G > 0)
  assert alone.sum() >= 2 * P
  assert_same(got, ring, alone)
  ends = np.isin(got.tokens_BxT, END) & (np.arange(T)[None] < got.length_B[:, None])
  assert (ends.sum(1) <= 1).all() and (got.length_B > 0).all() and L > 0


def test_one_device_and_eight_grow_the_same_trees(params):
  def grow(spec):
    state = train_state.init_state(spec, params)
    fn = jax.jit(lambda p: steps.generate(spec, train_state.sampling_state(p), make_prompts())[:2])
    return jax.tree.map(np.asarray, fn(state.params))

  one, metrics = grow(step_spec(fn='branch_grpo'))
  mesh = dict(data=2, fsdp=2, tensor=2)
  many, metrics8 = grow(step_spec(8, fn='branch_grpo', mesh=mesh, lockstep=True))
  np.testing.assert_array_equal(one.tokens_BxT, many.tokens_BxT)
  np.testing.assert_allclose(one.logp_BxT, many.logp_BxT, atol=1e-4)
  assert metrics8 == metrics and metrics['generate/tree_forks'] >= 2 * P


@pytest.mark.parametrize(
  'splits, why',
  [
    (3, r'config.rollout.tree.splits=3 must be a list of numbers, such as \[0, 3\]'),
    ((), r'config.rollout.tree.splits=\[\] must rise, with at least one number, from 0 up'),
    ((3, 1), r'config.rollout.tree.splits=\[3, 1\] must rise'),
    ((2, 2), r'config.rollout.tree.splits=\[2, 2\] must rise'),
    ((-1, 2), r'config.rollout.tree.splits=\[-1, 2\] must rise'),
  ],
)
def test_wrong_splits_are_refused(splits, why):
  with pytest.raises(UserError, match=why):
    tree_rules.branch_grpo(splits=splits)

"""Which row stands where: the plan of a minibatch and the layout of its microbatches, against plain Python."""

from __future__ import annotations

import functools
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm import data
from jaxrl_llm.distributed import sharding
from jaxrl_llm.learner import microbatch, packing, step_spec
from jaxrl_llm.types import Batch, Prompts

P, G, L, T = 5, 3, 6, 7
B = P * G
# Bins of a microbatch, rows of a bin, shared prompts. The tokens of a bin vary.
SHAPES = [(1, 2, True), (2, 3, True), (3, 8, True), (2, 4, False), (4, 1, True), (1, B, True)]


def reference_plan(size, prompt, length, learned):
  """Bins as lists of (row, first column, whether a copy of the prompt stands before it), by first fit."""
  group = len(length) // len(prompt)
  rows = [b for b in range(len(length)) if learned[b] and length[b]]
  cost = {p: prompt[p] + sum(length[b] - 1 for b in rows if b // group == p) for p in range(P)}
  rows.sort(key=lambda b: (-cost[b // group], b // group, -length[b], b))
  bins, used, last = [], [], None

  def has_room(b, k, tokens):
    predicted = sum(length[other] for other, *_ in bins[k]) + length[b]
    room = len(bins[k]) < size.rows and predicted <= size.predicted
    return room and used[k] + tokens <= size.tokens

  for b in rows:
    p, tokens = b // group, length[b] - 1
    joins = size.shares_prompt and last is not None and last[1] == p
    joins = joins and has_room(b, last[0], tokens)
    whole = tokens if joins else prompt[p] + tokens
    fitting = [k for k in range(len(bins)) if has_room(b, k, whole)]
    k = last[0] if joins else fitting[0] if fitting else len(bins)
    if k == len(bins):
      bins.append([])
      used.append(0)
    bins[k].append((b, used[k], not joins))
    used[k] += whole
    last = k, p
  return bins


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def planned(bins, rows_of_bin, shares, tokens, predicted, rows):
  return packing.make_plan(packing.PackingSpec(bins, tokens, predicted, rows_of_bin, shares), rows)


def plan(size, prompt, length, learned):
  rows = packing.Rows(jnp.int32(prompt), jnp.int32(length), jnp.asarray(learned, bool))
  sizes = size.bins, size.rows, size.shares_prompt, size.tokens, size.predicted
  return jax.device_get(planned(*sizes, rows))


def check_plan(size, prompt, length, learned):
  """The plan is the reference's, and keeps the rules that the reference does not state."""
  got, want = plan(size, prompt, length, learned), reference_plan(size, prompt, length, learned)
  assert got.bins == len(want) <= len(got.row_KxJ) and len(got.row_KxJ) % size.bins == 0
  for k, row_J in enumerate(got.row_KxJ):
    placed = [(b, got.start_B[b], got.copies_B[b]) for b in row_J[row_J < B]]
    assert placed == (want[k] if k < len(want) else [])
    assert (row_J[len(placed) :] == B).all(), 'empty places stand behind the rows'
    end, copied = 0, None
    for b, start, has_copy in placed:
      copied = b // G if has_copy else copied
      assert start == end and copied == b // G and (has_copy or size.shares_prompt)
      end = start + has_copy * prompt[b // G] + length[b] - 1
    assert end <= size.tokens and sum(length[b] for b, *_ in placed) <= size.predicted
  rows = got.row_KxJ[got.row_KxJ < B]
  np.testing.assert_array_equal(np.sort(rows), np.flatnonzero(learned & (length > 0)))
  return got


def drawn(seed):
  r = np.random.default_rng(seed)
  prompt, length = r.integers(1, L + 1, P), r.integers(0, T + 1, B)
  return prompt, length, r.random(B) < r.choice([0.2, 0.7, 1.0])


MORE = st.sampled_from([0, 1, 9, 70])


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(SHAPES), MORE, MORE)
def test_every_learned_row_stands_once_in_the_first_bin_with_room(seed, shape, tokens, predicted):
  bins, rows, shares = shape
  size = packing.PackingSpec(bins, L + T - 1 + tokens, T + predicted, rows, shares)
  prompt, length, learned = drawn(seed)
  got = check_plan(size, prompt, length, learned)
  again = plan(size, prompt, length, learned)
  jax.tree.map(np.testing.assert_array_equal, got, again)


@pytest.mark.parametrize('shape', SHAPES)
@pytest.mark.parametrize('case', ['longest', 'single tokens', 'one row', 'none', 'all empty'])
def test_worst_cases(shape, case):
  bins, rows, shares = shape
  size = packing.PackingSpec(bins, L + T - 1, T, rows, shares)
  prompt, length, learned = np.full(P, L), np.full(B, T), np.ones(B, bool)
  if case == 'single tokens':
    length = np.ones(B, int)
  if case == 'one row':
    learned = np.arange(B) == 7
  if case == 'none':
    learned = np.zeros(B, bool)
  if case == 'all empty':
    length = np.zeros(B, int)
  got = check_plan(size, prompt, length, learned)
  want = {'longest': B, 'one row': 1, 'none': 0, 'all empty': 0}
  assert got.bins == want.get(case, got.bins)


@pytest.mark.parametrize('shares', [True, False])
@pytest.mark.parametrize('rows', [1, 2, 3, 7, B])
def test_full_bins_are_those_of_a_plan_of_longest_rows(rows, shares):
  """The number that reports assume where all rows are learned and have all their tokens, or a few more."""
  layout = types.SimpleNamespace(
    slots=P, prompt_tokens=L, group=G, mesh=sharding.make_mesh({}, jax.devices()[:1])
  )
  decode = types.SimpleNamespace(decode=types.SimpleNamespace(max_tokens=T))
  exact = 0
  for tokens, predicted in itertools.product(
    (12, 17, 18, 24, 29, 30, 48, 100), (T, 3 * T, 4 * T, B * T)
  ):
    size = packing.PackingSpec(2, tokens, predicted, rows, shares)
    update = types.SimpleNamespace(minibatches=1, packing=size)
    spec = types.SimpleNamespace(layout=layout, rollout=decode, update=update)
    want = plan(size, np.full(P, L), np.full(B, T), np.ones(B, bool)).bins
    single_rows = rows == 1 or predicted == T or tokens < L + 2 * (T - 1)
    groups = min(rows // G, predicted // (G * T), tokens // (L + G * (T - 1))) if shares else 0
    # Beside these there is no room for a single row.
    left = rows - groups * G, predicted - groups * G * T, tokens - groups * (L + G * (T - 1))
    whole_groups = groups > 0 and any(np.less(left, (1, T, L + T - 1)))
    exact += whole_groups or single_rows
    found = step_spec.full_bins(spec)
    assert found == want if whole_groups or single_rows else want <= found <= B, size
  assert exact >= 8


@pytest.mark.parametrize('shards', [1, 2, 4, 8])
def test_each_shard_gets_as_many_prompts_and_about_as_many_tokens(shards):
  """Against the order written out; dealt in turns there and back, no shard has much more than another."""
  r = np.random.default_rng(shards)
  for _ in range(20):
    prompt, length = r.integers(1, L + 1, 8), r.integers(0, T + 1, 8 * G)
    learned = r.random(8 * G) < 0.7
    rows = packing.Rows(jnp.int32(prompt), jnp.int32(length), jnp.asarray(learned))
    got = np.asarray(packing.deal(shards, rows))
    np.testing.assert_array_equal(np.sort(got), np.arange(8))
    taken = (learned & (length > 0)).reshape(8, G)
    cost = np.where(taken, length.reshape(8, G) - 1, 0).sum(1) + np.where(taken.any(1), prompt, 0)
    hands = [[] for _ in range(shards)]
    for turn, start in enumerate(range(0, 8, shards)):
      dealt = sorted(range(8), key=lambda p: (-cost[p], p))[start : start + shards]
      for shard, p in zip(range(shards), dealt if turn % 2 == 0 else dealt[::-1], strict=True):
        hands[shard].append(p)
    assert got.reshape(shards, -1).tolist() == hands
    tokens = [cost[hand].sum() for hand in hands]
    assert max(tokens) - min(tokens) <= cost.max()


# A case by hand: the prompts are 11 12 13, 21 and 31 32; the row of a prompt's second rollout of prompt 2 is empty.
SIZE = packing.PackingSpec(bins=2, tokens=8, predicted=7, rows=3, shares_prompt=True)
PROMPT, LENGTH = [3, 1, 2], [3, 2, 4, 1, 5, 2]
LEARNED = [True, True, True, True, False, True]
COMPLETIONS = 100 * np.arange(6)[:, None] + np.arange(5)  # 203: the token at place 3 of row 2
PROMPTS = np.array([[11, 12, 13], [21, 0, 0], [31, 32, 0]])
# Each bin: prompt 0 with rows 0 and 1; then prompt 1 with rows 2 and 3, of which 3 has no token that is read, and
# prompt 2 with row 5.
TOKENS = [[11, 12, 13, 0, 1, 100, -1, -1], [21, 200, 201, 202, 31, 32, 500, -1]]
POSITIONS = [[0, 1, 2, 3, 4, 3, -1, -1], [0, 1, 2, 3, 0, 1, 2, -1]]
COPIES = [[1, 1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 3, 3, 3, 0]]
TARGETS = [0, 1, 2, 100, 101, 200, 201, 202, 203, 300, 500, 501]
SOURCES = [2, 3, 4, 2, 5, 8, 9, 10, 11, 8, 13, 14]  # tokens of the second bin count from 8 on
IDENTITIES = [[0, 1, 2, 9, 10, 14, -1, -1], [3, 19, 20, 21, 6, 7, 34, -1]]
ROWS = [0, 1, 6, 2, 3, 5]  # in the places of both bins
SEES = [
  ['0', '01', '012', '0123', '01234', '0125', '', ''],
  ['0', '01', '012', '0123', '4', '45', '456', ''],
]


def by_hand():
  zeros_P = np.zeros(3, np.int32)
  prompts = Prompts(np.int32(PROMPTS), np.int32(PROMPT), zeros_P, zeros_P, zeros_P.astype('f4'))
  rollout = data.as_rollout(np.int32(COMPLETIONS), np.int32(LENGTH))
  ones_B = np.ones(6, np.float32)
  return jax.tree.map(jnp.asarray, Batch(prompts, rollout, ones_B, ones_B))


def spec_of(size):
  mesh = sharding.make_mesh({}, jax.devices()[:1])
  layout, update = types.SimpleNamespace(mesh=mesh), types.SimpleNamespace(packing=size)
  return types.SimpleNamespace(layout=layout, update=update)


def real(x, copy):
  return np.where(copy > 0, x, -1).tolist()


def test_a_small_microbatch_written_out():
  packed = microbatch.pack(spec_of(SIZE), by_hand(), jnp.asarray(LEARNED))
  assert int(packed.microbatches) == 1
  one = microbatch.take_microbatch(spec_of(SIZE), packed, jnp.int32(0))
  layout = jax.tree.map(lambda x: np.asarray(x)[0], one.layout)
  copy, count = layout.copy_NxS, int(layout.used)
  assert copy.tolist() == COPIES and layout.row_F.tolist() == ROWS
  assert real(one.tokens_RxS, copy) == TOKENS
  assert real(layout.position_NxS, copy) == POSITIONS
  assert real(one.identity_RxS, copy) == IDENTITIES
  assert count == len(TARGETS) and one.target_ZxU[0, :count].tolist() == TARGETS
  assert layout.source_U[:count].tolist() == SOURCES
  mask = microbatch.attention_mask(jnp.asarray(copy), jnp.asarray(layout.part_NxS))
  for bin_, sees in zip(np.asarray(mask), SEES, strict=True):
    assert [''.join(map(str, np.flatnonzero(keys))) for keys in bin_] == sees


def test_values_of_tokens_and_rows_are_exchanged_without_loss():
  packed = microbatch.pack(spec_of(SIZE), by_hand(), jnp.asarray(LEARNED))
  one = microbatch.take_microbatch(spec_of(SIZE), packed, jnp.int32(0))
  taken = one.take_rows(dict(number=1 + jnp.arange(6)[None], tokens=jnp.asarray(COMPLETIONS)[None]))
  assert taken['number'].tolist() == [1, 2, 0, 3, 4, 6]  # 0: no row
  rows = np.where(one.is_real, taken['tokens'], 0)
  by_row = [[0, 1, 2, 0, 0], [100, 101, 0, 0, 0], [0] * 5, [200, 201, 202, 203, 0]]
  assert rows.tolist() == [*by_row, [300, 0, 0, 0, 0], [500, 501, 0, 0, 0]]
  tokens = one.to_tokens(jnp.asarray(rows))
  assert tokens[0, : len(TARGETS)].tolist() == TARGETS and not tokens[0, len(TARGETS) :].any()
  np.testing.assert_array_equal(one.to_rows(tokens), rows)
  np.testing.assert_array_equal(one.to_rows(one.target_ZxU), rows)


def written(size, prompts, prompt, completions, length, placed):
  """The columns of the bins of a microbatch as (token, position, identity, keys that it sees), and predicted tokens."""
  columns, predicted = [], []
  for n, rows in enumerate(placed):
    filled, behind = [], []
    for b, start, has_copy in rows:
      p = b // G
      if has_copy:
        behind = list(range(start, start + prompt[p]))
        for i, column in enumerate(behind):
          filled.append((prompts[p, i], i, p * L + i, tuple(behind[: i + 1])))
          assert len(filled) == column + 1
      sees, last = list(behind), behind[-1]
      for t in range(length[b]):
        predicted.append((completions[b, t], n * size.tokens + last))
        if t < length[b] - 1:
          last = len(filled)
          sees.append(last)
          identity = P * L + b * T + t
          filled.append((completions[b, t], prompt[p] + t, identity, tuple(sees)))
    columns.append(filled)
  return columns, predicted


@functools.partial(jax.jit, static_argnums=0)
def laid_out(size, batch, learned):
  spec = spec_of(size)
  packed = microbatch.pack(spec, batch, learned)
  count = packed.plan.row_KxJ.shape[1] // size.bins
  take = lambda number: microbatch.take_microbatch(spec, packed, number)  # noqa: E731
  return packed.microbatches, jax.lax.map(take, jnp.arange(count))


@pytest.mark.parametrize('shape', SHAPES[1:4])
@pytest.mark.parametrize('more', [0, 20])
def test_microbatches_hold_the_planned_rows(shape, more):
  """Random minibatches, column by column: tokens, positions, what each sees, what predicts what."""
  bins, rows, shares = shape
  size = packing.PackingSpec(bins, L + T - 1 + more, T + more, rows, shares)
  zeros_P, ones_B = np.zeros(P, np.int32), np.ones(B, np.float32)
  for seed in range(12):
    prompt, length, learned = drawn(seed)
    r = np.random.default_rng(seed)
    prompts, completions = r.integers(0, 999, (P, L)), r.integers(0, 999, (B, T))
    batch = Batch(
      Prompts(np.int32(prompts), np.int32(prompt), zeros_P, zeros_P, zeros_P.astype('f4')),
      data.as_rollout(np.int32(completions), np.int32(length)), ones_B, ones_B,
    )  # fmt: skip
    count, found = jax.device_get(laid_out(size, batch, learned))
    placed = reference_plan(size, prompt, length, learned)
    assert count == -(-len(placed) // bins)
    for number in range(count):
      one = jax.tree.map(lambda x: x[number], found)  # noqa: B023
      wanted = placed[number * bins : (number + 1) * bins]
      columns, predicted = written(size, prompts, prompt, completions, length, wanted)
      layout = jax.tree.map(lambda x: x[0], one.layout)
      got = list(zip(one.target_ZxU[0], layout.source_U, strict=True))[: layout.used]
      assert got == predicted
      mask = np.asarray(microbatch.attention_mask(layout.copy_NxS, layout.part_NxS))
      for n in range(bins):
        filled = columns[n] if n < len(columns) else []
        ends = len(filled)
        seen = [tuple(np.flatnonzero(keys)) for keys in mask[n]]
        parts = one.tokens_RxS[n], layout.position_NxS[n], one.identity_RxS[n], seen
        assert list(zip(*parts, strict=True))[:ends] == filled
        assert not layout.copy_NxS[n, ends:].any() and not any(seen[ends:])

"""Completions of one run in the batch of another: tokens, rewards and what does not fit."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxrl_llm import rewards
from jaxrl_llm.config import loading
from jaxrl_llm.distributed import sharding
from jaxrl_llm.learner import empty_records
from jaxrl_llm.replay.shared_rollouts import Completion, SharedGroup
from jaxrl_llm.runner import grading, setup, shared_groups
from jaxrl_llm.types import STOPPED, TRUNCATED, Row, UserError

P, G, L, T = 2, 3, 12, 8


def context(folder, *overrides):
  """A run on short strings to copy, graded by equality."""
  settings = (
    *('model=scratch', f'prompts={P}', f'rollouts={G}', f'prompt_tokens={L}'),
    *(f'completion_tokens={T}', 'scratch.width=16', 'scratch.layers=1', 'scratch.heads=2'),
    *('scratch.kv_heads=1', 'scratch.mlp=32', 'scratch.max_tokens=64', 'data.size=6'),
    'data.tasks=({"name": "copy", "min_length": 2, "max_length": 3},)',
    *('replay.reuse.fn=shared', f'replay.reuse.folder={folder}'),
  )
  c = loading.load('tiny', [f'--config.{text}' for text in (*settings, *overrides)])
  return setup.build_context(c, sharding.make_mesh(c.mesh, jax.devices()[:1]))


class Pool:
  """Grading by equality."""

  def score(self, rows, texts):
    part_Bx1 = np.array([[row.answer == t] for row, t in zip(rows, texts, strict=True)], np.float32)
    return rewards.Scores(part_Bx1, np.zeros(len(rows), np.int8), {}, '')


def graded(run, texts, step=0):
  """A graded step with these completions of prompts 0 and 1; None: the answer; one that ends in … was cut."""
  prompts = run.tables.train.prompts(np.arange(P), born=step)
  rollout, end = (
    empty_records.empty_rollout(run.spec),
    next(iter(run.models.policy.tokenizer.end_ids)),
  )
  rows = [row for row in run.tables.train.rows_of(prompts) for _ in range(G)]
  for b, (row, text) in enumerate(zip(rows, texts, strict=True)):
    cut = text is not None and text.endswith('…')
    ids = run.models.policy.tokenizer.encode(row.answer if text is None else text.rstrip('…'))
    ids = [*ids, *([] if cut else [end])]
    rollout.tokens_BxT[b, : len(ids)], rollout.length_B[b] = ids, len(ids)
    rollout.reason_B[b] = TRUNCATED if cut else STOPPED
  return grading.grade(run, Pool(), prompts, rollout)


def exchanged(run, step_graded, mixed=(True, True), step=0):
  return shared_groups.exchange(run, run.replay.reuse, Pool(), step_graded, np.array(mixed), step)


TEXTS = (None, '1', '12…', '', None, '99')


def test_a_run_learns_the_mixed_groups_of_another_with_tokens_and_rewards_of_its_own(tmp_path):
  first, second = context(tmp_path), context(tmp_path)
  own = graded(first, TEXTS)
  alone = exchanged(first, own)
  assert not alone.rollout.length_B[P * G :].any() and alone.prompts.index_P.tolist() == [
    0,
    1,
    -1,
    -1,
  ]
  ours = graded(second, ['7'] * P * G)
  got = exchanged(second, ours, (False, False), step=5)
  assert second.replay.reuse.counts == dict(published=0, received=2, malformed=0, errors=0)
  assert got.replayed_B.tolist() == [0] * P * G + [1] * P * G
  assert sorted(got.prompts.index_P.tolist()) == [-3, -2, 0, 1] and got.success_B is None
  np.testing.assert_array_equal(got.rollout.tokens_BxT[: P * G], ours.batch.rollout.tokens_BxT)
  # The two groups arrive in any order.
  theirs = {tuple(own.batch.prompts.tokens_PxL[p]): p for p in range(P)}
  arrived = [theirs[tuple(x)] for x in got.prompts.tokens_PxL[P:]]
  assert sorted(arrived) == [0, 1]
  for slot, p in enumerate(arrived, P):
    assert got.prompts.length_P[slot] == own.batch.prompts.length_P[p]
    mine, them = np.arange(slot * G, slot * G + G), np.arange(p * G, p * G + G)
    for name in ('tokens_BxT', 'length_B', 'reason_B'):
      want = getattr(own.batch.rollout, name)[them]
      np.testing.assert_array_equal(getattr(got.rollout, name)[mine], want)
    for name in ('reward_B', 'correct_B'):
      np.testing.assert_array_equal(getattr(got, name)[mine], getattr(own.batch, name)[them])
  assert got.reward_B[P * G :].sum() == 2
  assert (got.rollout.version_BxT[P * G :] == -1).all() and not got.rollout.logp_BxT[P * G :].any()
  assert second.replay.reuse.metrics(got, P)['replay/rows'] == P * G


def test_only_mixed_groups_are_shared_without_rows_of_no_tokens(tmp_path):
  first, second = context(tmp_path), context(tmp_path)
  own = graded(first, TEXTS)
  own.batch.rollout.length_B[1] = 0  # dropped, or unfinished
  exchanged(first, own, (True, False))
  got = exchanged(second, graded(second, TEXTS))
  assert (got.rollout.length_B[P * G :] > 0).tolist() == [True, True, False, False, False, False]


def shared(row, *texts):
  return SharedGroup(row, tuple(Completion(text, True) for text in texts))


def slots(run, *groups):
  """The batch slots of groups of other runs, without the fresh ones."""
  batch = exchanged(run, graded(run, TEXTS))
  empty = shared_groups.group_batches.slots(batch, np.array([P, P + 1]))
  return shared_groups.graded_slots(run, Pool(), groups, empty, 0)


def test_rows_beyond_the_group_and_tokens_beyond_the_cap_are_cut(tmp_path):
  run = context(tmp_path)
  row = Row('x', 'copy 12=', (), '1' * T, 'other', {})
  got = slots(run, shared(row, '1' * T, '1' * (T - 1), '1' * (T + 9), '2'))
  assert got.rollout.length_B.tolist() == [T, T, T, 0, 0, 0]
  assert got.rollout.reason_B[:G].tolist() == [TRUNCATED, STOPPED, TRUNCATED]
  assert got.reward_B[:G].tolist() == [1, 0, 1]  # of the text that is learned


def test_a_prompt_that_does_not_fit_or_cannot_be_rendered_leaves_its_slot_empty(tmp_path):
  run = context(tmp_path)
  long = Row('x', '1' * (L + 1), (), '1', 'other', {})
  chat = Row('y', '', (dict(role='user', content='2'),), '1', 'other', {})
  fits = Row('z', '1' * L, (), '1', 'other', {})
  got = slots(run, shared(long, '1'), shared(chat, '1'), shared(fits, '1'))
  assert got.prompts.length_P.tolist() == [L, 0] and got.prompts.index_P.tolist() == [-2, -1]
  assert got.rollout.length_B.tolist() == [2, 0, 0, 0, 0, 0] and got.reward_B.sum() == 1


def test_the_first_batch_of_a_run_has_the_arrays_of_the_others(tmp_path):
  """One compiled program takes both."""
  run = context(tmp_path)
  joined = exchanged(run, graded(run, TEXTS))
  empty = empty_records.empty_batch(run.spec)
  shapes = [jax.tree.map(lambda x: (x.shape, x.dtype), batch) for batch in (joined, empty)]
  assert shapes[0] == shapes[1]


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
  (tmp_path / 'file').write_text('')
  with pytest.raises(UserError, match='replay.reuse.folder=.*file'):
    context(tmp_path / 'file')

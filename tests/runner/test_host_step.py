"""The host step: evidence for the curriculum, grading, and a pending step in a checkpoint."""

from __future__ import annotations

import functools
import json
import types

import numpy as np
import pytest

from jaxrl_llm import curriculum, replay, rewards
from jaxrl_llm.checkpointing import run_dir
from jaxrl_llm.config import loading as configs
from jaxrl_llm.curriculum.curriculum import Proposal
from jaxrl_llm.curriculum.prompt_features import PromptFeatures
from jaxrl_llm.data.pipeline import PromptTable
from jaxrl_llm.rewards import outcomes
from jaxrl_llm.runner import grading, host_step, log_records
from jaxrl_llm.runner.context import EncodedPrompts
from jaxrl_llm.types import ABORTED, STOPPED, TRUNCATED, UNFINISHED, Batch, Prompts, Rollout, Row

P, G, T = 4, 4, 3
B = P * G


class Observer:
  """Stands for the curriculum and the lengths."""

  features = None

  def observe(self, *evidence, **graded):
    self.observed, self.graded = evidence, graded

  def metrics(self):
    return {}


def table_of(rows):
  """The rows as a training set; their prompts are not read."""
  return PromptTable(tuple(rows), (), 0, 0, '')


def sevens_of(sources=('made',)):
  """40 rows with the answer 7: the first ones of the first source, the last ones of the last."""
  return [Row(str(i), '?', (), '7', sources[i * len(sources) // 40], {}) for i in range(40)]


def make_context():
  config = types.SimpleNamespace(rollouts=G, seed=0, rewards=configs.default().rewards)
  config.data, config.objective = configs.default().data, configs.default().objective
  batch_stages = types.SimpleNamespace(reward_shaping=None)
  method = types.SimpleNamespace(needs_demo=False, needs_parts=False, batch_stages=batch_stages)
  spec = types.SimpleNamespace(
    objective=types.SimpleNamespace(method=method, solution_tokens=0),
    layout=types.SimpleNamespace(slots_per_prompt=1),
  )
  grading = types.SimpleNamespace(
    rewards=(rewards.Part('sevens', 1.0, None),),
    vote=None,
    labels=None,
    truncate=None,
    failures=rewards.FailurePolicy({}),
    scale=outcomes.scale(config.rewards),
  )
  return types.SimpleNamespace(
    config=config,
    spec=spec,
    models=types.SimpleNamespace(policy=types.SimpleNamespace(tokenizer=Words())),
    selection=types.SimpleNamespace(curriculum=Observer(), lengths=Observer(), hints=None),
    replay=types.SimpleNamespace(unfinished=None, drafts=None, reuse=None, collector=None),
    grading=grading,
    episodes=None,
    token_stats=None,
    teacher_text=None,
  )


def make_batch(length_B, correct_B, reason_B, weight_B):
  zeros = np.zeros((B, T), np.int32)
  index_P = np.arange(P, dtype=np.int32) * 10
  prompts = Prompts(np.zeros((P, 2), np.int32), np.ones(P, np.int32), index_P, index_P, index_P)
  rollout = Rollout(
    zeros,
    zeros.astype(np.float32),
    np.array(length_B, np.int32),
    np.array(reason_B, np.int8),
    zeros,
    np.array(weight_B, np.float32),
    np.zeros((B, 0), np.float32),
  )
  correct_B = np.array(correct_B, np.float32)
  return Batch(prompts, rollout, correct_B, correct_B)


def test_evidence_is_of_finished_groups_existing_rows_and_their_weights():
  length_B = [3, 2, 1, 2] + [3, 3, 3, 3] + [2, 0, 0, 1] + [0, 0, 0, 0]
  correct_B = [1, 0, 1, 0] + [1, 1, 0, 0] + [1, 0, 0, 0] + [0, 0, 0, 0]
  reason_B = [STOPPED, TRUNCATED, STOPPED, STOPPED] + [STOPPED] * 4
  reason_B += [STOPPED, ABORTED, ABORTED, STOPPED] + [ABORTED] * 4
  # Right rows of group 0 were three times as likely to be kept: one in four is nearer the truth.
  weight_B = [1, 3, 1, 3] + [1] * 12
  context = make_context()
  batch = make_batch(length_B, correct_B, reason_B, weight_B)
  host_step._observe(context, batch, np.array([True, False, True, True]))
  index, right, count, truncated, tokens, mixed, _ = (
    x.tolist() for x in context.selection.curriculum.observed
  )
  assert index == [0, 20]  # 10 is unfinished; of 30 nothing is left
  assert (right, count, truncated) == ([1, 1], [4, 2], [1, 0])
  assert tokens == [8, 3] and mixed == [True, True]
  assert context.selection.lengths.observed[1].tolist() == [2.0, 1.5]


def test_a_truncated_correct_row_is_not_counted_as_truncated():
  reason_B = [TRUNCATED] * B
  batch = make_batch([3] * B, [1, 0, 0, 1] * P, reason_B, [1] * B)
  context = make_context()
  host_step._observe(context, batch, np.ones(P, bool))
  assert context.selection.curriculum.observed[3].tolist() == [2] * P


def test_a_step_without_a_finished_group_still_ages_the_posterior():
  """Evidence decay by steps counts every step of the run."""
  context = make_context()
  settings = configs.default().curriculum.to_dict() | dict(
    evidence_decay=dict(fn='step', decay=0.5), prior_pooling=dict(fn='none')
  )
  context.selection.curriculum = curriculum.Curriculum(settings, 40, group=G)
  context.selection.lengths = curriculum.LengthEstimate(40)
  batch = make_batch([3] * B, [1] * B, [STOPPED] * B, [1] * B)
  host_step._observe(context, batch, np.arange(P) == 1)
  before = context.selection.curriculum.predict(np.array([10]))[0]
  host_step._observe(context, batch, np.zeros(P, bool))
  after = context.selection.curriculum.predict(np.array([10]))[0]
  assert (before, after) == (5 / 6, 3 / 4)  # Beta(1 + 4, 1), then Beta(1 + 2, 1)


def test_prompts_are_chosen_with_the_length_estimates():
  class Chooses:
    def propose(self, *arguments):
      self.observed = arguments
      return proposed(np.array([3, 1], np.int32))

    def accept(self, proposal):
      pass

    def visits(self, index):
      return index * 0

  context = make_context()
  context.config.prompts, context.config.completion_tokens = 2, T
  context.selection.curriculum, context.selection.lengths, context.replay.unfinished = (
    Chooses(),
    curriculum.LengthEstimate(4),
    None,
  )
  context.selection.lengths.mean[:] = [1, 2, 3, 4]
  context.selection.length_cap, context.replay.collector, context.spec.layout.slots_per_prompt = (
    None,
    None,
    1,
  )
  context.config.curriculum = types.SimpleNamespace(slots_per_prompt=1)
  fresh = make_batch([0] * B, [0] * B, [STOPPED] * B, [1] * B).prompts

  class Table(list):
    def prompts(self, index, born):
      return fresh._replace(index_P=index)

  context.tables = types.SimpleNamespace(train=Table(range(4)))
  prompts, *_ = host_step.build_inputs(context, 5)
  step, slots, lengths, _, busy = context.selection.curriculum.observed
  assert len(busy) == 0
  assert (step, slots) == (5, 2) and lengths(np.array([0, 2])).tolist() == [1, 3]
  assert prompts.expected_P.tolist() == [4, 2]


class Rewriter:
  """Stands for the provider of hints: prompts that are due."""

  def __init__(self, *prompts):
    self.prompts = prompts

  def due(self, most):
    chosen, self.prompts = self.prompts[:most], self.prompts[most:]
    return np.array(chosen, np.int32)

  @property
  def waiting(self):
    return np.array(self.prompts, np.int32)

  def posterior(self, step):
    return None


@pytest.mark.parametrize('due, chosen', [((7,), [7, 1, 3]), ((7, 2, 5, 8), [7, 2, 5])])
def test_prompts_that_are_due_come_first_and_are_not_chosen_twice(due, chosen):
  class Chooses:
    def propose(self, step, slots, lengths, hinted, busy):
      self.busy = busy.tolist()
      return proposed(np.array([1, 3], np.int32)[:slots])

    def accept(self, proposal):
      pass

    def visits(self, index):
      return index * 0

  context = make_context()
  context.config.prompts = 3
  context.config.curriculum = types.SimpleNamespace(slots_per_prompt=1)
  context.tables = types.SimpleNamespace(train=range(40))
  context.selection.curriculum, context.selection.hints = Chooses(), Rewriter(*due)
  got = host_step.choose(context, 5)
  assert got.prompt_index.tolist() == chosen and got.record['asked'] == sorted(due[:3])
  assert context.selection.curriculum.busy == list(due)
  assert context.selection.hints.waiting.tolist() == list(due[3:])


def test_aborted_rows_are_blank_and_counted():
  reason_B = [STOPPED, ABORTED, STOPPED, STOPPED] + [STOPPED] * 8 + [UNFINISHED] + [STOPPED] * 3
  batch = make_batch([2] * B, [0] * B, reason_B, [1] * B)
  context = make_context()
  context.replay.unfinished = replay.PartialRollouts(G, max_age=3)
  rollout, whole_P, metrics = host_step._hold(context, batch.prompts, batch.rollout, 30)
  assert whole_P.tolist() == [True, True, True, False]
  assert rollout.length_B.tolist() == [2, 0, 2, 2] + [2] * 8 + [0] * 4
  assert metrics['generate/aborted_rows'] == 1 and metrics['generate/unfinished_groups'] == 1


def test_a_pending_step_survives_packing():
  batch = make_batch([2] * B, [0] * B, [1] * B, [1] * B)
  pending = host_step.PendingStep(7, batch.prompts, batch.rollout, {'a': np.float32(0.1)})
  back = host_step.unpacked(host_step.packed(pending))
  assert (back.step, back.device_metrics) == (7, {'a': float(np.float32(0.1))})
  for a, b in zip(
    (*pending.prompts, *pending.rollout), (*back.prompts, *back.rollout), strict=True
  ):
    np.testing.assert_array_equal(a, b)


def test_a_step_that_is_graded_survives_packing():
  batch = make_batch([2] * B, [0] * B, [1] * B, [1] * B)
  pending = host_step.PendingStep(7, batch.prompts, batch.rollout, {})
  received = host_step.ReceivedStep(pending, np.arange(4) < 2, {'generate/aborted_rows': 3}, print)
  back = host_step.unpacked_received(host_step.packed_received(received))
  assert back.pending.step == 7 and back.finished_P.tolist() == [True, True, False, False]
  assert back.metrics == received.metrics and back.begun is None
  np.testing.assert_array_equal(back.pending.rollout.tokens_BxT, batch.rollout.tokens_BxT)


class Words:
  """Stands for the tokenizer: a token is its number."""

  def decode(self, tokens, skip_special=True):
    return ' '.join(map(str, tokens)) + ('' if skip_special else ' <s>')


def scores_of(parts_BxK, counts=None, outcome_B=None, message=''):
  if outcome_B is None:
    outcome_B = np.zeros(len(parts_BxK), np.int8)
  return rewards.Scores(np.array(parts_BxK, np.float32), outcome_B, counts or {}, message)


class Sevens:
  """Stands for the pool: right is what ends in 7."""

  def score(self, rows, texts):
    right = np.array([text.endswith('7') for text in texts], np.float32)
    return scores_of(right[:, None], {'grade/errors': len(texts)})


def graded(tokens_BxT, length_B, vote=None, truncate=None):
  context = make_context()
  context.grading.vote, context.grading.truncate = vote, truncate
  context.models.policy = types.SimpleNamespace(tokenizer=Words())
  context.tables = types.SimpleNamespace(train=table_of(list(range(40))))
  batch = make_batch(length_B, [0] * B, [STOPPED] * B, [1] * B)
  rollout = batch.rollout._replace(tokens_BxT=np.array(tokens_BxT, np.int32))
  return grading.grade(context, Sevens(), batch.prompts, rollout)


# Group 0 is for 7, group 1 for 8, group 2 says nothing at all, group 3 agrees on 7.
VOTES = [[5, 0, n] for n in (7, 7, 8, 7, 8, 8, 7, 9, 1, 1, 1, 1, 7, 7, 7, 7)]
SCORED = {'grade/lowest': 0.0, 'grade/highest': 1.0, 'grade/out_of_bounds': 0.0}
GRADED = {'grade/failed_share': 0.0, 'grade/dropped': 0}
SAID_B = [3] * 8 + [0] * 4 + [3] * 4


def test_by_vote_the_rows_own_answers_reach_the_log_alone():
  vote = rewards.majority_vote.Majority(0, lambda text: text)
  batch, _, _, metrics = graded(VOTES, SAID_B, vote)
  want = [1, 1, 0, 1] + [1, 1, 0, 0] + [0] * 4 + [1] * 4
  assert batch.reward_B.tolist() == batch.correct_B.tolist() == want
  want = {'vote_accuracy': 2 / 3, 'vote_share': 9 / 12, 'label_score/mean': 8 / 12}
  for name, value in want.items():
    np.testing.assert_allclose(metrics[f'critic/{name}'], value, rtol=1e-6)
  plain, _, _, none = graded(VOTES, SAID_B)
  assert plain.reward_B.tolist() == [1, 1, 0, 1] + [0, 0, 1, 0] + [0] * 4 + [1] * 4
  assert none == {'grade/errors': 12, 'grade/right': 8 / 12, **GRADED, **SCORED}


def test_all_vote_and_the_first_are_learned_from():
  vote = rewards.majority_vote.Majority(2, lambda text: text)
  batch, *_ = graded([[5, 0, n] for n in (7, 8, 8, 8)] * P, [3] * B, vote)
  assert batch.rollout.length_B.tolist() == [3, 3, 0, 0] * P
  assert batch.reward_B.tolist() == [0, 1, 1, 1] * P


def test_a_cut_row_is_graded_again_by_what_is_left_of_it():
  truncate = rewards.length_truncation.Outliers(deviations=1.0, least_tokens=1)
  tokens = [[7, 7, 7]] * 3 + [[8, 8, 7]] + [[7, 7, 7]] * 4 + [[9, 9, 9]] * 3 + [[8, 8, 7]]
  tokens += [[7, 8, 7], [7, 7, 7], [7, 7, 7], [7, 7, 7]]
  length_B = [1, 1, 1, 3] + [2] * 4 + [1, 1, 1, 3] + [3, 1, 1, 1]
  batch, _, scores, metrics = graded(tokens, length_B, truncate=truncate)
  assert batch.rollout.length_B.tolist() == [1, 1, 1, 2] + [2] * 4 + [1, 1, 1, 3] + [2, 1, 1, 1]
  assert (
    batch.rollout.reason_B.tolist()
    == [STOPPED] * 3 + [TRUNCATED] + [STOPPED] * 8 + [TRUNCATED] + [STOPPED] * 3
  )
  assert batch.correct_B.tolist() == [1, 1, 1, 0] + [1] * 4 + [0, 0, 0, 1] + [0, 1, 1, 1]
  assert scores.texts[3] == '8 8'
  scored = SCORED | {'grade/right': 11 / 16}
  assert metrics == {'grade/errors': 18, 'grade/truncated': 2, **GRADED, **scored}


def test_what_is_landed_holds_replays_that_no_metric_and_no_observer_counts():
  context = make_context()
  context.grading.vote = context.grading.truncate = None
  context.config.seed = 0
  context.models.policy = types.SimpleNamespace(tokenizer=Words())
  context.tables = types.SimpleNamespace(train=table_of(sevens_of()))
  context.replay.unfinished = replay.PartialRollouts(G, max_age=3)
  batch = make_batch([3] * B, [0] * B, [STOPPED] * B, [1] * B)
  rollout = batch.rollout._replace(tokens_BxT=np.array(VOTES, np.int32))
  landed = {}
  for name, kept in dict(
    plain=None,
    replay=replay.reuse.successes(count=1),
  ).items():
    context.replay.reuse, context.replay.collector = kept, None
    for index in (1, 2):
      landed[name] = host_step.land(
        context,
        Sevens(),
        host_step.PendingStep(index, batch.prompts, rollout, {'loss': np.float32(1)}),
      )
  plain, again = landed['plain'], landed['replay']
  assert plain.rollout_records == again.rollout_records and len(again.rollout_records) == B
  assert again.metrics == plain.metrics | {
    **{'replay/rows': 3, 'replay/groups': 3},
    'replay/memory_mb': context.replay.reuse.buffer.bytes / 2**20,
  }
  assert {row['prompt_text'] for row in plain.rollout_records} == {'0 <s>'}
  assert not any({'rewards', 'shaped'} & row.keys() for row in plain.rollout_records)
  assert plain.batch.replayed_B is None and again.batch.replayed_B.sum() == P
  length_PxG = again.batch.rollout.length_B.reshape(P, G + 1)
  assert length_PxG[:, -1].tolist() == [3, 3, 0, 3]
  np.testing.assert_array_equal(length_PxG[:, :G].ravel(), plain.batch.rollout.length_B)


def test_mixed_groups_of_the_last_step_are_landed_behind_the_fresh_ones():
  """Groups 0 and 1 are mixed, group 2 all wrong, group 3 all right. A step does not replay its own groups."""
  context = make_context()
  context.grading.vote = context.grading.truncate = None
  context.tables = types.SimpleNamespace(train=table_of(sevens_of()))
  context.replay.reuse = replay.reuse.mixed_groups(share=0.5)
  batch = make_batch([3] * B, [0] * B, [STOPPED] * B, [1] * B)
  rollout = batch.rollout._replace(tokens_BxT=np.array(VOTES, np.int32))
  landed = []
  for step in (1, 2):
    prompts = batch.prompts._replace(index_P=np.arange(P) + 10 * step)
    pending = host_step.PendingStep(step, prompts, rollout, {})
    landed.append(host_step.land(context, Sevens(), pending))
  first, second = (x.batch.prompts.index_P.tolist() for x in landed)
  assert first == [10, 11, 12, 13] + [-1] * P
  assert second[:P] == [20, 21, 22, 23] and sorted(second[P:]) == [-1, -1, 10, 11]
  rows_PxG = landed[1].batch.reward_B.reshape(2 * P, G)
  assert rows_PxG[second.index(10)].tolist() == [1, 1, 0, 1]
  assert [x.metrics['replay/rows'] for x in landed] == [0, 2 * G]
  assert len(landed[1].rollout_records) == B  # of the sampled rows alone


class Shown:
  """Stands for the hints: the first prompt of a step is hinted, and its group is not learned."""

  def prefixes(self, prompts):
    return [np.zeros(0, np.int32)] * P

  def receive(self, prompts, rollout):
    return rollout, {}

  def update(self, batch, finished_P, part_BxK):
    hinted_B = np.repeat(np.asarray(batch.prompts.hint_P) > 0, G)
    prompts = batch.prompts._replace(tokens_PxL=np.zeros_like(batch.prompts.tokens_PxL))
    rollout = replay.blank(batch.rollout, ~hinted_B)
    return batch._replace(prompts=prompts, rollout=rollout), {}


def test_what_a_hint_made_right_is_injected_at_the_next_plain_visit_and_not_learned_before():
  """Group 0 is mixed under a hint and then all wrong, group 1 all wrong twice, groups 2 and 3 all right."""
  context = make_context()
  context.grading.vote = context.grading.truncate = None
  context.tables = types.SimpleNamespace(train=table_of(sevens_of()))
  context.replay.reuse, context.selection.hints = replay.reuse.cached(), Shown()
  batch, landed = make_batch([3] * B, [0] * B, [STOPPED] * B, [1] * B), []
  for step, last in ((1, [8, 7, 8, 7]), (2, [8] * G)):
    tokens_BxT = np.array([[5, b, n] for b, n in enumerate(last + [8] * G + [7] * 2 * G)], np.int32)
    hint_P = np.array([step == 1, 0, 0, 0], np.float32)
    hinted = (9 * hint_P[:, None] * np.ones(2)).astype(np.int32)
    prompts = batch.prompts._replace(tokens_PxL=hinted, hint_P=hint_P)
    rollout = batch.rollout._replace(tokens_BxT=tokens_BxT)
    pending = host_step.PendingStep(step, prompts, rollout, {})
    landed.append(host_step.land(context, Sevens(), pending))
  first, second = (x.batch for x in landed)
  assert first.rollout.length_B.tolist() == [0] * G + [3] * 3 * G and not first.replayed_B.any()
  assert second.rollout.length_B.tolist() == [3] * B
  assert second.replayed_B.reshape(P, G).sum(1).tolist() == [1, 0, 0, 0]
  (at,) = np.flatnonzero(second.replayed_B)
  assert second.rollout.tokens_BxT[at].tolist() == [5, 1, 7] and second.reward_B[at] == 1
  assert not first.prompts.tokens_PxL.any() and not second.prompts.tokens_PxL.any()
  assert [x.metrics['replay/rows'] for x in landed] == [0, 1]


def proposed(index):
  """Every second one is an audit."""
  why = tuple('audit' if i % 2 else 'picked' for i in range(len(index)))
  worth = np.where(np.arange(len(index)) % 2, np.nan, index / 100)
  return Proposal(index, index / 50, index / 40, worth, 0.123456, why)


def choosing(each=1, allocate=None, collect=None, held=()):
  """Parts whose curriculum proposes 10, 11, 12, … of 40 prompts, for 6 slots."""
  context = make_context()
  context.config.prompts, context.config.curriculum = (
    6,
    types.SimpleNamespace(slots_per_prompt=each),
  )
  context.tables = types.SimpleNamespace(train=range(40))

  def propose(step, slots, lengths, aided, busy):
    return proposed(np.setdiff1d(np.arange(10, 40), busy)[:slots])

  posterior = lambda index: (index / 10, np.ones(len(index)))  # noqa: E731
  visits = lambda index: index % 3  # noqa: E731
  predict = lambda index, group: (None, None, group / 100)  # noqa: E731
  own = dict(posterior=posterior, visits=visits, predict=predict, accept=lambda proposal: None)
  context.selection.curriculum = types.SimpleNamespace(propose=propose, **own)
  context.selection.lengths = lambda index: np.full(len(index), 5.0)
  context.replay.unfinished = replay.PartialRollouts(G, max_age=3)
  if len(held):
    context.replay.unfinished.prompts = Prompts(*[np.array(held)] * 5)
  context.replay.collector, context.selection.allocate = collect, allocate
  return context


def test_slots_go_to_new_prompts_that_are_not_already_running():
  index, part, weight, _ = host_step.choose(choosing(held=[11, 30]), 0)
  assert index.tolist() == [10, 12, 13, 14] and not part.any() and (weight == 1).all()


def test_prompts_of_steps_that_are_not_graded_yet_are_not_chosen_again():
  choice = host_step.choose(choosing(held=[11, 30]), 0, [np.array([10, 13]), np.array([14])])
  assert choice.prompt_index.tolist() == [12, 15, 16, 17]
  assert choice.record['continued'] == [11, 30]
  too_few = [np.arange(i, i + 10) for i in range(0, 40, 10)]
  assert host_step.choose(choosing(held=[11]), 0, too_few).prompt_index.tolist() == [
    10,
    *range(12, 16),
  ]


def real_choosing(size=60, prompts=8, collect=None, **settings):
  """As `choosing`, with the curriculum itself; even prompts are of source 'a', odd ones of 'b'."""
  context = choosing(collect=collect)
  context.config.prompts, context.tables = prompts, types.SimpleNamespace(train=range(size))
  plain = dict(evidence_decay=dict(fn='none'), prior_pooling=dict(fn='none'))
  context.selection.curriculum = curriculum.Curriculum(
    configs.default().curriculum.to_dict() | plain | settings,
    size,
    group=G,
    columns=dict(source=['ab'[i % 2] for i in range(size)], traits=np.eye(size)),
  )
  return context


def hold(context, index):
  context.replay.unfinished.prompts = (
    Prompts(*[np.array(index, np.int32)] * 5) if len(index) else None
  )


def observe(context, index, k):
  n = np.full(len(index), G)
  context.selection.curriculum.observe(np.array(index), np.array(k), n)


@pytest.mark.parametrize('pick', ['softmax', 'top'])
def test_retired_prompts_return_although_groups_are_held(pick):
  """Audits stand last in a proposal: they must not be what gives way to the groups that go on."""
  context = real_choosing(eligibility=dict(fn='retire', share=0.1), selection=dict(fn=pick))
  for _ in range(3):
    observe(context, range(20), [G] * 20)
  assert context.selection.curriculum.retired().tolist() == [*range(20)]
  random, audits, slots = np.random.default_rng(0), 0, 0
  for step in range(300):
    held = random.choice(60, step % 5, replace=False)  # new ones for 8, 7, 6, 5 and 4 slots
    hold(context, held)
    choice = host_step.choose(context, step)
    assert len(set(choice.prompt_index.tolist())) == len(choice.prompt_index) == 8 - len(held)
    assert not np.isin(choice.prompt_index, held).any()
    audits, slots = audits + (choice.prompt_index < 20).sum(), slots + len(choice.prompt_index)
    assert choice.record['why'].count('audit') == (choice.prompt_index < 20).sum()
  assert audits == int(0.1 * slots)


def test_domains_get_their_quota_of_the_slots_there_are(monkeypatch):
  quotas = []
  mix = curriculum.curriculum.domain_mix.mix

  def recorded(names, done, slots, random, **settings):
    quotas.append((slots, mix(names, done, slots, random, **settings)))
    return quotas[-1][1]

  context = real_choosing(
    domain_mix=dict(fn='mix', targets=dict(a=0.75, b=0.25)), eligibility=dict(fn='none')
  )
  context.selection.curriculum._stages['domain_mix'] = functools.partial(
    recorded, targets=dict(a=0.75, b=0.25)
  )
  for step in range(40):
    hold(context, range(step % 4))
    choice = host_step.choose(context, step)
    slots, quota = quotas[-1]
    assert slots == len(choice.prompt_index) == 8 - step % 4
    assert np.bincount(choice.prompt_index % 2, minlength=2).tolist() == quota.tolist()


def test_a_reference_set_and_hints_leave_out_what_runs_and_fill_every_slot():
  context = real_choosing(size=12, prior_pooling=dict(fn='kernel', every=1))
  drawn = set()
  for step in range(40):
    hold(context, [3, 5, 7])
    choice = host_step.choose(context, step)
    assert len(choice.prompt_index) == 5 and choice.record['why'] == ['reference'] * 5
    drawn |= set(choice.prompt_index.tolist())
  assert drawn == set(range(12)) - {3, 5, 7}
  context = real_choosing(size=12, selection=dict(fn='top'), eligibility=dict(fn='none'))
  for _ in range(4):
    observe(context, range(12), [0] * 12)
  aided = curriculum.HintedPosteriors(np.array([3, 8]), np.full(2, 5.0), np.full(2, 5.0))
  context.selection.hints = Rewriter()
  context.selection.hints.posterior = lambda step: aided
  hold(context, [3, 5, 7])
  choice = host_step.choose(context, 0)
  assert (
    choice.prompt_index[0] == 8
    and len(choice.prompt_index) == 5
    and not {3, 5, 7} & set(choice.prompt_index)
  )


def test_prompts_that_wait_for_rollouts_are_no_audits_either():
  waiting = types.SimpleNamespace(
    waiting_prompts=np.arange(10), requests=lambda: (np.array([4, 4]), np.array([1, 2]))
  )
  context = real_choosing(size=30, collect=waiting, eligibility=dict(fn='retire', share=0.5))
  for _ in range(3):
    observe(context, range(12), [G] * 12)
  for step in range(30):
    index = host_step.choose(context, step).prompt_index
    assert index[:2].tolist() == [4, 4] and len(index) == 8
    assert index.min() >= 4 and not np.isin(index[2:], np.arange(10)).any()
    assert np.isin(index[2:], [10, 11]).sum() == 2  # of three audits two find a retired prompt


def test_two_processes_with_the_same_groups_held_choose_the_same():
  ours, theirs = (real_choosing(candidates=dict(fn='stream', multiple=2)) for _ in range(2))
  for step in range(20):
    for context in (ours, theirs):
      hold(context, [*range(step % 6)])
    one, other = host_step.choose(ours, step), host_step.choose(theirs, step)
    assert (
      one.prompt_index.tolist() == other.prompt_index.tolist()
      and len(one.prompt_index) == 8 - step % 6
    )


def test_a_choice_records_each_new_prompt_once_with_its_reason():
  waiting = types.SimpleNamespace(
    waiting_prompts=np.array([13]), requests=lambda: (np.array([13]), np.ones(1))
  )
  record = host_step.choose(choosing(collect=waiting, held=[30]), 7).record
  assert record['training/global_step'] == 7 and record['prompt'] == [10, 11, 12, 14]
  assert record['why'] == ['picked', 'audit', 'picked', 'audit']
  assert record['worth'] == [0.1, None, 0.12, None] and record['mean_worth'] == 0.1235
  assert record['mixed'] == [0.25, 0.275, 0.3, 0.35] and record['success'][0] == 0.2
  assert record['visits'] == [1, 2, 0, 2] and (record['asked'], record['continued']) == ([13], [30])
  assert json.loads(json.dumps(record)) == record


def test_where_all_slots_are_held_nothing_new_is_chosen():
  index, part, weight, _ = host_step.choose(choosing(held=[11, 30, 12, 13, 14, 15]), 0)
  assert len(index) == len(part) == len(weight) == 0


def test_prompts_get_the_slots_that_the_rule_allots():
  asked = []

  def allocate(*arguments):
    asked.append(arguments)
    return curriculum.allocation.Allocation(np.array([1, 3, 2]), np.array([2.0, 1.0, 0.5]))

  index, part, weight, record = host_step.choose(choosing(each=2, allocate=allocate), 0)
  assert index.tolist() == [10, 11, 11, 11, 12, 12] and part.tolist() == [0, 0, 1, 2, 0, 1]
  assert weight.tolist() == [2, 1, 1, 1, 0.5, 0.5]
  # All slots of a prompt are one group, and that one is expected to be mixed or not.
  assert record['mixed'] == [G / 100, 3 * G / 100, 2 * G / 100]
  (alpha, _, length, slots, unit) = asked[0]
  assert (
    alpha.tolist() == [1, 1.1, 1.2] and length.tolist() == [5, 5, 5] and (slots, unit) == (6, G)
  )


def test_what_prompts_lack_comes_first_and_they_are_not_proposed_meanwhile():
  waiting = types.SimpleNamespace(
    waiting_prompts=np.array([11, 13]), requests=lambda: (np.array([13, 13]), np.array([1, 2]))
  )
  index, part, *_ = host_step.choose(choosing(collect=waiting), 0)
  assert index.tolist() == [13, 13, 10, 12, 14, 15] and part.tolist() == [1, 2, 0, 0, 0, 0]


def test_slots_of_a_prompt_are_one_entry_of_evidence():
  index_P = np.array([7, 3, 7, -1], np.int32)
  batch = make_batch([1] * 12 + [0] * 4, [1, 0, 0, 0] * 3 + [0] * 4, [STOPPED] * B, [1] * B)
  batch = batch._replace(prompts=batch.prompts._replace(index_P=index_P))
  context = make_context()
  host_step._observe(context, batch, np.ones(P, bool))
  assert [x.tolist() for x in context.selection.curriculum.observed[:3]] == [[3, 7], [1, 2], [4, 8]]


def test_hinted_groups_are_no_evidence():
  batch = make_batch([1] * B, [1] * B, [STOPPED] * B, [1] * B)
  hint_P = np.array([0, 0.5, 0, 1], np.float32)
  batch = batch._replace(prompts=batch.prompts._replace(hint_P=hint_P))
  context = make_context()
  host_step._observe(context, batch, np.array([True, True, False, True]))
  assert (
    context.selection.curriculum.observed[0].tolist()
    == [0]
    == context.selection.lengths.observed[0].tolist()
  )


def test_rows_count_what_their_prompts_were_allotted():
  batch = make_batch([3] * B, [0] * B, [STOPPED] * B, [2] * B)
  context = make_context()
  context.grading.vote = context.grading.truncate = None
  context.models.policy = types.SimpleNamespace(tokenizer=Words())
  context.tables = types.SimpleNamespace(train=table_of(list(range(40))))
  prompts = batch.prompts._replace(weight_P=np.array([1, 0.5, 3, 1], np.float32))
  got, *_ = grading.grade(context, Sevens(), prompts, batch.rollout)
  assert got.rollout.weight_B.reshape(P, G)[:, 0].tolist() == [2, 1, 6, 2]


def test_rewards_follow_a_label_that_the_majority_has_come_to_contradict():
  """Group 0 says 7 more and more often where the data says 8; the data's label stays in the log."""
  context = make_context()
  context.grading.vote = context.grading.truncate = None
  context.grading.labels = curriculum.labels.majority_refined(min_slope=0.05, after=2)
  context.grading.read_answer = lambda text: text.split()[-1]
  context.models.policy = types.SimpleNamespace(tokenizer=Words())
  rows = {0: '8', 10: '7', 20: '1', 30: '7'}
  table = [Row(str(i), f'?{i}', (), rows.get(i, ''), 'made', {}) for i in range(40)]
  context.tables = types.SimpleNamespace(train=table_of(table))

  class Pool:
    def score(self, rows, texts):
      right = [text.split()[-1] == row.answer for row, text in zip(rows, texts, strict=True)]
      return scores_of(np.array(right, np.float32)[:, None])

  seen = []
  for sevens in (2, 3, 4):
    said = [[0, 0, 7]] * sevens + [[0, 0, 8 + i] for i in range(4 - sevens)]
    said += [[0, 0, 7]] * 4 + [[0, 0, 1]] * 4 + [[0, 0, 9]] * 4
    batch = make_batch([3] * B, [0] * B, [STOPPED] * B, [1] * B)
    rollout = batch.rollout._replace(tokens_BxT=np.array(said, np.int32))
    got, told_rows, _, metrics = grading.grade(context, Pool(), batch.prompts, rollout)
    seen.append((got.reward_B.reshape(P, G).sum(1).tolist(), metrics['labels/replaced']))
    assert told_rows[0].answer == '8'
  assert seen == [([1, 4, 4, 0], 0), ([1, 4, 4, 0], 0), ([4, 4, 4, 0], 1)]
  (suspect,) = grading.suspect_labels(context)
  assert suspect == dict(
    prompt=0, given='8', majority='7', share=1.0, visits=3, question='?0', id='0'
  )


class Parted:
  """Stands for a pool of two graders: half right is what ends in 7, and good form what begins with 5."""

  def score(self, rows, texts):
    part_BxK = [[0.5 * text.endswith('7'), text.startswith('5')] for text in texts]
    return scores_of(part_BxK)


def test_a_reward_of_several_parts_is_their_weighted_sum_and_the_first_says_what_is_right():
  context = make_context()
  context.grading.vote = context.grading.truncate = None
  context.models.policy = types.SimpleNamespace(tokenizer=Words())
  context.tables = types.SimpleNamespace(train=table_of(list(range(40))))
  context.config.rewards.right = 0.5
  context.grading.scale = outcomes.scale(context.config.rewards)
  context.grading.rewards += (rewards.Part('form', 0.75, None),)
  batch = make_batch(SAID_B, [0] * B, [STOPPED] * B, [1] * B)
  tokens = [[6 if n % 4 else 5, 0, row[2]] for n, row in enumerate(VOTES)]
  rollout = batch.rollout._replace(tokens_BxT=np.array(tokens, np.int32))
  got, _, _, metrics = grading.grade(context, Parted(), batch.prompts, rollout)
  real = np.array(SAID_B) > 0
  right = np.array([row[2] == 7 for row in VOTES]) & real
  form = (np.arange(B) % 4 == 0) & real
  assert got.correct_B.tolist() == right.tolist()
  np.testing.assert_allclose(got.reward_B, 0.5 * right + 0.75 * form)
  means = dict(sevens=0.5 * right[real].mean(), form=form[real].mean())
  names = GRADED.keys() | SCORED.keys() | {'grade/right'}
  assert metrics.keys() == {f'critic/score/{name}' for name in means} | names
  for name, mean in means.items():
    np.testing.assert_allclose(metrics[f'critic/score/{name}'], mean, rtol=1e-6)
  assert got.parts_BxK is None  # nobody asks
  context.spec.objective.method.needs_parts = True
  got, *_ = grading.grade(context, Parted(), batch.prompts, rollout)
  np.testing.assert_array_equal(got.parts_BxK, np.stack([0.5 * right, form], 1))


class Failing(Sevens):
  """As Sevens, but for some texts, of which it says how they failed."""

  def __init__(self, failed):
    self.failed = failed

  def score(self, rows, texts):
    outcome_B = np.array([self.failed.get(text, rewards.OK) for text in texts], np.int8)
    parts_BxK = super().score(rows, texts).parts_BxK * (outcome_B == rewards.OK)[:, None]
    return scores_of(parts_BxK, {'grade/crashes': 2}, outcome_B, 'it broke')


def landed(pool, reason_B, sources=('made',), features=None, encodes=True, **failed):
  context = make_context()
  context.grading.vote = context.grading.truncate = context.replay.collector = None
  context.config.seed = 0
  context.grading.failures = rewards.FailurePolicy(dict(failed=failed, right=1.0))
  context.models.policy = types.SimpleNamespace(tokenizer=Words())
  context.replay.unfinished = replay.PartialRollouts(G, max_age=3)
  context.tables = types.SimpleNamespace(train=table_of(sevens_of(sources)))
  batch = make_batch([3] * B, [0] * B, reason_B, [1] * B)
  tokens_BxT = np.array([[5, b, 7 + b % 2] for b in range(B)], np.int32)
  pending = host_step.PendingStep(
    1, batch.prompts, batch.rollout._replace(tokens_BxT=tokens_BxT), {}
  )
  if features is not None:
    context.selection.curriculum.features = features
  if features is not None and encodes:
    states = tuple(np.eye(P, 6, dtype=np.float32) for _ in range(2))
    pending = pending._replace(encoded=EncodedPrompts(np.arange(2 * P), states))
  return host_step.land(context, pool, pending), context


def test_a_step_stores_states_and_the_words_of_its_right_completions():
  """Half of each group ends in 7, behind a number of its own row; the first number is the same for all."""
  features = PromptFeatures(40, 2, 1, 0, answer_tokens=3)
  step, _ = landed(Sevens(), [STOPPED] * B, features=features)
  assert step.metrics['timing_s/encode'] >= 0
  assert features.state['known'].tolist() == [True] * (2 * P) + [False] * (40 - 2 * P)
  # Besides the step's own, of which 0 is encoded.
  assert features.state['newest'].tolist() == list(range(1, 2 * P))
  words = json.loads(features.state['wordings'].tobytes())
  assert words == [[f'5 {b} ', None, '', '', 0.5] for b in range(0, B, 2)]


def test_a_step_that_encodes_nothing_learns_words_and_leaves_no_candidates():
  features = PromptFeatures(40, 0, 1, 0, answer_tokens=3)
  features.state['newest'] = features.latest = np.arange(5)
  step, _ = landed(Sevens(), [STOPPED] * B, features=features, encodes=False)
  assert step.metrics['timing_s/encode'] >= 0 and not features.state['known'].any()
  assert not len(features.state['newest']) and not len(features.latest)
  assert len(json.loads(features.state['wordings'].tobytes())) == B // 2


class Graded:
  """Stands for a pool of scores by the last token: n tenths."""

  def score(self, rows, texts):
    return scores_of([[int(text.split()[-1]) / 10] for text in texts])


def test_graded_scores_are_mass_and_mixed_by_difference():
  """Of groups of tenths, none of them right: 2 + 0 + 1 + 4, 3 each, 9 with one cut off, and nothing of the last."""
  context = make_context()
  context.grading.vote = context.grading.truncate = None
  context.models.policy = types.SimpleNamespace(tokenizer=Words())
  context.tables = types.SimpleNamespace(train=table_of(list(range(40))))
  tenths = [2, 0, 1, 4] + [3] * 4 + [9, 9, 0, 0] + [5] * 4
  reason_B = [STOPPED] * 8 + [TRUNCATED, STOPPED, TRUNCATED, STOPPED] + [ABORTED] * 4
  batch = make_batch([3] * 12 + [0] * 4, [0] * B, reason_B, [1] * B)
  rollout = batch.rollout._replace(tokens_BxT=np.array([[5, 0, n] for n in tenths], np.int32))
  got, *_, metrics = grading.grade(context, Graded(), batch.prompts, rollout)
  assert (
    not got.correct_B.any()
    and metrics['grade/right'] == 0
    and metrics['grade/highest'] == np.float32(0.9)
  )
  np.testing.assert_allclose(got.success_B[:12], np.array(tenths[:12]) / 10, rtol=1e-6)
  host_step._observe(context, got, np.ones(P, bool))
  index, mass, count, truncated, _, mixed, cut_mass = (
    x.tolist() for x in context.selection.curriculum.observed
  )
  assert (index, count, truncated) == ([0, 10, 20], [4, 4, 4], [0, 0, 2])
  np.testing.assert_allclose(mass, [0.7, 1.2, 1.8], rtol=1e-6)
  graded = context.selection.curriculum.graded  # Σ x(1 − x)
  np.testing.assert_allclose(graded['graded'], [0.49, 0.84, 0.18], rtol=1e-6)
  np.testing.assert_allclose(graded['truncated_graded'], [0, 0, 0.09], rtol=1e-6)
  np.testing.assert_allclose(cut_mass, [0, 0, 0.9], rtol=1e-6)
  assert mixed == [True, False, True]
  context.config.rewards.right, context.config.rewards.bounds = 0.5, (-1.0, 1.0)
  context.grading.scale = outcomes.scale(context.config.rewards)
  got, *_, metrics = grading.grade(context, Graded(), batch.prompts, rollout)
  np.testing.assert_allclose(got.success_B[:4], [0.6, 0.5, 0.55, 0.7], rtol=1e-6)
  assert metrics['grade/right'] == 2 / 12 and metrics['grade/out_of_bounds'] == 0


def test_a_dropped_rollout_is_as_if_it_had_not_been_generated():
  """The same step with these rows never sampled: batch, curriculum and metrics are equal."""
  gone = (0, 5, 6, *range(12, 16))
  failed = {
    f'5 {b} {7 + b % 2}': 2 + b % 2 for b in gone
  }  # crashes and errors; of the last group nothing is left
  one, dropped = landed(Failing(failed), [STOPPED] * B)
  reason_B = [ABORTED if b in gone else STOPPED for b in range(B)]
  other, heard = landed(Failing({}), reason_B)
  for x, y in zip(one.batch.rollout, other.batch.rollout, strict=True):
    if x is not one.batch.rollout.reason_B:
      np.testing.assert_array_equal(x, y)
  np.testing.assert_array_equal(one.batch.reward_B, other.batch.reward_B)
  np.testing.assert_array_equal(one.batch.correct_B, other.batch.correct_B)
  assert str(dropped.selection.curriculum.observed) == str(heard.selection.curriculum.observed)
  assert str(dropped.selection.lengths.observed) == str(heard.selection.lengths.observed)
  own = ('grade/', 'generate/aborted_rows')
  shared = [{k: v for k, v in x.metrics.items() if not k.startswith(own)} for x in (one, other)]
  assert shared[0] == shared[1]
  assert one.metrics['grade/dropped'] == 7 and one.metrics['grade/failed_share'] == 7 / 16
  assert [(row['graded'], row['length']) for row in one.rollout_records if 'graded' in row] == [
    (('crash', 'error')[b % 2], 3) for b in gone
  ]
  assert len(one.rollout_records) == B and len(other.rollout_records) == B - 7


def test_a_scored_failure_gets_its_value_and_is_evidence_of_a_wrong_answer():
  failed = {'5 0 7': rewards.TIMEOUT, '5 2 7': rewards.CRASH}
  got, context = landed(Failing(failed), [STOPPED] * B, crash='score', value=-0.5)
  assert got.batch.reward_B[:4].tolist() == [-0.5, 0, -0.5, 0]
  assert got.batch.correct_B[:4].tolist() == [0] * 4 and got.batch.rollout.length_B.all()
  assert context.selection.curriculum.observed[1].tolist() == [0, 2, 2, 2]
  assert context.selection.curriculum.observed[2].tolist() == [4] * 4
  assert got.metrics['grade/dropped'] == 0 and got.metrics['grade/failed_share'] == 2 / 16


def test_by_vote_what_cannot_be_graded_is_neither_dropped_nor_counted_against_the_run():
  """Questions without answers are what a vote is for."""
  failed = {f'5 {b} {7 + b % 2}': rewards.ERROR for b in range(B)}
  context = make_context()
  context.grading.vote, context.grading.truncate = (
    rewards.majority_vote.Majority(0, lambda text: text[-1]),
    None,
  )
  context.models.policy = types.SimpleNamespace(tokenizer=Words())
  context.tables = types.SimpleNamespace(train=table_of(list(range(40))))
  batch = make_batch([3] * B, [0] * B, [STOPPED] * B, [1] * B)
  tokens_BxT = np.array([[5, b, 7 + b % 2] for b in range(B)], np.int32)
  for _ in range(5):
    rollout = batch.rollout._replace(tokens_BxT=tokens_BxT)
    got, *_ = grading.grade(context, Failing(failed), batch.prompts, rollout)
    context.grading.failures.check()
  assert got.reward_B.tolist() == [1, 0] * 8 and got.rollout.length_B.all()


def test_metrics_by_source_are_logged_where_there_are_several():
  got, _ = landed(Sevens(), [STOPPED] * B, sources=('left', 'right'))
  assert got.metrics['source/left/rollouts'] == got.metrics['source/right/rollouts'] == 2 * G
  assert got.metrics['source/left/right'] == 0.5
  single, _ = landed(Sevens(), [STOPPED] * B)
  assert not any(name.startswith('source/') for name in single.metrics)
  assert single.metrics.keys() == {x for x in got.metrics if not x.startswith('source/')}


def test_a_batch_dump_has_all_arrays_and_texts(tmp_path):
  got, context = landed(Sevens(), [STOPPED] * B)
  arrays, rows = log_records.batch_dump(context, got.batch)
  path = run_dir.RunDirectory(str(tmp_path)).write_non_finite(12, arrays, rows)
  with np.load(f'{path}.npz') as kept:
    assert {'prompts.tokens_PxL', 'rollout.logp_BxT', 'reward_B', 'correct_B'} <= set(kept)
    np.testing.assert_array_equal(kept['rollout.tokens_BxT'], got.batch.rollout.tokens_BxT)
  with open(f'{path}.jsonl') as file:
    words = [json.loads(line) for line in file]
  assert len(words) == B and words[3] == dict(
    input='?', output='5 3 8', gts='7', row=3, score=0.0, tokens=[5, 3, 8]
  )

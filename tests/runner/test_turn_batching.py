"""Batched turns sample what lockstep samples, encode each token once, and lose an episode alone where one fails."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
import pytest
from small_episodes import G, P, Talks, check_log_probs, config, made, run

from jaxrl_llm import environments, rewards
from jaxrl_llm.distributed import sharding
from jaxrl_llm.rollout import turn_decode
from jaxrl_llm.runner import multi_turn, resume, setup, turn_batching
from jaxrl_llm.types import UserError

# With one layer the cached keys and values of a token would not depend on what it attends to.
SIZES = dict(scratch__max_tokens=128, scratch__layers=2, completion_tokens=72)


def batched(make=Talks, ready=2, iterations=3, **changes):
  """A run whose turns are batched by calls of few tokens."""
  changes = SIZES | changes
  how = dict(fn='turns', ready=ready, iterations=iterations)
  return made(make, environment__batching=how, **changes)


def lockstep(make=Talks, **changes):
  changes = SIZES | changes
  return made(make, **changes)


def played(context, count=1, **more):
  return run(context, count, call=turn_batching.compile_call(context), **more)


def check_same(got, want):
  """Tokens, masks and rewards are equal, log-probabilities up to rounding."""
  for (_, a, one), (_, b, other) in zip(got, want, strict=True):
    for name in ('tokens_BxT', 'length_B', 'reason_B', 'version_BxT', 'turns'):
      jax.tree.map(np.testing.assert_array_equal, getattr(a, name), getattr(b, name))
    np.testing.assert_allclose(a.logp_BxT, b.logp_BxT, 1e-5, 1e-5)
    np.testing.assert_array_equal(one.batch.reward_B, other.batch.reward_B)


@pytest.fixture(scope='module')
def talked():
  return (context := batched(environment__turns=6)), *played(context, 2)


def test_batched_turns_sample_what_lockstep_samples(talked):
  _, _, _, got = talked
  _, _, want = run(lockstep(environment__turns=6), 2)
  check_same(got, want)
  assert got[0][1].turns.number_BxT.max() == 5


def test_recorded_log_probs_are_those_of_the_update(talked):
  context, _, _, history = talked
  prompts, rollout, _ = history[0]
  check_log_probs(context, prompts, rollout, 1e-4)


def new_tokens(prompts, rollout):
  """Tokens that no decode iteration encodes: prompts, observations, and the end of a turn that has one behind it."""
  number = rollout.turns.number_BxT
  continued = (number[:, :-1] >= 0) & (number[:, 1:] < 0)
  continued &= np.arange(1, number.shape[1]) < rollout.length_B[:, None]
  observed = (number < 0) & (np.arange(number.shape[1]) < rollout.length_B[:, None])
  # The last token of a row begins decoding, so that of an observation is a decode iteration's.
  return int(prompts.length_P.sum() + observed.sum()), int(continued.sum())


def test_only_new_tokens_are_encoded(talked):
  _, _, _, history = talked
  for prompts, rollout, landed in history:
    new, turns = new_tokens(prompts, rollout)
    assert turns > 2 * P * G
    # Of each observation the last token begins decoding, and the end of the turn before it is encoded instead.
    assert landed.metrics['environment/encoded_tokens'] == new <= 1.2 * new
    assert landed.metrics['environment/encoded_positions'] >= new
    sampled = int((rollout.turns.number_BxT >= 0).sum())
    assert landed.metrics['generate/tokens'] == sampled


@pytest.mark.parametrize('ready, iterations, block', [(1, 1, (8, 16)), (8, 1000, (3, 2))])
def test_the_sizes_of_calls_and_blocks_change_no_sample(
  talked, monkeypatch, ready, iterations, block
):
  """Blocks of fewer rows than all read their prompts one by one."""
  _, _, _, got = talked
  for name, size in zip(('APPENDED_ROWS', 'APPENDED_TOKENS'), block, strict=True):
    monkeypatch.setattr(turn_decode, name, size)
  context = batched(ready=ready, iterations=iterations, environment__turns=6)
  _, _, other = played(context, 2)
  check_same(got, other)
  calls = [landed.metrics['environment/calls'] for *_, landed in other]
  rounds = [landed.metrics['generate/rounds'] for *_, landed in other]
  # Every call ends after one iteration, or with the turns of all rows that decode.
  assert calls == rounds if iterations == 1 else max(calls) <= 6


class LatePool(environments.WorkerPool):
  """Gives the result of a step after one to three calls, or when no row decodes."""

  def __init__(self, settings, factory):
    super().__init__(settings)
    self.factory, self._late = factory, []

  def submit(self, requests=(), ended=()):
    super().submit(requests, ended)
    self._late += [[1 + key[-1] % 3, key, result] for key, result in super().collect()]

  @property
  def pending(self):
    return len(self._late)

  @property
  def waiting(self):
    return {key for _, key, _ in self._late}

  def collect(self, most_s=0.0):
    for late in self._late:
      late[0] -= 1
    ready = [late[1:] for late in self._late if most_s or late[0] <= 0]
    self._late = [late for late in self._late if late[1:] not in ready]
    return ready


class WatchedSlots(turn_batching.Slots):
  """Keeps the rows that lost their slots while they waited, with the tokens that were cached of them."""

  lost: list[tuple[int, int]]
  waiting: Callable[[], set[int]]

  def give(self, decodes_B, waits_B, length_B):
    before = set(self.row_S.tolist())
    spilled = super().give(decodes_B, waits_B, length_B)
    lost = (before - set(self.row_S.tolist())) & self.waiting()
    assert len(lost) == spilled
    self.lost += [(b, int(length_B[b]) - 1) for b in lost]
    return spilled


@pytest.mark.parametrize('slots', [1, 3, P * G - 1])
def test_rows_that_lose_their_slot_are_encoded_again(talked, monkeypatch, slots):
  """Samples stay the same. What is encoded beside new tokens is what was cached of rows that came back."""
  _, _, _, (want, *_) = talked
  monkeypatch.setattr(turn_batching, 'Slots', WatchedSlots)
  context = batched(rollout__slots=slots, environment__turns=6)
  episodes = context.episodes
  episodes.environments = LatePool(context.config.environment, episodes.environments.factory)
  keys = multi_turn.row_keys(want[0], want[1])
  waiting = lambda _: {keys.index(key) for key in episodes.environments.waiting}  # noqa: E731
  monkeypatch.setattr(WatchedSlots, 'waiting', waiting, raising=False)
  monkeypatch.setattr(WatchedSlots, 'lost', [], raising=False)
  _, _, got = played(context, 1)
  check_same(got, [want])
  ((prompts, rollout, landed),) = got
  check_log_probs(context, prompts, rollout, 1e-4)
  assert landed.metrics['environment/spilled'] == len(WatchedSlots.lost) > 0
  again = [cached for b, cached in WatchedSlots.lost if rollout.length_B[b] > cached + 1]
  new, _ = new_tokens(prompts, rollout)
  assert landed.metrics['environment/encoded_tokens'] == new + sum(again) > new


def test_slots_go_to_rows_that_decode_first_those_of_no_use():
  slots, length_B = turn_batching.Slots(3), np.array([9, 5, 7, 1, 1, 1])
  give = lambda decodes, waits: slots.give(  # noqa: E731
    np.isin(np.arange(6), decodes), np.isin(np.arange(6), waits), length_B
  )
  assert give([0, 1, 2, 3, 4, 5], []) == 0
  # All are taken by the first rows.
  np.testing.assert_array_equal(slots.row_S, [0, 1, 2])
  # Row 1 is over.
  assert give([3, 4, 5], [0, 2]) == 2
  np.testing.assert_array_equal(slots.row_S, [5, 3, 4])
  # No slot is taken from a row that decodes.
  assert give([0, 2, 3, 4, 5], []) == 0
  assert give([2, 3], [0, 4, 5]) == 1
  np.testing.assert_array_equal(slots.row_S, [2, 3, 4])
  # A row that waits keeps its slot where none needs it.
  assert give([2], [3, 4]) == 0
  np.testing.assert_array_equal(slots.row_S, [2, 3, 4])


def calls_by_hand(rollout, ready):
  """(calls, iterations) where calls end with `ready` turns and environments answer at once."""
  turns_B = [np.bincount(number[number >= 0]).tolist() for number in rollout.turns.number_BxT]
  calls, iterations, left_B = 0, 0, {}
  for b, (first, *later) in enumerate(turns_B):
    # Encoding the prompt samples the first token.
    left_B[b], turns_B[b] = first - 1, later
  waiting = [b for b, left in left_B.items() if not left and turns_B[b]]
  left_B = {b: left for b, left in left_B.items() if left}
  while left_B or waiting:
    begun = len(left_B)
    calls += begun > 0
    while left_B and begun - len(left_B) < ready:
      iterations += 1
      left_B = {b: left - 1 for b, left in left_B.items()}
      ended = [b for b, left in left_B.items() if not left]
      waiting += [b for b in ended if turns_B[b]]
      left_B = {b: left for b, left in left_B.items() if left}
    left_B |= {b: turns_B[b].pop(0) for b in waiting}
    waiting = []
  return calls, iterations


@pytest.mark.parametrize('ready', [1, 3])
def test_a_call_ends_with_as_many_turns_as_are_set(talked, ready):
  _, _, _, (_, (_, rollout, _)) = talked
  _, _, history = played(batched(ready=ready, iterations=1000, environment__turns=6), 2)
  metrics = history[1][2].metrics
  calls, iterations = calls_by_hand(rollout, ready)
  assert (metrics['environment/calls'], metrics['generate/rounds']) == (calls, iterations)
  assert calls != calls_by_hand(rollout, 2)[0]


def test_rows_without_room_for_another_turn_end_their_episodes():
  context = batched(completion_tokens=24)
  got = played(context, 1)[2]
  assert not context.episodes.environments.live
  check_same(got, run(lockstep(completion_tokens=24), 1)[2])


def test_a_resumed_run_is_the_uninterrupted_one(talked):
  """At the border of two steps no episode lives, so a new process has all that it needs."""
  _, whole_state, _, whole = talked
  context = batched(environment__turns=6)
  state, batch, first = played(context, 1)
  assert not len(context.replay.unfinished) and not context.episodes.environments.live
  again = batched(environment__turns=6)
  for name in ('curriculum', 'lengths', 'unfinished'):
    resume._stateful(again)[name].load_state_dict(resume._stateful(context)[name].state_dict())
  end_state, _, rest = played(again, 1, state=state, batch=batch, start=1)
  for (_, a, one), (_, b, other) in zip(first + rest, whole, strict=True):
    jax.tree.map(np.testing.assert_array_equal, a, b)
    assert one.metrics == other.metrics and one.rollout_records == other.rollout_records
  jax.tree.map(np.testing.assert_array_equal, end_state, whole_state)


WORKED = dict(
  environment__fn='tests.environments.delayed:delayed', environment__turns=6, rollout__max_age=9
)


def worked(make, **settings):
  """A run with environments in worker processes."""
  settings = dict(workers=2, deadline_s=2.0) | settings
  more = {f'environment__{name}': value for name, value in settings.items()}
  return make(None, **WORKED, **more)


def closed(context, history):
  """The history of a run whose workers are ended."""
  assert not context.episodes.environments.live and not context.episodes._failed
  context.episodes.close()
  return history


@pytest.fixture(scope='module')
def lockstep_by_failure():
  found = {}
  for fails in ('', 'raise'):
    context = worked(lockstep, fails=fails)
    found[fails] = closed(context, run(context, 1)[2])
  return found


def test_environments_that_take_time_change_no_sample(lockstep_by_failure):
  """Results arrive in another order than the requests went out."""
  context = worked(batched, mean_s=0.05)
  got = closed(context, played(context, 1)[2])
  check_same(got, lockstep_by_failure[''])


OUTCOMES = {'raise': rewards.ERROR, 'hang': rewards.TIMEOUT, 'die': rewards.CRASH}


@pytest.mark.parametrize('fails', OUTCOMES)
def test_an_environment_that_fails_costs_its_episode_alone(fails, lockstep_by_failure):
  context = worked(batched, fails=fails, mean_s=0.01)
  (got,) = closed(context, played(context, 1)[2])
  rollout, (_, want, _) = got[1], lockstep_by_failure['raise'][0]
  failed_B = want.turns.outcome_B == rewards.ERROR
  assert 0 < failed_B.sum() < P * G
  outcome_B = np.where(failed_B, OUTCOMES[fails], rewards.OK)
  np.testing.assert_array_equal(rollout.turns.outcome_B, outcome_B)
  turns = want.turns._replace(outcome_B=outcome_B.astype(want.turns.outcome_B.dtype))
  expected = want._replace(turns=turns)
  assert got[2].metrics['environment/worker_deaths'] == (failed_B.sum() if fails != 'raise' else 0)
  for name in ('tokens_BxT', 'length_B', 'reason_B', 'turns'):
    jax.tree.map(np.testing.assert_array_equal, getattr(rollout, name), getattr(expected, name))


@pytest.mark.parametrize(
  'changes, message',
  [
    (dict(environment__batching=dict(fn='turns', ready=-1)), 'batching.ready=-1 must be'),
    (dict(environment__batching=dict(fn='turns', iterations=0)), 'batching.iterations=0 must be'),
    (dict(environment__batching=dict(fn='rows')), "environment.batching.fn='rows'"),
    (dict(environment__rounds=1), '--config.environment.rounds=0'),
    (dict(rollout__early_exit=dict(fn='text', text='e')), '--config.rollout.early_exit.fn=none'),
  ],
)
def test_bad_settings_are_one_sentence(changes, message):
  with pytest.raises(UserError) as error:
    made(**dict(environment__batching=dict(fn='turns')) | changes)
  assert message in str(error.value)


def test_several_devices_are_refused():
  c = config(environment__batching=dict(fn='turns'))
  with pytest.raises(UserError, match='decodes on one device, and the mesh has 2'):
    setup.build_context(c, sharding.make_mesh(c.mesh, jax.devices()[:2]))

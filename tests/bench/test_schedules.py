"""The simulated schedules against closed forms, bounds and the conservation of tokens."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from tests.bench.lib import schedule_apart, schedule_fused, schedule_jobs
from tests.bench.lib.schedule_apart import Apart
from tests.bench.lib.schedule_fused import Fused

COSTS = schedule_jobs.Costs(
  chips=16, shards=8, slots=200, sampler_slots=240, weights_s=4e-3, column_s=2e-6, block_tokens=5, prompt_s=1e-4,
  compute_s=1e-5, links_s=2e-5, prefill_s=0.02, encode_s=1e-6, update_s=1e-4, push_s=0.3,
)  # fmt: skip
B, G, T = 12, 4, 200
FUSED = (
  Fused(),
  Fused(lag=1),
  Fused(lag=3),
  Fused(submitted=1.5),
  Fused(submitted=2.0, max_age=1, encode='rows'),
  Fused(lag=1, submitted=1.5, encode='none'),
  Fused(lag=2, submitted=2.0, encode='none', at_once=True),
)
APART = (Apart(4, 2, encode=True),) + tuple(
  Apart(trainer, bound, in_order)
  for trainer, bound, in_order in [(4, 0, True), (8, 1, True), (4, 4, True), (8, 1, False), (2, 4, False)]
)  # fmt: skip
SCHEDULES = FUSED + APART


def simulate(schedule, job, costs=COSTS, steps=12, warm_up=0):
  module = schedule_fused if isinstance(schedule, Fused) else schedule_apart
  return module.simulate(job, costs, schedule, steps, warm_up)


@functools.cache
def draw(latency_s=0.0, sigma=0.8, seed=0):
  return schedule_jobs.draw(
    seed, B, G, max_tokens=T, mean_tokens=60, sigma=sigma, latency_s=latency_s, count=600
  )


@functools.cache
def outcome(schedule, latency_s):
  return simulate(schedule, draw(latency_s))


def test_draws_have_the_stated_means_and_do_not_depend_on_their_number():
  job = schedule_jobs.draw(3, B, 8, max_tokens=10**6, mean_tokens=500, sigma=0.8, latency_s=10)
  log = np.log(job.length_NxG)
  assert job.length_NxG.mean() == pytest.approx(500, rel=0.03)
  assert log.std() == pytest.approx(0.8, rel=0.03)
  assert np.corrcoef(log[:, 0], log[:, 1])[0, 1] == pytest.approx(0.5, abs=0.05)
  assert job.latency_NxG.mean() == pytest.approx(10, rel=0.06)  # the deadline cuts a little
  assert job.latency_NxG.max() == 40
  assert draw(60.0).latency_NxG.shape == draw().length_NxG.shape == (600, G)


def rollout_s(costs, slots, length, share):
  """Seconds of decoding rows of equal length that all have slots, iteration by iteration."""
  fixed = slots / costs.shards * costs.links_s
  total = 0.0
  for age in range(1, length):
    columns = (age + costs.block_tokens) * costs.column_s + share * costs.prompt_s
    reads = costs.weights_s + slots / costs.shards * columns
    total += max(reads, slots / costs.shards * costs.compute_s) + fixed
  return total


def test_equal_lengths_without_latency_have_a_closed_form():
  """A step is one update, the weights, the prompts, and one iteration for each token but the first."""
  want = B * G * 60 * COSTS.update_s + COSTS.push_s + B * COSTS.prefill_s
  want += rollout_s(COSTS, B * G, 60, 1 / G)
  for schedule in (Fused(), Fused(lag=2)):
    got = simulate(schedule, draw(sigma=0.0), steps=5, warm_up=2)
    assert got.seconds == pytest.approx(5 * want)
    assert got.idle == 0 and got.groups == 5 * B
    assert got.iterations == [59] * (8 + schedule.lag)


def test_equal_latencies_add_to_a_step_and_lag_hides_them():
  job = draw(sigma=0.0)._replace(latency_NxG=np.full((600, G), 2.0))
  plain = simulate(Fused(), draw(sigma=0.0), steps=6, warm_up=1)
  assert simulate(Fused(), job, steps=6, warm_up=1).seconds == pytest.approx(plain.seconds + 12)
  step_s = plain.seconds / 6
  assert simulate(Fused(lag=1), job, steps=6, warm_up=2).seconds == pytest.approx(
    6 * max(step_s, 2)
  )
  # Longer than a step: two lags hide twice as much.
  job = job._replace(latency_NxG=np.full((600, G), 1.5 * step_s))
  assert simulate(Fused(lag=1), job, steps=6, warm_up=3).seconds > 6.5 * step_s
  assert simulate(Fused(lag=2), job, steps=6, warm_up=3).seconds == pytest.approx(6 * step_s)


def test_a_slow_trainer_is_the_time_of_two_meshes():
  costs = COSTS._replace(update_s=4e-3)
  got = simulate(Apart(4, 2), draw(sigma=0.0), costs, steps=6, warm_up=3)
  learned_s = 6 * B * G * 60 * costs.update_s
  assert got.seconds == pytest.approx(4 * learned_s)  # on a quarter of the chips


def test_a_slow_sampler_is_the_time_of_two_meshes():
  """With one batch at a time and equal lengths, the sampler decodes it, and waits for its version of the weights."""
  costs = COSTS._replace(update_s=0.0)
  got = simulate(Apart(4, 0, window=1), draw(sigma=0.0), costs, steps=6, warm_up=1)
  sampler = schedule_jobs.part(costs, 12)
  want = rollout_s(sampler, B * G, 60, 1 / G) + B * sampler.prefill_s + costs.push_s
  assert got.seconds == pytest.approx(6 * want)


def test_partial_rollouts_with_all_groups_as_target_are_the_fused_schedule():
  for latency_s in (0.0, 10.0):
    plain = outcome(Fused(), latency_s)
    assert outcome(Fused(submitted=1.0, max_age=1, encode='rows'), latency_s) == plain


@pytest.mark.parametrize('latency_s', [0.0, 5.0])
@pytest.mark.parametrize('schedule', SCHEDULES)
def test_every_token_is_learned_once_dropped_or_waiting(schedule, latency_s):
  got = outcome(schedule, latency_s)
  assert got.sampled == got.learned + got.dropped + got.waiting
  assert got.learned > 0 and min(got.dropped, got.waiting) >= 0
  if isinstance(schedule, Apart) and schedule.in_order:
    # Groups are learned in the order in which they were started: the first 12 batches, all of them whole.
    assert got.learned == draw(latency_s).length_NxG[: 12 * B].sum() and got.dropped == 0
  if schedule == Fused():
    assert got.sampled == draw(latency_s).length_NxG[: 13 * B].sum()


@pytest.mark.parametrize('latency_s', [0.0, 5.0, 60.0])
@pytest.mark.parametrize('schedule', SCHEDULES)
def test_staleness_is_within_its_bound(schedule, latency_s):
  got = outcome(schedule, latency_s)
  if isinstance(schedule, Apart):
    bound = schedule.bound
  else:
    bound = schedule.lag + (schedule.max_age if schedule.submitted > 1 else 0)
  assert got.staleness_mean <= got.staleness_max <= bound
  if schedule in (Fused(), Fused(lag=1), Fused(lag=3)):
    assert got.staleness_mean == got.staleness_max == schedule.lag


@pytest.mark.parametrize('schedule', SCHEDULES)
def test_no_schedule_is_faster_than_its_work(schedule):
  """Update and decoding of the learned tokens at the least time that their resources allow; the update dominates."""
  costs = COSTS._replace(update_s=1e-3)
  got = simulate(schedule, draw(), costs)
  decoded = got.learned - got.groups * G  # first tokens cost no iteration
  least = lambda costs, slots: decoded / slots * costs.weights_s  # noqa: E731
  if isinstance(schedule, Apart):
    trainer = schedule_jobs.part(costs, schedule.trainer)
    sampler = schedule_jobs.part(costs, 16 - schedule.trainer)
    work_s = max(got.learned * trainer.update_s, least(sampler, sampler.sampler_slots))
  else:
    slots = min(round(schedule.submitted * B) * G, costs.slots)
    work_s = got.learned * costs.update_s + least(costs, slots) + 12 * costs.push_s
  assert got.seconds >= work_s


def test_a_larger_bound_and_no_latency_are_never_slower_in_order():
  times = [outcome(Apart(4, bound), 5.0).seconds for bound in (0, 1, 2, 4)]
  assert times == sorted(times, reverse=True)
  assert outcome(Apart(4, 1), 0.0).seconds <= times[1]


def test_groups_that_continue_at_once_are_decoded_as_without_lag():
  """Lag then delays learning alone; otherwise unfinished groups pause for as many steps."""
  plain, at_once, paused = (
    simulate(Fused(lag, submitted=1.5, at_once=at_once), draw()).iterations
    for lag, at_once in ((0, False), (2, True), (2, False))
  )
  assert at_once[: len(plain)] == plain != paused[: len(plain)]


@pytest.mark.parametrize('module, settings', [('fused', dict(submitted=1.5)), ('apart', {})])
def test_encoding_continued_rows_costs_their_tokens(module, settings):
  """The decode iterations stay the same: what is encoded again adds to the time alone."""
  costs = COSTS._replace(encode_s=1e-3)
  if module == 'fused':
    none, rows, slots = (
      simulate(Fused(encode=encode, **settings), draw(), costs)
      for encode in ('none', 'rows', 'slots')
    )
    assert none.iterations == rows.iterations == slots.iterations
    assert slots.seconds - none.seconds == pytest.approx(12 * 1.5 * B * G * T * 1e-3)
    assert none.seconds < rows.seconds < none.seconds + 0.5 * (slots.seconds - none.seconds)
  else:
    none, rows = (simulate(Apart(4, 4, encode=encode), draw(), costs) for encode in (False, True))
    assert none.seconds < rows.seconds


def test_parts_of_the_chips_do_the_same_work_more_slowly():
  half = schedule_jobs.part(COSTS, 8)
  assert (half.shards, half.slots, half.sampler_slots, half.chips) == (4, 100, 120, 8)
  assert half.update_s == 2 * COSTS.update_s and half.weights_s == COSTS.weights_s
  for chips in (3, 0):
    with pytest.raises(ValueError, match='whole number of shards'):
      schedule_jobs.part(COSTS, chips)

"""Result files, the clock and the medians of time_to_accuracy, the shapes of step_time, lines of update_cost."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import numpy as np
import pytest

from jaxrl_llm.config import loading
from tests.bench import time_to_accuracy
from tests.bench.lib import accuracy_points, accuracy_trl, line_fit, results, step_shapes
from tests.bench.lib.accuracy_points import Clock, Point, first_reached, median_reached


def points(*accuracies: float, each_s: float = 10.0) -> list[Point]:
  return [Point(i, 32 * i, each_s * i, a) for i, a in enumerate(accuracies)]


def test_a_section_is_appended_then_replaced_and_the_rest_stays(tmp_path):
  file = tmp_path / 'job.md'
  file.write_text('# Job\n\nBy hand.\n')
  results.write(file, 'a', 'first')
  results.write(file, 'b', 'other')
  results.write(file, 'a', r'second \1')
  assert file.read_text() == (
    '# Job\n\nBy hand.\n\n<!-- generated: a -->\nsecond \\1\n<!-- end: a -->\n\n'
    '<!-- generated: b -->\nother\n<!-- end: b -->\n'
  )
  assert [path.name for path in tmp_path.iterdir()] == ['job.md']


@pytest.mark.parametrize(
  'lines',
  [
    '<!-- generated: a -->',
    '<!-- end: a -->',
    '<!-- end: a -->\n<!-- generated: a -->',
    '<!-- generated: a -->\n<!-- generated: a -->\n<!-- end: a -->',
  ],
)
def test_a_damaged_section_is_refused(tmp_path, lines):
  file = tmp_path / 'job.md'
  file.write_text(f'# Job\n{lines}\n')
  with pytest.raises(ValueError, match="job.md: the section 'a' has"):
    results.write(file, 'a', 'text')
  assert file.read_text() == f'# Job\n{lines}\n'


def test_smoke_runs_write_elsewhere():
  assert results.path('job.md', False).parent == results.FOLDER
  assert results.path('job.svg', False).parent == results.PICTURES
  assert results.path('job.md', True).parent not in (results.FOLDER, results.PICTURES)


def test_an_accuracy_is_reached_at_the_first_of_two_evaluations():
  assert first_reached(points(5, 21, 19, 20, 25), 20) == Point(3, 96, 30.0, 20)
  assert first_reached(points(5, 10, 15, 20), 20) is None  # the last one has no successor
  assert first_reached(points(25, 25), 20) == Point(0, 0, 0.0, 25)


def test_a_seed_that_does_not_reach_it_counts_as_later_than_all_others():
  fast, slow, never = points(0, 20, 20), points(0, 0, 20, 20), points(0, 0, 0)
  assert median_reached([fast, slow, never], 20, 'seconds') == 20
  assert median_reached([fast, slow, never], 20, 'rollouts') == 64
  assert median_reached([fast, never, never], 20, 'seconds') == math.inf


def test_the_tables_compare_with_the_first_arm():
  runs = {'ours': [points(0, 20, 20)], 'trl': [points(0, 20, 20, each_s=30)], 'trl2': []}
  titles = dict(ours='jaxrl_llm', trl='TRL', trl2='two')
  lines = accuracy_points.reached_table(runs, [20, 30], titles).splitlines()
  assert lines[2] == '| 20 % | 10 | 30 | 32 | 32 | 3.00 |'
  assert lines[3] == '| 30 % | — | — | — | — | — |'
  assert '| TRL | 1 | 0.0 % | 20.0 % | 60 | 64 |' in accuracy_points.last_table(runs, titles)


def test_the_clock_stands_still_during_evaluations():
  clock = Clock(start_s=100.0)
  evaluation = {'event': 'evaluation', 'val-core/all/acc/greedy': 0.25}
  clock.observe({'event': 'evaluating', 'step': 0, 'done': 0}, 110.0)
  clock.observe({'event': 'evaluating', 'step': 0, 'done': 8}, 130.0)
  clock.observe(evaluation | {'step': 0}, 150.0)
  for _ in range(2):
    clock.observe({'event': 'step', 'perf/rollouts': 32}, 151.0)
  clock.observe({'event': 'say', 'text': 'saved'}, 152.0)
  clock.observe({'event': 'evaluating', 'step': 2, 'done': 0}, 155.0)
  clock.observe(evaluation | {'step': 2}, 175.0)
  clock.observe(evaluation | {'step': 3}, 176.0)  # read from disk: no evaluation began
  assert clock.points == [Point(0, 0, 10.0, 25.0), Point(2, 64, 15.0, 25.0)]
  assert clock.evaluation_s == 60.0


@pytest.mark.parametrize(('until', 'evaluations'), [(30.0, 3), (31.0, 5), (math.inf, 5)])
def test_an_arm_ends_at_the_second_evaluation_that_reaches_until(until, evaluations):
  events = []
  for step, accuracy in enumerate((0.1, 0.5, 0.3, 0.3, 0.2)):
    events += [{'event': 'evaluating', 'step': step}]
    events += [{'event': 'evaluation', 'step': step, 'val-core/all/acc/greedy': accuracy}]
  lines = '\n'.join(map(json.dumps, events))
  command = [sys.executable, '-c', f'print({lines!r})']
  clock = Clock(0.0)
  with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
    has_reached = time_to_accuracy.listen(process, clock, 'arm', until)
  assert (has_reached, len(clock.points)) == (until == 30.0, evaluations)


def test_mixed_groups_have_their_share_and_are_spread_evenly():
  mixed = step_shapes.mixed_groups(200, 0.54)
  by_step = np.reshape(mixed, (-1, 4)).sum(1)
  assert sum(mixed) == 108
  assert set(by_step.tolist()) == {2, 3}
  assert all(step_shapes.mixed_groups(8, 1.0)) and not any(step_shapes.mixed_groups(8, 0.0))


def test_forced_lengths_are_log_normal_with_the_stated_mean():
  shape = step_shapes.SHAPES['long']
  lengths = np.array(step_shapes.forced_lengths(shape._replace(completion_tokens=10**6), 2000))
  assert lengths.mean() == pytest.approx(shape.mean_tokens, rel=0.05)
  assert np.log(lengths).std() == pytest.approx(shape.sigma, rel=0.05)
  capped = np.array(step_shapes.forced_lengths(shape, 2000))
  assert capped.min() >= 2 and capped.max() == 256
  np.testing.assert_array_equal(capped[:3], step_shapes.forced_lengths(shape, 3))


def test_a_job_is_read_as_it_was_written(tmp_path):
  job = make_job(step_shapes.SHAPES['long'])
  step_shapes.write_job(tmp_path / 'long.json', job)
  assert step_shapes.read_job(tmp_path / 'long.json') == job


def make_job(shape: step_shapes.Shape) -> step_shapes.Job:
  lengths = step_shapes.forced_lengths(shape, 2) if shape.lengths == step_shapes.FORCED else []
  return step_shapes.Job(shape, (2,), ['a', 'b'], [[5], [6]], [True, False], lengths)


def test_rewards_differ_in_mixed_groups_alone():
  job = make_job(step_shapes.SHAPES['default'])
  assert len({job.reward(0, g, 'same text') for g in range(8)}) == 8
  assert {job.reward(1, g, f'text {g}') for g in range(8)} == {0.0}


def test_caps_are_those_of_each_prompt_and_rollout():
  job = make_job(step_shapes.SHAPES['long'])
  np.testing.assert_array_equal(job.caps([1, 0]), [*job.lengths[1], *job.lengths[0]])
  assert set(make_job(step_shapes.SHAPES['full']).caps([0, 1]).tolist()) == {32}


def test_the_length_penalty_of_trl_is_that_of_the_config():
  """DAPO's penalty as configs/dapo.py sets it (0.5 · tokens beyond 12 / 4), in groups whose scores differ alone."""
  config = loading.load('dapo', ['--config.rollouts=2']).to_dict()
  scores, lengths = np.array([1.0, 0.0, 1.0, 1.0]), np.array([14, 16, 12, 16])
  np.testing.assert_allclose(accuracy_trl.shaped(scores, lengths, config), [0.75, -0.5, 1, 1])


def test_a_length_penalty_without_counterpart_is_refused():
  config = loading.load('dapo', ['--config.objective.zero_variance.fn=keep']).to_dict()
  with pytest.raises(SystemExit, match='has no counterpart'):
    accuracy_trl.shaped(np.ones(8), np.ones(8), config)


def test_a_line_is_fitted_by_least_squares():
  line = line_fit.fit([0, 1, 2, 3], [1, 3, 5, 7])
  np.testing.assert_allclose(line, (2, 1, 1), atol=1e-12)
  x, y = [0, 1, 2], [0, 2, 1]
  line = line_fit.fit(x, y)
  np.testing.assert_allclose((line.slope, line.intercept), (0.5, 0.5))
  assert line.r2 == pytest.approx(np.corrcoef(x, y)[0, 1] ** 2)
  assert line_fit.fit([0, 1], [4, 4]).r2 == 1.0

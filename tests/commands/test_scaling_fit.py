"""The fit finds the curve that points were made from, and says how sure it is."""

from __future__ import annotations

import json

import numpy as np
import pytest

from jaxrl_llm import main
from jaxrl_llm.commands import scaling_fit
from jaxrl_llm.types import UserError

TRUE = scaling_fit.Fit(start=0.2, top=0.61, slope=1.92, middle=2542.0, error=0.0)
COMPUTE_N = np.geomspace(300, 9000, 60)
BOUNDS = (0.2, 1.0)


def noisy(seed: int) -> np.ndarray:
  return scaling_fit.curve(COMPUTE_N, TRUE) + 0.01 * np.random.default_rng(seed).normal(size=60)


def test_the_curve_is_half_way_at_the_middle_and_ends_at_the_top():
  got = scaling_fit.curve(np.array([0.0, TRUE.middle, 1e12]), TRUE)
  np.testing.assert_allclose(got, [0.2, (0.2 + 0.61) / 2, 0.61], rtol=1e-9)
  # Three times the middle, by hand.
  assert scaling_fit.curve(np.array([3 * 2542.0]), TRUE)[0] == pytest.approx(
    0.2 + 0.41 / (1 + (1 / 3) ** 1.92)
  )


def test_the_fit_recovers_the_curve_that_points_were_made_from():
  found = scaling_fit.fit(COMPUTE_N, scaling_fit.curve(COMPUTE_N, TRUE), 0.2, bounds=BOUNDS)
  np.testing.assert_allclose(found[1:4], TRUE[1:4], rtol=1e-4)
  assert found.error < 1e-6


def test_the_top_is_found_from_points_that_do_not_reach_it():
  few = COMPUTE_N < 4000
  assert scaling_fit.curve(COMPUTE_N[few], TRUE).max() < 0.5
  found = scaling_fit.fit(
    COMPUTE_N[few], scaling_fit.curve(COMPUTE_N, TRUE)[few], 0.2, bounds=BOUNDS
  )
  assert found.top == pytest.approx(0.61, abs=1e-3)


def test_the_band_holds_the_truth_about_as_often_as_it_says():
  inside = []
  for seed in range(12):
    reward_N = noisy(seed)
    found = scaling_fit.fit(COMPUTE_N, reward_N, 0.2, bounds=BOUNDS)
    curve, spread = scaling_fit.band(COMPUTE_N, reward_N, found, np.array([2e4]), bounds=BOUNDS)
    inside.append(spread[0, 0] <= 0.61 <= spread[1, 0])
    assert curve[0, 0] <= scaling_fit.curve(np.array([2e4]), found)[0] <= curve[1, 0]
  # 12 draws at 90 %: 8 or fewer come in one of 200 suites; a band of no width holds it never.
  assert sum(inside) >= 8


@pytest.fixture
def folder(tmp_path):
  rows = [
    {'training/global_step': i, 'timing_s/step': 10.0, 'generate/tokens': 5, 'critic/score/mean': r}
    for i, r in enumerate(scaling_fit.curve(10.0 * (1 + np.arange(40)), TRUE._replace(middle=90.0)))
  ]
  (tmp_path / 'metrics.jsonl').write_text('\n'.join(json.dumps(row) for row in rows))
  (tmp_path / 'eval').mkdir()
  for step in (0, 40):
    evaluation = dict(step=step, metrics={'val-core/all/acc/greedy': 0.1 + step}, rows=[])
    (tmp_path / f'eval/step_{step:06d}.json').write_text(json.dumps(evaluation))
  return str(tmp_path)


def test_compute_is_what_was_spent_up_to_the_point(folder):
  compute_N, reward_N = scaling_fit.series(folder, 'critic/score/mean', 'seconds')
  np.testing.assert_allclose(compute_N, 10.0 * (1 + np.arange(40)))
  assert scaling_fit.series(folder, 'critic/score/mean', 'steps')[0][-1] == 40
  assert scaling_fit.series(folder, 'critic/score/mean', 'tokens')[0][-1] == 200
  compute_N, reward_N = scaling_fit.series(folder, 'val-core/all/acc/greedy', 'seconds')
  assert compute_N.tolist() == [0.0, 400.0] and reward_N.tolist() == [0.1, 40.1]


def test_the_command_prints_the_fit_and_draws_it(folder, tmp_path, capsys):
  plot = tmp_path / 'curve.svg'
  assert main.main(['--mode=fit', f'--workdir={folder},{folder}', f'--plot={plot}']) == 0
  output = capsys.readouterr().out
  assert output.count('at twice the compute spent (800)') == 2
  assert '<svg' in plot.read_text()[:2000]


@pytest.mark.parametrize(
  'arguments, why',
  [
    (['--metric=critic/scores'], r'--metric=critic/scores is not .* it has: critic/score/mean'),
    (['--compute=flops'], '--compute=flops is unknown; choose one of: seconds, tokens, steps'),
    (['--skip=1.5'], '--skip=1.5 must be'),
    (['--metric=val-core/all/acc/greedy'], 'has 1 points, and a curve of three unknowns needs 6'),
    (['--plot=curve.xyz'], '--plot=curve.xyz cannot be written'),
  ],
)
def test_bad_input_is_told_in_a_sentence(folder, capsys, arguments, why):
  import re

  assert main.main(['--mode=fit', f'--workdir={folder}', *arguments]) == 2
  assert re.search(why, capsys.readouterr().err)


def test_a_folder_without_a_run_is_told(tmp_path):
  with pytest.raises(UserError, match='has no metrics.jsonl; give the folder of a run'):
    scaling_fit.series(str(tmp_path), 'critic/score/mean', 'seconds')

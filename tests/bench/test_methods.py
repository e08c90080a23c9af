"""The table of all methods: its arithmetic, its journal after a kill, and which methods it leaves out."""

from __future__ import annotations

import json
import math
import os
import threading

import jax
import pytest
from method_table import JOBS, PAPERS

from jaxrl_llm.config import loading, validation
from jaxrl_llm.runner import validate
from tests.bench import methods
from tests.bench.lib import method_job, method_rows


def row(method, seed, mean, status='ok', job='x'):
  values = dict(mean=mean, greedy=mean + 1, cpu_s=61.5, completions=15360, start=20.0)
  key = dict(method=method, seed=seed, job=job, status=status, wall_s=60.0)
  return key | (values if status == 'ok' else dict(message='no'))


def rows_of(*rows):
  return {(r['method'], r['seed']): r for r in rows}


def test_the_difference_is_paired_by_seed():
  """Differences 1, 2 and 6: mean 3, s = √7, s / √3 = 1.5275."""
  own, base = {0: 11.0, 1: 32.0, 2: 26.0, 3: 99.0}, {0: 10.0, 1: 30.0, 2: 20.0}
  difference = method_rows.paired(own, base)
  assert difference is not None
  assert difference.mean == pytest.approx(3)
  assert difference.error == pytest.approx(math.sqrt(7 / 3))
  assert difference.seeds == 3
  assert method_rows.paired({0: 1.0}, {1: 1.0}) is None
  one = method_rows.paired({0: 3.0}, {0: 1.0})
  assert one is not None and one.mean == 2 and math.isnan(one.error)


@pytest.mark.parametrize(
  ('difference', 'error', 'seeds', 'text'),
  [
    (4.31, 1.0, 3, 'beats GRPO'),  # Student's t with two degrees of freedom: 4.303
    (4.29, 1.0, 3, 'does not beat GRPO here'),
    (-4.31, 1.0, 3, 'is worse than GRPO'),
    (2.8, 1.0, 5, 'beats GRPO'),  # four: 2.776
    (9.0, math.nan, 1, 'one seed'),
  ],
)
def test_a_method_beats_grpo_where_the_interval_excludes_zero(difference, error, seeds, text):
  assert method_rows.verdict(difference, error, seeds) == text


def test_the_table_has_grpo_first_then_the_best():
  rows = rows_of(
    *(row('grpo', s, m) for s, m in enumerate((30, 32, 34))),
    *(row('dapo', s, m) for s, m in enumerate((29, 33, 34))),
    *(row('opo', s, m) for s, m in enumerate((35, 37.5, 39))),
    row('gspo', 0, 99, 'timeout'),
    row('gmpo', 0, 0, 'failed'),
    row('gmpo', 1, 33),
    row('cispo', 0, 31),
  )
  names = ['cispo', 'dapo', 'gmpo', 'gspo', 'grpo', 'opo']
  lines = method_rows.table(rows, names, (0, 1, 2)).splitlines()
  assert lines[2] == '| `grpo` | 32.0 ± 1.2 | 33.0 ± 1.2 |  | 15,360 | 62 |  |'
  assert lines[3] == '| `opo` | 37.2 ± 1.2 | 38.2 ± 1.2 | +5.2 ± 0.2 | 15,360 | 62 | beats GRPO |'
  assert lines[4] == '| `cispo` | 31.0 | 32.0 | +1.0 | 15,360 | 62 | one seed |'
  assert lines[5] == '| `gmpo` | 33.0 | 34.0 | +1.0 | 15,360 | 62 | one seed, 1 failed |'
  assert lines[6].endswith('| +0.0 ± 0.6 | 15,360 | 62 | does not beat GRPO here |')
  assert lines[7] == '| `gspo` | – | – | – | – | – | 1 timeout |'


def test_a_torn_line_is_run_again_and_spoils_no_other(tmp_path):
  journal = tmp_path / 'rows.jsonl'
  for seed in range(2):
    method_rows.append(journal, row('grpo', seed, 30.0 + seed))
  whole = journal.read_bytes()
  middle = len(whole) // 2
  for cut in (1, 2, middle - 2, middle - 1, middle, middle + 1, len(whole) - 1, len(whole)):
    journal.write_bytes(whole[:cut])
    rows = method_rows.read(journal, {'grpo': 'x'})
    complete = whole[:cut].count(b'}')
    assert len(rows) == complete
    left = methods.pending(rows, ['grpo'], range(3), retry=False)
    assert left == [('grpo', s) for s in range(complete, 3)]
    for _, seed in left:
      method_rows.append(journal, row('grpo', seed, 40.0))
    assert len(method_rows.read(journal, {'grpo': 'x'})) == 3


def test_rows_of_other_settings_are_not_reused(tmp_path):
  journal = tmp_path / 'rows.jsonl'
  method_rows.append(journal, row('grpo', 0, 30.0, job='before'))
  method_rows.append(journal, row('nonesuch', 0, 30.0))
  assert method_rows.read(journal, {'grpo': 'now'}) == {}
  assert method_job.fingerprint('grpo', True) != method_job.fingerprint('grpo', False)


def test_settings_of_features_that_are_off_do_not_make_rows_invalid():
  """A number of 0 where another number was, or another function, does."""
  settings = dict(seed=1, clip=dict(fn='ratio', low=0.2), vote=dict(fn='none', least=3), path='')
  more = settings | dict(head=dict(fn='none', layers=2), sweep=(), note=None, is_new=False)
  assert (
    method_job.active(settings)
    == method_job.active(more)
    == dict(seed=1, clip=dict(fn='ratio', low=0.2))
  )
  for change in (dict(clip=dict(fn='ratio', low=0)), dict(vote=dict(fn='majority', least=3))):
    assert method_job.active(settings | change) != method_job.active(settings)


def test_failures_are_rows_and_retried_on_request():
  rows = rows_of(row('grpo', 0, 0, 'failed'), row('dapo', 0, 0, 'timeout'), row('opo', 0, 1.0))
  names = ['grpo', 'dapo', 'opo']
  assert methods.pending(rows, names, [0], retry=False) == []
  assert methods.pending(rows, names, [0], retry=True) == [('grpo', 0), ('dapo', 0)]
  assert methods.pending(rows, names[:2], [0, 1], retry=False) == [('grpo', 1), ('dapo', 1)]
  assert [seed for _, seed in methods.pending({}, names, [0, 1], retry=False)] == [0, 0, 0, 1, 1, 1]


def test_the_plan_counts_runs_and_hours():
  rows = rows_of(row('grpo', 0, 30.0), row('dapo', 0, 30.0, 'failed'))
  text = methods.plan(rows, [('opo', seed) for seed in range(60)])
  assert '60 runs are left, 2 are finished' in text
  assert '60 s a run (mean of 1 finished runs): 1.0 hours' in text


def test_a_part_of_the_table_is_not_written(tmp_path, monkeypatch):
  monkeypatch.setattr('sys.argv', ['methods', '--methods=grpo', '--seeds=0'])
  options = methods.arguments()
  monkeypatch.setattr(methods.results, 'path', lambda *_: tmp_path / 'methods.md')
  with pytest.raises(SystemExit, match=f'{3 * len(methods.METHODS) - 1} runs are left'):
    methods.write(rows_of(row('grpo', 0, 30.0)), options, 0.0)
  assert not [*tmp_path.iterdir()]


def test_a_run_that_fails_or_hangs_is_a_row(tmp_path, monkeypatch):
  runner = methods.Runner(tmp_path, 300.0, True)
  monkeypatch.setattr(runner, 'start', lambda *_: str(tmp_path / 'missing'))
  failed = runner.run('grpo', 0)
  assert failed['status'] == 'failed' and 'missing' in failed['message']
  runner.deadline_s = 0.01
  assert runner.run('grpo', 0)['status'] == 'timeout'
  monkeypatch.undo()
  runner._failed_starts[0, method_job.START_STEPS] = 'no weights'
  without_start = runner.run('grpo', 0)
  assert without_start['status'] == 'failed' and without_start['message'] == 'no weights'
  assert not [*tmp_path.glob('part-*')]
  assert json.loads(json.dumps(failed)) == failed


class FakeRunner:
  """Notes the cores of each run; `meet` waits until two runs are under way."""

  def __init__(self, meet=lambda: None):
    self.is_stopped, self.meet, self.cpus = False, meet, []

  def run(self, method, seed):
    self.cpus.append(frozenset(os.sched_getaffinity(0)))
    self.meet()
    return row(method, seed, 30.0)

  def stop(self):
    self.is_stopped = True


def test_runs_take_place_side_by_side_on_cores_of_their_own(tmp_path):
  """Of four runs two are always under way, each appears once, and two have no core in common."""
  left = [('grpo', seed) for seed in range(4)]
  runner = FakeRunner(threading.Barrier(2, timeout=60).wait)
  before = os.sched_getaffinity(0)
  methods.take_runs(runner, tmp_path / 'rows.jsonl', left, hours=1.0, jobs=2)
  assert sorted(method_rows.read(tmp_path / 'rows.jsonl', {'grpo': 'x'})) == left
  used = set(runner.cpus)
  assert used == {frozenset(share) for share in methods.shares(before, 2)}
  assert len(used) == 2 or len(before) == 1
  assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize(
  ('cpus', 'jobs', 'want'),
  [
    ({0, 1, 2, 3, 4}, 2, [{0, 2, 4}, {1, 3}]),
    ({1, 3}, 2, [{1}, {3}]),
    ({5, 6}, 3, [{5}, {6}, {5}]),
  ],
)
def test_cores_are_dealt_to_runs(cpus, jobs, want):
  assert methods.shares(cpus, jobs) == want


def test_no_run_begins_when_the_time_is_over(tmp_path, capsys):
  methods.take_runs(FakeRunner(), tmp_path / 'rows.jsonl', [('grpo', 0)], hours=0.0, jobs=2)
  assert not [*tmp_path.iterdir()]
  assert 'the same command goes on' in capsys.readouterr().err


def test_an_interrupted_run_is_no_row(tmp_path):
  """The runs that an interrupt ends would be rows of failed methods."""

  def interrupt():
    runner.stop()

  runner = FakeRunner(interrupt)
  methods.take_runs(runner, tmp_path / 'rows.jsonl', [('grpo', 0), ('dapo', 0)], 1.0, jobs=1)
  assert not [*tmp_path.iterdir()] and len(runner.cpus) == 1


def test_a_stopped_runner_ends_its_runs(tmp_path):
  """This one would take days."""
  runner = methods.Runner(tmp_path, 1e6, False)
  request = dict(seed=0, steps=10**7, to=str(tmp_path / 'model'))
  thread = threading.Thread(target=runner.call, args=(str(tmp_path), request), daemon=True)
  thread.start()
  while not (tmp_path / 'output.txt').exists():
    thread.join(0.05)
  runner.stop()
  thread.join(120)
  assert not thread.is_alive()


def test_methods_that_are_left_out_exist():
  assert set(method_job.EXCLUDED) <= set(PAPERS)
  assert sorted([*methods.METHODS, *method_job.EXCLUDED]) == sorted(PAPERS)
  assert methods.METHODS[0] == method_rows.BASE and not set(methods.METHODS) & set(JOBS)


@pytest.mark.parametrize('name', methods.METHODS)
def test_every_method_is_laid_over_the_job(name):
  """The settings are compatible, and completions equal GRPO's within 2 %.

  A method that cannot be trained on the job belongs into EXCLUDED of lib/method_job.py, with the reason.
  """
  config = method_job.job(name, 1, 'scratch', 'scratch')
  checked, own = validation.sized(config, jax.devices()[:1]), loading.load(name)
  validate.validate(checked)  # otherwise its row would only say that it failed
  in_slots = name in ('dars_top_ups', 'duet', 'knapsack', 'nudge_rl', 'tree_opo', 'xrpo')
  assert checked.seed == 1 and checked.learner.minibatches == (1 if in_slots else 4)
  assert config.rollouts == own.rollouts and config.objective.advantage == own.objective.advantage
  assert checked.prompt_tokens == (16 if own.curriculum.hint.fn == 'none' else 96)
  assert method_job.completions(config) == pytest.approx(15360, rel=0.02)

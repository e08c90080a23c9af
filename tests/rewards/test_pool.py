"""Workers that hang, die or raise: the item has an outcome, and its neighbors keep their rewards."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

from jaxrl_llm import rewards
from jaxrl_llm.rewards import CRASH, ERROR, OK, TIMEOUT
from jaxrl_llm.types import Row, UserError

ROOT = pathlib.Path(__file__).parents[2]

OWN = r"""
import os, re, signal, sys, time

def judge(data_source, solution_str, ground_truth, extra_info=None):
  if solution_str == 'loop':
    while True: pass
  if solution_str == 'regex': re.match(r'(a+)+$', 'a' * 60 + 'b')
  if solution_str == 'power': return (10 ** 10 ** 9) % 7  # in C, where Python's signal handlers do not run
  if solution_str == 'alarm':
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    while True: time.sleep(1)
  if solution_str == 'nap': time.sleep(0.15)
  if solution_str == 'hog': return len(list(range(10 ** 9)))
  if solution_str == 'big': return len(bytearray(3 * 2 ** 27)) / (3 * 2 ** 27)  # 384 MB
  if solution_str == 'keep':
    blocks = globals().setdefault('blocks', [])
    while True: blocks.append(bytearray(2 ** 24))
  if solution_str == 'mute':
    class Mute(Exception):
      def __str__(self): raise ValueError('no message')
    raise Mute
  if solution_str == 'handler':
    def handler(*_): raise ValueError('left behind')
    signal.signal(signal.SIGALRM, handler)
  if solution_str == 'die': os._exit(3)
  if solution_str == 'leave': sys.exit(0)
  if solution_str.startswith('killed'):
    with open(extra_info['file'], 'a') as file: file.write('x')
    if solution_str == 'killed' or os.path.getsize(extra_info['file']) == 1: os.kill(os.getpid(), signal.SIGKILL)
  if solution_str == 'raise': raise ValueError('cannot judge this')
  if solution_str == 'nan': return float('nan')
  if solution_str == 'none': return None
  if solution_str == 'pid': return os.getpid()
  if solution_str == 'jax': return 'jax' in sys.modules
  if solution_str == 'hang':
    with open(extra_info['file'], 'a') as file: file.write(f'{os.getpid()}\n')
    (10 ** 10 ** 9) % 7
  return float(solution_str == ground_truth)
"""


@pytest.fixture(scope='module')
def own(tmp_path_factory):
  folder = tmp_path_factory.mktemp('own')
  (folder / 'own_judge.py').write_text(OWN)
  with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(folder))
    yield str(folder)


def spec_of(**settings) -> dict:
  return dict(fn='own_judge:judge', workers=2, deadline_s=1.0) | settings


@pytest.fixture(scope='module')
def pool(own):
  """With a deadline of a second, for tests of items that hang."""
  with rewards.Pool(spec_of()) as pool:
    yield pool


@pytest.fixture(scope='module')
def patient_pool(own):
  """For items that fail at once: on a busy machine the end of a worker may be seen a second later."""
  with rewards.Pool(spec_of(deadline_s=30.0)) as pool:
    yield pool


def rows_of(count: int, **extra) -> list[Row]:
  return [Row(str(i), 'question', (), str(i % 3), 'source', extra) for i in range(count)]


def judged(pool: rewards.Pool, special: dict[int, str], count: int = 60) -> rewards.Scores:
  """Grades `count` items, some of them special, and checks all the others."""
  rows = rows_of(count)
  texts = [special.get(i, str(i % 2)) for i in range(count)]
  scores = pool.score(rows, texts)
  plain = np.array([i not in special for i in range(count)])
  assert (scores.outcome_B[plain] == OK).all()
  expected = np.array([i % 3 == i % 2 for i in range(count)], np.float32)
  np.testing.assert_array_equal(scores.reward_B[plain], expected[plain])
  return scores


def gone(pid: int) -> bool:
  try:
    return pathlib.Path(f'/proc/{pid}/stat').read_text().rsplit(')', 1)[1].split()[0] in 'ZX'
  except (FileNotFoundError, ProcessLookupError):
    return True


def wait_for(condition, event: str) -> None:
  for _ in range(600):
    if condition():
      return
    time.sleep(0.05)
  pytest.fail(f'did not happen in 30 s: {event}')


def test_results_come_in_order_and_every_time_the_same(pool):
  first, second = judged(pool, {}, 500), judged(pool, {}, 500)
  np.testing.assert_array_equal(first.reward_B, second.reward_B)
  assert first.counts == {'grade/timeouts': 0, 'grade/crashes': 0, 'grade/errors': 0}
  assert first.message == ''
  assert (first.reward_B.dtype, first.outcome_B.dtype) == (np.float32, np.int8)


def test_nothing_to_grade(pool):
  assert pool.score([], []).reward_B.shape == (0,)


def test_hung_items_time_out_alone(pool):
  scores = judged(pool, {3: 'loop', 4: 'power', 59: 'regex'})
  assert scores.outcome_B[[3, 4, 59]].tolist() == [TIMEOUT] * 3
  assert scores.reward_B[[3, 4, 59]].tolist() == [0.0] * 3
  assert scores.counts['grade/timeouts'] == 3
  assert 'past the deadline' in scores.message


def test_a_grader_that_takes_the_alarm_for_itself_times_out_too(pool):
  scores = judged(pool, {7: 'alarm'})
  assert scores.outcome_B[7] == TIMEOUT


def test_an_alarm_handler_of_one_item_does_not_run_in_the_next(pool):
  scores = judged(pool, {8: 'handler', 9: 'loop'})
  assert scores.outcome_B[[8, 9]].tolist() == [OK, TIMEOUT]


@pytest.mark.parametrize('limit_s, ends', [(600.0, False), (1.0, True)])
def test_a_start_may_take_longer_than_a_chunk(limit_s, ends, tmp_path, monkeypatch):
  (tmp_path / 'slow_import.py').write_text(
    f'import multiprocessing, time\nmultiprocessing.parent_process() and time.sleep(6)\n{OWN}'
  )
  monkeypatch.syspath_prepend(str(tmp_path))
  # Four waits, after which workers that have started count as broken, are shorter than one start.
  monkeypatch.setattr('jaxrl_llm.rewards.pool._STALL_S', 0.1)
  monkeypatch.setattr('jaxrl_llm.rewards.pool._START_S', limit_s)
  slow = spec_of(fn='slow_import:judge', workers=1, deadline_s=0.5)
  with rewards.Pool(slow) as pool:
    if ends:
      with pytest.raises(UserError, match='no grading worker has started within .* import less'):
        pool.score(rows_of(3), ['0'] * 3)
    else:
      assert (pool.score(rows_of(3), ['0'] * 3).outcome_B == OK).all()


def test_slow_items_do_not_make_a_hung_chunk(own, monkeypatch):
  # The six naps of a chunk exceed its time limit; each is well within its deadline.
  monkeypatch.setattr('jaxrl_llm.rewards.pool._CHUNK_S', 0.1)
  monkeypatch.setattr('jaxrl_llm.rewards.pool._GRACE_S', 0.1)
  with rewards.Pool(spec_of(workers=1, deadline_s=0.6)) as pool:
    scores = pool.score(rows_of(24), ['nap'] * 24)
  assert (scores.outcome_B == OK).all()


def test_dead_workers_are_crashes_and_are_replaced(patient_pool):
  scores = judged(patient_pool, {0: 'die', 1: 'die', 2: 'die', 30: 'die'})
  assert scores.outcome_B[[0, 1, 2, 30]].tolist() == [CRASH] * 4
  assert scores.counts['grade/crashes'] == 4
  assert 'code 3' in scores.message


def test_an_exception_or_an_invalid_reward_is_an_error(patient_pool):
  special = {2: 'raise', 3: 'nan', 4: 'none', 5: 'leave'}
  scores = judged(patient_pool, special)
  assert scores.outcome_B[list(special)].tolist() == [ERROR] * 4
  assert scores.counts['grade/errors'] == 4
  assert scores.message.startswith('ValueError: cannot judge this, at ')
  assert '/own_judge.py:' in scores.message and 'raise ValueError(' in scores.message


def test_a_row_that_cannot_be_pickled_is_an_error(patient_pool):
  rows = rows_of(3)
  rows[1] = rows[1]._replace(extra=dict(file=lambda: None))
  scores = patient_pool.score(rows, ['0', '1', '2'])
  assert scores.outcome_B.tolist() == [OK, ERROR, OK]
  assert 'lambda' in scores.message
  assert scores.reward_B.tolist() == [1, 0, 1]


def test_a_pool_whose_idle_workers_died_goes_on(patient_pool):
  for pid in set(patient_pool.score(rows_of(16), ['pid'] * 16).reward_B.astype(int).tolist()):
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda pid=pid: gone(pid), 'the end of a killed worker')
  judged(patient_pool, {})


def test_an_item_whose_worker_was_killed_from_outside_is_graded_once_more(patient_pool, tmp_path):
  rows = [row._replace(extra=dict(file=str(tmp_path / row.id))) for row in rows_of(12)]
  texts = [
    'killed once' if i == 4 else 'killed' if i == 7 else row.answer for i, row in enumerate(rows)
  ]
  rows[4] = rows[4]._replace(answer='killed once')
  scores = patient_pool.score(rows, texts)
  assert scores.outcome_B.tolist() == [CRASH if i == 7 else OK for i in range(12)]
  assert scores.reward_B.tolist() == [float(i != 7) for i in range(12)]
  assert [(tmp_path / str(i)).read_text() for i in (4, 7)] == ['xx', 'xx']


def test_workers_do_not_import_jax(pool):
  assert 'jax' in sys.modules  # without this the next assertion is empty
  assert pool.score(rows_of(4), ['jax'] * 4).reward_B.tolist() == [0.0] * 4


def test_an_item_beyond_the_memory_limit_crashes_alone(own):
  """The memory of such an item is freed with its worker: the next item of the same size fits."""
  special = {1: 'hog', 2: 'keep', 3: 'big', 40: 'keep', 41: 'big'}
  with rewards.Pool(spec_of(memory_mb=512, deadline_s=30.0)) as pool:
    scores = judged(pool, special)
  assert scores.outcome_B[list(special)].tolist() == [CRASH, CRASH, OK, CRASH, OK]
  assert scores.reward_B[[3, 41]].tolist() == [1.0, 1.0]
  assert scores.counts['grade/crashes'] == 3 and 'memory_mb' in scores.message


def test_chunks_of_long_completions_are_small(own):
  texts = ['x' * 2**23] * 20 + ['0'] * 4
  with rewards.Pool(spec_of(workers=1, memory_mb=64, deadline_s=60.0)) as pool:
    scores = pool.score([row._replace(answer='0') for row in rows_of(24)], texts)
  assert scores.reward_B.tolist() == [0] * 20 + [1] * 4 and (scores.outcome_B == OK).all()


def test_processor_time_is_bounded_beside_the_clock(own):
  with rewards.Pool(spec_of(cpu_s=0.5, deadline_s=60.0)) as pool:
    scores = judged(pool, {3: 'loop', 4: 'nap', 5: 'power'})
  assert scores.outcome_B[[3, 4, 5]].tolist() == [TIMEOUT, OK, TIMEOUT]
  assert 'cpu_s' in scores.message


def test_an_exception_whose_str_fails_is_an_error(patient_pool):
  scores = judged(patient_pool, {6: 'mute'})
  message = 'Mute: an error whose message cannot be read, at '
  assert scores.outcome_B[6] == ERROR and scores.message.startswith(message)


def test_close_ends_every_worker_and_a_later_call_starts_new_ones(own):
  with rewards.Pool(spec_of()) as pool:
    pids = set(pool.score(rows_of(8), ['pid'] * 8).reward_B.astype(int).tolist())
    pool.close()
    assert all(gone(pid) for pid in pids)
    again = set(pool.score(rows_of(8), ['pid'] * 8).reward_B.astype(int).tolist())
  assert not pids & again


def test_graders_of_bounded_time_start_no_worker():
  with rewards.Pool(dict(fn='number')) as pool:
    rows = rows_of(3) + [Row('x', '', (), 'blue', 's', {})]
    scores = pool.score(rows, ['0', 'so 1', '7', '7'])
    assert pool._processes.newest is None
  assert scores.reward_B.tolist() == [1, 1, 0, 0]
  assert scores.outcome_B.tolist() == [OK, OK, OK, ERROR]


def test_every_part_grades_every_item_and_one_that_fails_fails_the_item(own):
  parts = (dict(fn='tagged', tag='b'), dict(fn='own_judge:judge', name='again'))
  rows, texts = rows_of(6), ['0', '<b>1</b>', 'raise', 'loop', 'die', '2']
  with rewards.Pool(spec_of(parts=parts)) as pool:
    scores = pool.score(rows, texts)
  assert scores.outcome_B.tolist() == [OK, OK, ERROR, TIMEOUT, CRASH, OK]
  want = [[1, 0, 1], [0, 1, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0], [1, 0, 1]]
  assert scores.parts_BxK.tolist() == want and scores.parts_BxK.dtype == np.float32
  assert scores.reward_B.tolist() == [1, 0, 0, 0, 0, 1]


def test_parts_of_bounded_time_start_no_worker():
  with rewards.Pool(dict(fn='number', parts=(dict(fn='bare_number'),))) as pool:
    scores = pool.score(rows_of(3) + [Row('x', '', (), 'blue', 's', {})], ['0', 'so 1', '7', '7'])
    assert pool._processes.newest is None
  assert scores.parts_BxK.tolist() == [[1, 1], [1, 0], [0, 1], [0, 0]]
  assert scores.outcome_B.tolist() == [OK, OK, OK, ERROR]


def test_score_starts_workers_or_uses_those_of_a_pool(own, pool):
  assert rewards.score(rows_of(2), ['0', '0'], spec_of(workers=1)).reward_B.tolist() == [1, 0]
  assert rewards.score(rows_of(2), ['0', '0'], spec_of(), pool).reward_B.tolist() == [1, 0]
  with pytest.raises(ValueError, match='the pool was made for'):
    rewards.score([], [], dict(fn='exact'), pool)
  with pytest.raises(ValueError, match='2 rows but 1 completions'):
    pool.score(rows_of(2), ['0'])


@pytest.mark.parametrize(
  'settings, message',
  [
    (dict(workers=0), 'config.rewards.workers=0 must be'),
    (dict(workers=1.5), 'config.rewards.workers=1.5 must be'),
    (dict(deadline_s=0), 'config.rewards.deadline_s=0 must be'),
    (dict(deadline_s=float('inf')), 'config.rewards.deadline_s=inf must be'),
    (dict(deadline_s='10'), "config.rewards.deadline_s='10' must be"),
    (dict(cpu_s=0.0), 'config.rewards.cpu_s=0.0 must be'),
    (dict(memory_mb=0), 'config.rewards.memory_mb=0 must be'),
    (dict(memory_mb=512.0), 'config.rewards.memory_mb=512.0 must be'),
  ],
)
def test_bad_settings_are_refused(settings, message):
  with pytest.raises(UserError, match=message):
    rewards.Pool(dict(fn='exact') | settings)


def test_importing_rewards_does_not_import_jax():
  code = "import sys, jaxrl_llm.rewards; sys.exit('jax' in sys.modules)"
  assert subprocess.run([sys.executable, '-c', code], cwd=ROOT).returncode == 0


SCRIPT = """
import jax  # costly for a worker that ran this file again
from jaxrl_llm import rewards
from jaxrl_llm.types import Row

print('started', flush=True)
row = Row('0', 'question', (), '0', 'source', dict(file={file!r}))
spec = dict(fn='own_judge:judge', workers=2, deadline_s={deadline_s})
print(rewards.score([row] * 4, {texts!r}, spec).reward_B.tolist(), flush=True)
"""


def start_script(tmp_path, own, texts, deadline_s=30.0) -> subprocess.Popen:
  path = tmp_path / 'script.py'
  fields = dict(file=str(tmp_path / 'pids'), texts=texts, deadline_s=deadline_s)
  path.write_text(textwrap.dedent(SCRIPT).format(**fields))
  return subprocess.Popen(
    [sys.executable, str(path)],
    env=os.environ | dict(PYTHONPATH=f'{ROOT}:{own}'),
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    # A shell starts background jobs with SIGINT ignored, and children inherit that.
    preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
  )


def pids_in(tmp_path) -> list[int]:
  file = tmp_path / 'pids'
  return [int(line) for line in file.read_text().split()] if file.exists() else []


def test_a_script_without_a_main_guard_is_not_run_again_by_workers(tmp_path, own):
  process = start_script(tmp_path, own, ['0', '1', 'jax', '0'])
  out, _ = process.communicate(timeout=120)
  # A worker that is still starting when the pool closes may print other lines.
  assert out.count('started') == 1 and out.endswith('[1.0, 0.0, 0.0, 1.0]\n')


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGKILL])
def test_no_worker_outlives_its_parent(tmp_path, own, number):
  # After SIGKILL there is no cleanup: a hung worker ends by its own deadline.
  deadline_s = 30.0 if number == signal.SIGINT else 2.0
  process = start_script(tmp_path, own, ['hang'] * 4, deadline_s)
  wait_for(lambda: len(pids_in(tmp_path)) >= 2, 'two hung workers')
  process.send_signal(number)
  out, _ = process.communicate(timeout=60)
  assert process.returncode != 0 and ('KeyboardInterrupt' in out) == (number == signal.SIGINT)
  wait_for(lambda: all(gone(pid) for pid in pids_in(tmp_path)), 'the end of all workers')

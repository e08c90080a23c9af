"""Runs of a small job that are killed, starved of disk, stopped and damaged at chosen or random moments.

`Nursery` is a process that has imported what is slow and started no thread: it forks a child for every start of a run,
so that a start costs a fork and not an import. A fault is dict(kind=, at=, skip=): what happens, at which stage, and
how often that stage passes before. test_faults.py runs a few of each; tests/bench/faults.py runs many.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import quick
import tiny_job

from jaxrl_llm import metrics

ROOT = pathlib.Path(__file__).parents[1]
STEPS = 12
JOB = dict(
  steps=STEPS,
  scratch=dict(width=16, layers=1, heads=2, kv_heads=1, mlp=32, max_tokens=32),
  sft=dict(steps=60, learning_rate=1e-2, prompts=16),
  data=dict(
    source='digits', size=64, chat=False, tasks=[dict(name='copy', min_length=1, max_length=1)]
  ),
  eval=dict(every=4, prompts=8, samples=1),
  checkpoint=dict(every=1, keep=2),
)
# Stages inside a save, in their order, and stages of the loop around it.
SAVE = (
  *('begin', 'device', 'flushed', 'host', 'manifest', 'sealed', 'read_back', 'commit', 'committed'),
  'retention',
)
LOOP = ('propose', 'land', 'rollouts', 'half_row', 'row')

_SERVER = r"""
import errno, json, os, pathlib, shutil, signal, sys, threading, time
import numpy as np
from jaxrl_llm import checkpoint, console, grade, main, metrics, train, turn, workdir  # jax too, and no backend yet

def die(): os.kill(os.getpid(), signal.SIGKILL)
def full(): raise OSError(errno.ENOSPC, 'No space left on device')
def term(): os.kill(os.getpid(), signal.SIGTERM)
def term_twice():
  term()
  time.sleep(0.05)
  term()
  np.linalg.svd(np.ones((4000, 4000)))  # in C for seconds: no handler of Python's can run
def leap(): clock.update(ahead=clock['ahead'] + clock['by'])

def kill_grader():
  # The worker that says it has begun: see JUDGE.
  told = pathlib.Path(os.environ['JUDGES'])
  told.unlink(missing_ok=True)
  def strike():
    while not told.exists() or not told.read_text(): time.sleep(0.005)
    os.kill(int(told.read_text()), signal.SIGKILL)
    print('killed a grader', flush=True)
  threading.Thread(target=strike, daemon=True).start()

clock = dict(ahead=0.0, by=0.0)
real_time = time.time
time.time = lambda: real_time() + clock['ahead']

def wrap(owner, name, happen, wanted=lambda *_: True, after=False):
  real = getattr(owner, name)
  def wrapped(*args, **kw):
    if not wanted(*args): return real(*args, **kw)
    if not after: happen()
    found = real(*args, **kw)
    if after: happen()
    return found
  setattr(owner, name, wrapped)

def seen(folder):
  try: return any(f.is_file() for f in pathlib.Path(folder).glob('*.part/device*/**/*'))
  except FileNotFoundError: return False  # renamed while it was walked

def half_written(folder):
  def watch():
    while not seen(folder): time.sleep(0.001)
    die()
  watcher = threading.Thread(target=watch, daemon=True)
  watcher.start()
  wrap(checkpoint, '_seal', watcher.join)  # else the save may be over before the turn of this thread comes

def of_metrics(writer, *_): return writer._file.name.endswith('metrics.jsonl')

def half_row(happen):
  real = metrics.Writer.write
  def write(self, row):
    if not of_metrics(self): return real(self, row)
    text = metrics._line(row)
    self._file.write(text[: len(text) // 2]); self._file.flush()
    happen()
    self._file.seek(0, 2)
  metrics.Writer.write = write

def name_is(end): return lambda path, *_: str(path).endswith(end)

def plan(fault, workdir_path):
  kind, at, left = fault['kind'], fault['at'], [fault.get('skip', 0)]
  clock['by'] = fault.get('by', 0.0)
  if kind == 'kill grader': return wrap(grade.Pool, 'score', kill_grader)
  do = {'kill': die, 'full': full, 'leap': leap, 'term': term, 'term twice': term_twice}[kind]
  if at == 'device': do = lambda: half_written(os.path.join(workdir_path, 'checkpoints'))
  def happen():
    left[0] -= 1
    if left[0] == -1: do()
  c = checkpoint
  stages = dict(
    begin=lambda: wrap(c, 'check_space', happen),
    device=lambda: wrap(c, 'check_space', happen),
    flushed=lambda: wrap(c, '_seal', happen),
    host=lambda: wrap(c, '_write', happen, name_is('host.json')),
    manifest=lambda: wrap(c, '_write', happen, name_is('manifest.json')),
    sealed=lambda: wrap(c, '_write', happen, name_is('manifest.json'), after=True),
    read_back=lambda: wrap(c, '_read_back', happen),
    commit=lambda: wrap(os, 'replace', happen, lambda a, b: 'checkpoints' in a and a.endswith('.part')),
    committed=lambda: wrap(c, '_retain', happen),
    retention=lambda: wrap(shutil, 'rmtree', happen, lambda p, **_: str(p).endswith('.old')),
    propose=lambda: wrap(turn, 'propose', happen),
    land=lambda: wrap(turn, 'land', happen),
    rollouts=lambda: wrap(workdir.Workdir, 'write_rollouts', happen),
    half_row=lambda: half_row(happen),
    row=lambda: wrap(metrics.Writer, 'write', happen, of_metrics, after=True),
    eval=lambda: wrap(workdir.Workdir, 'write_eval', happen),
  )
  stages[at]()

def child(order):
  log = os.open(order['log'], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
  os.dup2(log, 1); os.dup2(log, 2)
  if order['fault']: plan(order['fault'], order['workdir'])
  os._exit(main.main(order['argv']))

for line in sys.stdin:
  order = json.loads(line)
  pid = os.fork()
  if not pid:
    try: child(order)
    except BaseException:
      import traceback; traceback.print_exc()
      sys.stderr.flush()
      os._exit(70)
  if order['after_s'] is not None:
    log, begun = pathlib.Path(order['log']), time.monotonic()
    while not os.waitpid(pid, os.WNOHANG)[0]:
      if log.exists() and order['after_text'] in log.read_text(errors='replace'):
        time.sleep(order['after_s'])
        try: os.kill(pid, order['signal'])
        except ProcessLookupError: pass
        status = os.waitpid(pid, 0)[1]
        break
      time.sleep(0.005)
    else: status = 0
  else: status = os.waitpid(pid, 0)[1]
  print(json.dumps(os.waitstatus_to_exitcode(status)), flush=True)
"""


JUDGE = """
import os, time

def judge(data_source, solution_str, ground_truth, extra_info=None):
  if not os.path.exists(os.environ['JUDGES']):
    with open(os.environ['JUDGES'], 'w') as file: file.write(str(os.getpid()))
    time.sleep(0.5)
  return float(solution_str == ground_truth)
"""


class Nursery:
  """Forks runs. start(workdir, …) → (exit status, what was printed); negative where a signal ended it."""

  def __init__(self, folder: pathlib.Path, **changes):
    self._folder = folder
    self.config = tiny_job.config_file(folder, **(JOB | changes))
    env = os.environ | dict(
      JAX_PLATFORMS='cpu',
      PYTHONPATH=f'{ROOT}:{folder}',
      JUDGES=str(folder / 'begun'),
      XLA_FLAGS=quick.flags(1),
      JAXRL_LLM_CACHE=str(folder / 'cache'),
    )
    (folder / 'slow_judge.py').write_text(JUDGE)
    self._server = subprocess.Popen(
      [sys.executable, '-c', _SERVER],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
      env=env,
    )

  def __enter__(self) -> Nursery:
    return self

  def __exit__(self, *_) -> None:
    self._server.stdin.close()
    self._server.wait(60)

  def start(
    self,
    workdir: pathlib.Path,
    *more: str,
    fault: dict | None = None,
    signal: int = 0,
    after_s: float | None = None,
    after_text: str = '',
  ) -> tuple[int, str]:
    """`signal` is sent `after_s` seconds after `after_text` was printed."""
    log = self._folder / 'log'
    order = dict(
      argv=[f'--config={self.config}', f'--workdir={workdir}', *more],
      workdir=str(workdir),
      log=str(log),
      fault=fault,
      signal=signal,
      after_s=after_s,
      after_text=after_text,
    )
    log.unlink(missing_ok=True)
    self._server.stdin.write(json.dumps(order) + '\n')
    self._server.stdin.flush()
    return json.loads(self._server.stdout.readline()), log.read_text(errors='replace')


def assert_same(run: pathlib.Path, want: pathlib.Path, whole: bool = True) -> None:
  """Metrics, tokens, evaluations and (of a whole run) weights and all other saved state, bit for bit."""
  ours, theirs = (metrics.comparable(metrics.read(str(r / 'metrics.jsonl'))) for r in (run, want))
  assert ours == theirs[: len(ours)]
  for folder in ('rollouts', 'eval'):
    names = sorted(p.name for p in (run / folder).glob('*.json*') if p.suffix != '.part')
    for name in names:
      assert (run / folder / name).read_bytes() == (want / folder / name).read_bytes(), name
  if whole:
    assert len(ours) == len(theirs) == STEPS
    for folder in ('rollouts', 'eval', 'checkpoints'):
      assert sorted(os.listdir(run / folder)) == sorted(os.listdir(want / folder))
    ours, theirs = saved(run), saved(want)
    assert ours.keys() == theirs.keys() and not [
      name for name in ours if ours[name] != theirs[name]
    ]


def newest(run: pathlib.Path) -> pathlib.Path:
  return max(p for p in (run / 'checkpoints').iterdir() if not p.suffix)


def damage(run: pathlib.Path, how: str) -> tuple[pathlib.Path, str]:
  """Makes the largest file of the newest checkpoint short, one bit wrong, or go: (checkpoint, file)."""
  path = newest(run)
  largest = max((p for p in path.rglob('*') if p.is_file()), key=lambda p: p.stat().st_size)
  data = bytearray(largest.read_bytes())
  data[len(data) // 3] ^= 4
  if how == 'gone':
    largest.unlink()
  else:
    largest.write_bytes(data[: len(data) // 2] if how == 'short' else data)
  return path, '' if how == 'gone' else str(largest.relative_to(path))


def saved(run: pathlib.Path) -> dict[str, bytes]:
  """Everything in the newest checkpoint: name → bytes."""
  import numpy as np
  import tensorstore as ts

  path = newest(run)
  where = dict(driver='ocdbt', base=f'file://{path}/device/')
  keys = [key.decode() for key in ts.KvStore.open(where).result().list().result()]
  found = {}
  for name in (k.removesuffix('.zarray').rstrip('/') for k in keys if k.endswith('.zarray')):
    spec = dict(driver='zarr', kvstore=where | dict(path=name))
    found[name] = np.asarray(ts.open(spec, open=True).result().read().result()).tobytes()
  with np.load(path / 'host.npz') as file:
    found |= {f'host {name}': file[name].tobytes() for name in file.files}
  host = json.loads((path / 'host.json').read_text())
  return found | {'host': json.dumps(host, sort_keys=True).encode()}

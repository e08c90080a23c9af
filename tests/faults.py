"""Runs of a small job with faults: killed, out of disk, stopped or damaged, at chosen or random moments.

A fault is dict(kind=, at=, skip=): the kind, the stage, and the number of passes of the stage before the fault; see
fault_plan.py. test_faults.py runs a few of each; tests/bench/faults.py runs many.
"""

from __future__ import annotations

import json
import os
import pathlib
import time

import forks
import tiny_job

from jaxrl_llm.checkpointing import metrics_log

STEPS = 12
JOB = dict(
  steps=STEPS,
  scratch=dict(width=16, layers=1, heads=2, kv_heads=1, mlp=32, max_tokens=32),
  **tiny_job.UNTAUGHT,
  optimizer=dict(learning_rate=3e-3),
  data=dict(
    source='digits', size=64, chat=False, tasks=[dict(name='copy', min_length=1, max_length=1)]
  ),
  evaluation=dict(every=4, prompts=8, samples=0),
  checkpoint=dict(every=1, keep=2),
)
# Episodes of up to six turns that live over three steps, each with an environment in a worker of its own.
TURNS = dict(
  mode='split',
  completion_tokens=120,
  scratch=JOB['scratch'] | dict(max_tokens=160),
  environment=dict(
    fn='tests.environments.delayed:delayed',
    turns=6,
    rounds=2,
    judge='environment',
    workers=2,
    mean_s=0.01,
  ),
)
# Stages of a save in order, and stages of the training loop.
SAVE = (
  *('begin', 'device', 'flushed', 'host', 'manifest', 'sealed', 'read_back', 'commit', 'committed'),
  'retention',
)
# Stages of publishing a checkpoint in an object store.
PUBLISH = ('upload', 'marker', 'marked', 'unmarked')
LOOP = ('propose', 'land', 'rollouts', 'half_row', 'row')


class JobRunner:
  """Starts runs of one job. start(workdir, …) → (exit status, output); a signal N gives the status −N."""

  def __init__(self, folder: pathlib.Path, env: dict[str, str] | None = None, **changes):
    self.config = tiny_job.config_file(folder, **(JOB | changes))
    self._env = dict(JUDGES=str(folder / 'begun')) | (env or {})  # see judges.py

  def start(
    self,
    workdir: pathlib.Path,
    *more: str,
    fault: dict | None = None,
    signal: int = 0,
    after_s: float | None = None,
    after_text: str = '',
    url: str = '',
  ) -> tuple[int, str]:
    """Run the job; `signal` is sent `after_s` seconds after `after_text` appears in the output.

    The run directory is `url` where one is given; the log lies beside `workdir`.
    """
    argv = [f'--config={self.config}', f'--workdir={url or workdir}', *more]
    process = forks.start(argv, workdir, fault=fault, **self._env)
    if after_s is not None:
      while process.poll() is None and after_text not in process.text():
        time.sleep(0.005)
      time.sleep(after_s)
      process.send_signal(signal)
    out, _ = process.communicate()
    return process.returncode, out


def assert_same(run: pathlib.Path, expected: pathlib.Path, complete: bool = True) -> None:
  """Compare metrics, tokens, evaluations and, for a complete run, all saved state, bit for bit."""
  rows, expected_rows = (
    [
      {k: v for k, v in row.items() if k != 'environment/replayed'}
      for row in metrics_log.comparable(rows)
    ]
    for rows in (metrics_log.read(str(r / 'metrics.jsonl')) for r in (run, expected))
  )
  assert rows == expected_rows[: len(rows)]
  for folder in ('rollouts', 'eval'):
    names = sorted(p.name for p in (run / folder).glob('*.json*') if p.suffix != '.part')
    for name in names:
      assert (run / folder / name).read_bytes() == (expected / folder / name).read_bytes(), name
  if complete:
    assert len(rows) == len(expected_rows) == STEPS
    for folder in ('rollouts', 'eval', 'checkpoints'):
      assert sorted(os.listdir(run / folder)) == sorted(os.listdir(expected / folder))
    state, expected_state = saved_state(run), saved_state(expected)
    assert state.keys() == expected_state.keys()
    assert not [name for name in state if state[name] != expected_state[name]]


def newest(run: pathlib.Path) -> pathlib.Path:
  return max(p for p in (run / 'checkpoints').iterdir() if not p.suffix)


def damage(run: pathlib.Path, how: str) -> tuple[pathlib.Path, str]:
  """Truncate ('short'), corrupt ('bit') or remove ('gone') the largest file of the newest checkpoint.

  Returns (checkpoint, relative path of the file, or '' for a removed one).
  """
  path = newest(run)
  largest = max((p for p in path.rglob('*') if p.is_file()), key=lambda p: p.stat().st_size)
  data = bytearray(largest.read_bytes())
  data[len(data) // 3] ^= 4
  if how == 'gone':
    largest.unlink()
  else:
    largest.write_bytes(data[: len(data) // 2] if how == 'short' else data)
  return path, '' if how == 'gone' else str(largest.relative_to(path))


def saved_state(run: pathlib.Path) -> dict[str, bytes]:
  """The content of the newest checkpoint: name → bytes."""
  import numpy as np
  import tensorstore as ts

  path = newest(run)
  store = dict(driver='ocdbt', base=f'file://{path}/device/')
  keys = [key.decode() for key in ts.KvStore.open(store).result().list().result()]
  state = {}
  for name in (k.removesuffix('.zarray').rstrip('/') for k in keys if k.endswith('.zarray')):
    spec = dict(driver='zarr', kvstore=store | dict(path=name))
    state[name] = np.asarray(ts.open(spec, open=True).result().read().result()).tobytes()
  with np.load(path / 'host.npz') as file:
    state |= {f'host {name}': file[name].tobytes() for name in file.files}
  host = json.loads((path / 'host.json').read_text())
  return state | {'host': json.dumps(host, sort_keys=True).encode()}

"""Runs of a small job that are killed, starved of disk, stopped and damaged at chosen or random moments.

A fault is dict(kind=, at=, skip=): what happens, at which stage, and how often that stage passes before; see
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
# Stages inside a save, in their order, and stages of the loop around it.
SAVE = (
  *('begin', 'device', 'flushed', 'host', 'manifest', 'sealed', 'read_back', 'commit', 'committed'),
  'retention',
)
LOOP = ('propose', 'land', 'rollouts', 'half_row', 'row')


class Nursery:
  """Starts runs of one job. start(workdir, …) → (exit status, what was printed); negative where a signal ended it."""

  def __init__(self, folder: pathlib.Path, **changes):
    self.config = tiny_job.config_file(folder, **(JOB | changes))
    self._env = dict(JUDGES=str(folder / 'begun'))  # see judges.py

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
    argv = [f'--config={self.config}', f'--workdir={workdir}', *more]
    process = forks.start(argv, workdir, fault=fault, **self._env)
    if after_s is not None:
      while process.poll() is None and after_text not in process.text():
        time.sleep(0.005)
      time.sleep(after_s)
      process.send_signal(signal)
    out, _ = process.communicate()
    return process.returncode, out


def assert_same(run: pathlib.Path, want: pathlib.Path, whole: bool = True) -> None:
  """Metrics, tokens, evaluations and (of a whole run) weights and all other saved state, bit for bit."""
  ours, theirs = (
    metrics_log.comparable(metrics_log.read(str(r / 'metrics.jsonl'))) for r in (run, want)
  )
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

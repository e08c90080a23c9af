"""Fault tolerance of runs: kills at random moments and during saves, full disks, damaged checkpoints, wrong clocks.

python -m tests.bench.faults [--kills 50] [--seed 0] [--out runs/faults] [--smoke] [--turns] [--store [s3|gs|all]]
The job of tests/faults.py; every start resumes after the fault before it. After each fault, the files of the run are
compared with those of an uninterrupted run, bit for bit: metrics, tokens, evaluations, and at the end of a chain the
full content of the checkpoint. Full disks are injected errors and, where it can be mounted, a file system of some
kilobytes. `--turns` kills a run whose episodes live in environments over several steps instead, at random moments.
`--store` kills runs in an object store, a server on loopback, half of the kills at random moments and half at a random
object of a checkpoint or a stage of its publication.
"""

from __future__ import annotations

import argparse
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import faults
import object_stores
from faults import STEPS, JobRunner, assert_same, damage

from jaxrl_llm.checkpointing import manifest, metrics_log
from jaxrl_llm.distributed import preemption
from tests.bench.lib import smoke


class Ledger:
  """Counts survived faults. A run that differs ends the program by an assertion."""

  def __init__(self):
    self.counts: dict[str, int] = {}

  def __call__(self, kind: str) -> None:
    self.counts[kind] = self.counts.get(kind, 0) + 1
    print(f'{kind}: {self.counts[kind]}', flush=True)


def finish(job_runner: JobRunner, run: pathlib.Path, want: pathlib.Path) -> int:
  status, out = job_runner.start(run)
  assert status == 0, out
  return end(run, want)


def end(run: pathlib.Path, want: pathlib.Path) -> int:
  """Compare a complete run and remove it. Returns how many episodes were replayed after its faults."""
  assert_same(run, want)
  rows = metrics_log.read(str(run / 'metrics.jsonl'))
  shutil.rmtree(run)
  return int(sum(row.get('environment/replayed', 0) for row in rows))


def random_signals(job_runner, want, out, survived, count: int, draw: random.Random, which) -> int:
  """A run that ends before its signal starts again. Returns how many episodes were replayed."""
  run, done, replayed = out / f'random {which.name}', 0, 0
  while done < count:
    after = draw.choice(['resuming at', 'compiling', f'/{STEPS}'])
    status, text = job_runner.start(
      run, signal=int(which), after_s=draw.random() * 1.5, after_text=after if run.exists() else ''
    )
    if status == 0:
      replayed += end(run, want)
      continue
    expected = {-which, preemption.EXIT_PREEMPTED} if which == signal.SIGTERM else {-which}
    assert status in expected, (status, text)
    if (run / 'metrics.jsonl').exists():
      assert_same(run, want, complete=False)
    done += 1
    survived(f'{which.name} at a random moment')
  return replayed + finish(job_runner, run, want)


def store_kills(want, out, survived, count: int, draw: random.Random, scheme: str) -> None:
  """Kills of a run in an object store. The newest whole checkpoint never becomes older."""
  names = dict(s3='S3 (moto)', gs='GCS (gcp-storage-emulator)')
  with object_stores.serve(scheme, out / f'{scheme}.log') as server:
    job_runner, newest, done, chain = JobRunner(out, server.env), -1, 0, 0
    while done < count:
      path = f'chain {chain}/run'
      url, run = server.url(path), out / f'{scheme} run'
      if draw.random() < 0.5:
        how = dict(signal=int(signal.SIGKILL), after_s=draw.random() * 3)
        how |= dict(
          after_text=draw.choice(['resuming at' if newest > 0 else '', 'compiling', f'/{STEPS}'])
        )
        kind = 'at a random moment'
      else:
        at = draw.choice(faults.PUBLISH)
        how = dict(fault=dict(kind='kill', at=at, skip=draw.randrange(40 if at == 'upload' else 3)))
        kind = 'while a checkpoint is published'
      status, text = job_runner.start(run, url=url, **how)
      copy = server.copy(path, out / f'{scheme} copy')
      assert_same(copy, want, complete=status == 0) if (copy / 'metrics.jsonl').exists() else None
      steps = sorted(int(p.name[5:]) for p in copy.glob('checkpoints/step_*'))
      assert not [s for s in steps if manifest.damage(str(copy / f'checkpoints/step_{s:06d}'))]
      assert max(steps, default=-1) >= newest, (steps, newest)
      newest = max(steps, default=-1)
      shutil.rmtree(copy, ignore_errors=True)
      if status == 0:
        chain, newest = chain + 1, -1
        continue
      assert status == -signal.SIGKILL, text
      done += 1
      survived(f'SIGKILL {kind}, {names[scheme]}')
    status, text = job_runner.start(run, url=url)
    assert status == 0, text
    assert_same(server.copy(path, out / f'{scheme} copy'), want)


def stages(job_runner, want, out, survived) -> None:
  """Every stage of a save and of a step, at every one of three saves or steps."""
  for skip in range(3):
    for names in (faults.SAVE, faults.LOOP):
      run = out / 'stages'
      for at in names:
        status, text = job_runner.start(run, fault=dict(kind='kill', at=at, skip=min(skip, 1)))
        if status == 0:  # all steps are done: the chain starts again
          assert_same(run, want)
          shutil.rmtree(run)
          status, text = job_runner.start(run, fault=dict(kind='kill', at=at, skip=skip))
        assert status == -signal.SIGKILL, text
        if (run / 'metrics.jsonl').exists():
          assert_same(run, want, complete=False)
        survived('SIGKILL at a stage')
      finish(job_runner, run, want)


def full_disk(job_runner, want, out, survived) -> None:
  for at in (
    'begin',
    'flushed',
    'host',
    'manifest',
    'sealed',
    'read_back',
    'commit',
    'rollouts',
    'row',
  ):
    run = out / 'full'
    status, text = job_runner.start(run, fault=dict(kind='full', at=at, skip=2))
    assert status == 2 and 'make room' in text and 'Traceback' not in text, text
    assert_same(run, want, complete=False)
    survived('disk full, injected')
    finish(job_runner, run, want)


def small_disk(job_runner, want, out, survived, sizes_kb) -> None:
  """On a file system that is really full, where one can be mounted."""
  run = out / 'small'
  for size in sizes_kb:
    run.mkdir(parents=True, exist_ok=True)
    mount = subprocess.run(['mount', '-t', 'tmpfs', '-o', f'size={size}k', 'tmpfs', str(run)])
    if mount.returncode:
      print('no file system can be mounted here: a really full disk was not tested')
      return
    try:
      status, text = job_runner.start(run)
      full = status == 2 and 'make room' in text and 'Traceback' not in text
      assert full or status == 0, text
      if (run / 'metrics.jsonl').exists():
        assert_same(run, want, complete=False)
      subprocess.run(['mount', '-o', 'remount,size=64m', str(run)], check=True)
      status, text = job_runner.start(run)
      assert status == 0, text
      assert_same(run, want)
      survived('disk really full' if full else 'disk just large enough')
    finally:
      subprocess.run(['umount', str(run)], check=True)


def damages(job_runner, want, out, survived, ways=('short', 'bit', 'gone')) -> None:
  for how in ways:
    run = out / 'damaged'
    job_runner.start(run, fault=dict(kind='kill', at='land', skip=6))
    damage(run, how)
    finish(job_runner, run, want)
    survived(f'newest checkpoint damaged: {how}')


def clocks(job_runner, want, out, survived) -> None:
  for by in (-1e6, -3.0, 3.0, 1e6):
    run = out / 'clock'
    status, text = job_runner.start(run, fault=dict(kind='leap', at='land', skip=3, by=by))
    assert status == 0, text
    assert_same(run, want)
    shutil.rmtree(run)
    survived('clock set forward or back')


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--kills', type=int, default=50)
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument('--out', default='runs/faults')
  parser.add_argument('--turns', action='store_true')
  parser.add_argument('--store', choices=('s3', 'gs', 'all'))
  options = smoke.parse(parser, kills=1)
  out = pathlib.Path(options.out).absolute()
  shutil.rmtree(out, ignore_errors=True)
  out.mkdir(parents=True)
  survived, began, draw = Ledger(), time.monotonic(), random.Random(options.seed)
  changes = faults.TURNS if options.turns else {}
  job_runner, want = JobRunner(out, **changes), out / 'uninterrupted'
  status, text = job_runner.start(want)
  assert status == 0, text
  common = job_runner, want, out, survived
  if options.store:
    for scheme in ('s3', 'gs') if options.store == 'all' else (options.store,):
      store_kills(want, out, survived, options.kills, draw, scheme)
  else:
    replayed = random_signals(*common, options.kills, draw, signal.SIGKILL)
    if options.turns:
      print(f'{replayed} episodes were replayed')
    if options.smoke:
      damages(*common, ['bit'])
    elif not options.turns:
      random_signals(*common, max(options.kills // 5, 1), draw, signal.SIGTERM)
      stages(*common)
      full_disk(*common)
      small_disk(*common, (200, 400, 600, 900))
      damages(*common)
      clocks(*common)
  for kind, count in survived.counts.items():
    print(f'{count:4} {kind}')
  print(
    f'{sum(survived.counts.values())} faults in a job of {STEPS} steps, {time.monotonic() - began:.0f} s: all survived'
  )


if __name__ == '__main__':
  main()

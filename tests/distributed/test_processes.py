"""A run on several processes, and a run whose number of devices changes, give the same numbers up to rounding."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time

import faults
import numpy as np
import pytest
import tiny_job

from jaxrl_llm.checkpointing import metrics_log
from jaxrl_llm.distributed import preemption, watchdog

JOB = faults.JOB | dict(
  steps=8,
  checkpoint=dict(every=2, keep=9),
  evaluation=dict(every=0, prompts=8, samples=0),
)


def start_all(
  config: str, workdir, *more: str, processes: int = 2, devices: int = 1, fault_of=(None,) * 4
):
  with socket.socket() as free:
    free.bind(('127.0.0.1', 0))
    port = free.getsockname()[1]
  flags = [f'--coordinator=127.0.0.1:{port}', f'--processes={processes}', *more]
  return [
    tiny_job.start(config, workdir, *flags, f'--process={i}', devices=devices, fault=fault_of[i])
    for i in range(processes)
  ]


def assert_close(run, want, steps: int = JOB['steps']) -> None:
  ours, theirs = (
    metrics_log.comparable(metrics_log.read(str(r / 'metrics.jsonl'))) for r in (run, want)
  )
  theirs = theirs[:steps]
  assert len(ours) == len(theirs) == steps
  for one, two in zip(ours, theirs, strict=True):
    assert one.keys() == two.keys()
    for name in one:
      np.testing.assert_allclose(one[name], two[name], rtol=1e-4, atol=1e-5, err_msg=name)
  for name in sorted(os.listdir(want / 'rollouts'))[:steps]:
    lines = [(r / 'rollouts' / name).read_text().splitlines() for r in (run, want)]
    for one, two in zip(*([_split(line) for line in own] for own in lines), strict=True):
      assert one[0] == two[0] and one[1].keys() == two[1].keys()
      for key, value in one[1].items():
        np.testing.assert_allclose(value, two[1][key], rtol=1e-3, err_msg=key)


def _split(line: str) -> tuple[dict, dict]:
  """The exact fields of a rollout and its floats, whose last of four digits depends on the order of sums."""
  record = json.loads(line)
  as_list = lambda x: x if isinstance(x, list) else [x]  # noqa: E731
  floats = {k: v for k, v in record.items() if any(isinstance(x, float) for x in as_list(v))}
  return {k: v for k, v in record.items() if k not in floats}, floats


@pytest.fixture(scope='module')
def alone(tmp_path_factory):
  folder = tmp_path_factory.mktemp('alone')
  tiny_job.finish(tiny_job.start(tiny_job.config_file(folder, **JOB), folder / 'run'))
  return folder / 'run'


def test_two_processes_give_the_same_run_and_one_process_resumes_it(alone, tmp_path):
  """Both write one run directory. A SIGTERM to one of them stops both, after the same saved step."""
  config, run = tiny_job.config_file(tmp_path, **JOB), tmp_path / 'run'
  both = start_all(config, run, '--config.mesh.fsdp=2', '--config.checkpoint.every=100')
  while not (run / 'rollouts/step_000003.jsonl').exists():
    assert all(p.poll() is None for p in both)
    time.sleep(0.02)
  both[1].send_signal(signal.SIGTERM)
  outputs = [p.communicate(timeout=240)[0] for p in both]
  assert [p.returncode for p in both] == [preemption.EXIT_PREEMPTED] * 2, outputs
  (saved,) = os.listdir(run / 'checkpoints')
  assert 4 <= int(saved.removeprefix('step_')) < 8
  out = tiny_job.finish(tiny_job.start(config, run))
  assert f'resuming at step {int(saved.removeprefix("step_"))}' in out
  assert_close(run, alone)


def test_two_processes_grade_several_steps_at_once(tmp_path):
  """Each grades its share in threads; scores are exchanged where a step is landed."""
  lag = dict(mode='lag', lag_steps=2, steps=6, checkpoint=dict(every=3, keep=9))
  config = tiny_job.config_file(tmp_path, **JOB | lag)
  tiny_job.finish(tiny_job.start(config, tmp_path / 'one'))
  for process in start_all(config, tmp_path / 'two', '--config.mesh.fsdp=2'):
    tiny_job.finish(process)
  assert_close(tmp_path / 'two', tmp_path / 'one', steps=6)


def test_two_processes_replay_the_same_groups(tmp_path):
  """Each draws from a buffer of its own."""
  job = JOB | dict(steps=5, replay=dict(reuse=dict(fn='mixed_groups', share=0.5)))
  config = tiny_job.config_file(tmp_path, **job)
  tiny_job.finish(tiny_job.start(config, tmp_path / 'alone'))
  for process in start_all(config, tmp_path / 'both', '--config.mesh.fsdp=2'):
    tiny_job.finish(process)
  assert_close(tmp_path / 'both', tmp_path / 'alone', steps=5)
  assert any(row['replay/rows'] for row in tiny_job.rows(tmp_path / 'both'))


def test_two_processes_predict_the_same_from_hidden_states(tmp_path):
  """Each process encodes its rows and their answers in the same words, and all store the states of all."""
  pooling = dict(fn='hidden_state', dimensions=3, multiple=1, answer_tokens=4, considered=2)
  taught = dict(sft=tiny_job.CONFIG['sft'], rewards=None)
  job = JOB | taught | dict(steps=4, curriculum=dict(prior_pooling=pooling))
  config = tiny_job.config_file(tmp_path, **job)
  tiny_job.finish(tiny_job.start(config, tmp_path / 'one'))
  flags = '--config.mesh.fsdp=2', '--config.processes.same_every=1'
  for process in start_all(config, tmp_path / 'two', *flags):
    tiny_job.finish(process)
  runs = [tiny_job.rows(tmp_path / name) for name in ('one', 'two')]
  for rows in runs:
    assert rows[-1]['curriculum/encoded'] == 1
    assert [row['curriculum/with_odds'] for row in rows] == [0, 1, 1, 1]
  chosen = [(tmp_path / name / 'choices.jsonl').read_text() for name in ('one', 'two')]
  first = [[json.loads(line)['prompt'] for line in text.splitlines()] for text in chosen]
  assert first[0] == first[1]


def assert_error(out: str, words: str) -> None:
  """The output has one error message, at the end, after any messages of jax."""
  (error,) = (line for line in out.splitlines() if line.startswith('error: '))
  assert words in error and 'start the same command again' in error
  assert out.rstrip().endswith(error), out


def test_process_0_dies_in_a_step_and_the_same_command_resumes(alone, tmp_path):
  config, run = tiny_job.config_file(tmp_path, **(JOB | dict(steps=4))), tmp_path / 'run'
  flags = ('--config.mesh.fsdp=4',)
  both = start_all(config, run, *flags, devices=2)
  # After these files exist, the processes are most likely inside a step, or grading.
  awaited = run / 'rollouts/step_000002.jsonl', run / 'checkpoints/step_000002'
  while not all(path.exists() for path in awaited):
    assert all(p.poll() is None for p in both), [p.communicate()[0] for p in both]
    time.sleep(0.02)
  both[0].kill()
  both[0].communicate()
  out, _ = both[1].communicate(timeout=240)
  assert both[1].returncode == watchdog.EXIT_PEER_LOST, out
  assert_error(out, 'process 0 of 2 died')
  flags = ('--config.mesh.slices=2', '--config.mesh.fsdp=2')  # each process is a slice
  again = [tiny_job.finish(p) for p in start_all(config, run, *flags, devices=2)]
  assert 'resuming at step 2' in again[0]
  assert_close(run, alone, steps=4)


# A loop of collectives, as in training steps.
_COLLECTIVES = """
import sys
import jax
from jax.experimental import multihost_utils
from jaxrl_llm.distributed import cluster
watch = cluster.join(sys.argv[1], 2, int(sys.argv[2]), {}, 5.0)
try:
  while True:
    multihost_utils.process_allgather(jax.numpy.ones(1))
    print('step', flush=True)
except Exception as error:
  watch.failed(error)
"""


@pytest.mark.parametrize(
  'victim, kind, reason',
  [(0, 'KILL', 'died'), (1, 'KILL', 'died'), (1, 'STOP', 'has not answered for')],
)
def test_a_process_dies_or_stops_in_a_collective(victim, kind, reason):
  with socket.socket() as free:
    free.bind(('127.0.0.1', 0))
    here = f'127.0.0.1:{free.getsockname()[1]}'
  both = [
    subprocess.Popen(
      [sys.executable, '-c', _COLLECTIVES, here, str(i)],
      stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )
    for i in range(2)
  ]  # fmt: skip
  for line in both[1 - victim].stdout:
    if line == 'step\n':
      break
  both[victim].send_signal(getattr(signal, f'SIG{kind}'))
  out, _ = both[1 - victim].communicate(timeout=240)
  assert both[1 - victim].returncode == watchdog.EXIT_PEER_LOST, out[-2000:]
  assert_error(out, f'process {victim} of 2 {reason}')
  both[victim].send_signal(signal.SIGCONT)
  out, _ = both[victim].communicate(timeout=240)
  if kind == 'STOP':  # a stopped process does not continue alone when it resumes
    assert both[victim].returncode == watchdog.EXIT_PEER_LOST, out[-2000:]
    assert_error(out, 'process 1 of 2 (this one) stood still for')


def test_a_process_whose_curriculum_drifts_stops_the_run(tmp_path):
  config, run = tiny_job.config_file(tmp_path, **JOB), tmp_path / 'run'
  flags = '--config.mesh.fsdp=2', '--config.processes.same_every=1'
  both = start_all(config, run, *flags, fault_of=(None, dict(kind='drift')))
  outputs = [p.communicate(timeout=240)[0] for p in both]
  assert [p.returncode for p in both] == [2, 2], outputs
  for out in outputs:
    assert 'error: at step 1 process 1 of 2 holds other curriculum' in out


def test_a_run_resumes_on_eight_four_two_and_one_devices(alone, tmp_path):
  config, run = tiny_job.config_file(tmp_path, **JOB), tmp_path / 'run'
  for steps, devices, mesh in (
    (2, 8, (2, 2, 2)),
    (4, 4, (1, 4, 1)),
    (6, 2, (1, 1, 2)),
    (8, 1, (1, 1, 1)),
  ):
    sizes = [
      f'--config.mesh.{a}={n}' for a, n in zip(('data', 'fsdp', 'tensor'), mesh, strict=True)
    ]
    tiny_job.finish(tiny_job.start(config, run, f'--config.steps={steps}', *sizes, devices=devices))
  assert_close(run, alone)

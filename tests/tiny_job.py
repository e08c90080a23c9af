"""A job of a few seconds for tests of the command line: `config_file(folder, **changes)`."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import forks
import quick

CONFIG = dict(
  model='scratch',
  scratch=dict(width=32, layers=2, heads=2, kv_heads=1, mlp=64, max_tokens=64),
  steps=10,
  prompts=4,
  rollouts=4,
  prompt_tokens=12,
  completion_tokens=6,
  optimizer=dict(learning_rate=5e-4),
  sft=dict(steps=100, learning_rate=3e-3, prompts=16),
  data=dict(
    source='digits', size=64, chat=False, tasks=[dict(name='copy', min_length=1, max_length=2)]
  ),
  evaluation=dict(every=0, prompts=8, samples=2),
  checkpoint=dict(every=2, keep=2),
  mesh=dict(fsdp=1),
)
# No supervised start, which compiles two more programs; the reward function also pays a randomly initialized model.
UNTAUGHT = dict(sft=None, rewards=dict(fn='judges:odd'))


def config_file(folder, **changes) -> str:
  """Writes a config file with `changes` to CONFIG; None removes a field."""
  config = {k: v for k, v in (CONFIG | changes).items() if v is not None}
  path = os.path.join(folder, 'config.py')
  with open(path, 'w') as file:
    file.write(f'def get_config():\n  return {config!r}\n')
  return path


def start(config: str, workdir: str, *more: str, **how) -> forks.Process:
  """The command line in a process of its own; `how`: see `forks.start`."""
  return forks.start([f'--config={config}', f'--workdir={workdir}', *more], workdir, **how)


def command(config: str, workdir: str, *more: str) -> str:
  """The output of `python -m jaxrl_llm.main`, without the fork server."""
  argv = [sys.executable, '-m', 'jaxrl_llm.main', f'--config={config}', f'--workdir={workdir}']
  env = os.environ | dict(XLA_FLAGS=quick.flags(1), JAX_PLATFORMS='cpu')
  options = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600)
  done = subprocess.run([*argv, *more], env=env, **options)
  assert done.returncode == 0, done.stdout
  return done.stdout


def finish(process: forks.Process) -> str:
  """Waits for the process and returns its output; fails where the status is not 0."""
  out, _ = process.communicate(timeout=600)
  assert process.returncode == 0, out
  return out


def rows(workdir) -> list[dict]:
  """metrics.jsonl without the metrics that depend on time and machine."""
  with open(os.path.join(workdir, 'metrics.jsonl')) as file:
    metrics = [json.loads(line) for line in file]
  return [
    {
      k: v
      for k, v in row.items()
      if not k.startswith(('timing_s/', 'perf/throughput', 'perf/host_memory'))
    }
    for row in metrics
  ]

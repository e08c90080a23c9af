"""The README's code runs: its task of a user's own, and sampling from Python. Commands alone:
tests/commands/test_commands.py."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys

import quick

ROOT = pathlib.Path(__file__).parents[1]
# The default model and job in seconds: a character model of one layer, two steps.
SMOKE = (
  '--config.model=scratch', '--config.scratch.width=32', '--config.scratch.layers=1', '--config.scratch.heads=2',
  '--config.scratch.kv_heads=1', '--config.scratch.mlp=64', '--config.data.chat=False',
  '--config.data.template={question}', '--config.steps=2', '--config.prompts=4', '--config.rollouts=4',
  '--config.prompt_tokens=16', '--config.completion_tokens=8', '--config.evaluation.prompts=4',
  '--config.evaluation.samples=1', '--config.optimizer.warmup_steps=0',
)  # fmt: skip


def blocks(language: str) -> list[str]:
  return re.findall(rf'```{language}\n(.*?)```', (ROOT / 'README.md').read_text(), re.S)


def run(folder: pathlib.Path, *command: str) -> str:
  path = os.pathsep.join((str(ROOT), str(folder)))
  env = os.environ | dict(PYTHONPATH=path, JAX_PLATFORMS='cpu', XLA_FLAGS=quick.flags(1))
  done = subprocess.run(
    [sys.executable, *command], cwd=folder, env=env, capture_output=True, text=True
  )
  assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
  return done.stdout


def test_the_task_of_ones_own_trains(tmp_path):
  (task,) = (block for block in blocks('python') if block.startswith('# my_task.py'))
  (tmp_path / 'my_task.py').write_text(task)
  (commands,) = (block for block in blocks('sh') if 'write_rows' in block)
  write, train = commands.strip().splitlines()
  run(tmp_path, *write.removeprefix('python ').replace('"', '').split(' ', 1))
  rows = [json.loads(line) for line in (tmp_path / 'rows.jsonl').read_text().splitlines()]
  assert len(rows) == 256 and eval(rows[0]['question'][:-1]) == int(rows[0]['answer'])
  flags = train.removeprefix('python ').split()
  run(tmp_path, *flags, '--workdir=reward', *SMOKE)
  metrics = [
    json.loads(line) for line in (tmp_path / 'reward/metrics.jsonl').read_text().splitlines()
  ]
  assert [row['training/global_step'] for row in metrics] == [0, 1]
  assert all(0 <= row['critic/score/mean'] <= 1 for row in metrics)
  turns = (
    '--config.mode=split',
    '--config.environment.fn=my_task:Guess',
    '--config.environment.turns=2',
  )
  run(tmp_path, *flags, '--workdir=environment', *turns, *SMOKE, '--config.completion_tokens=32')
  metrics = [
    json.loads(line) for line in (tmp_path / 'environment/metrics.jsonl').read_text().splitlines()
  ]
  assert metrics[-1]['environment/turns'] > 1


def test_sampling_from_python(capsys, monkeypatch):
  from jaxrl_llm import models
  from jaxrl_llm.config import schema

  (code,) = (block for block in blocks('python') if 'rollout.sample' in block)
  load = models.load
  monkeypatch.setattr(
    models, 'load', lambda name: load('scratch', scratch=schema.default().scratch)
  )
  exec(compile(code, 'README.md', 'exec'), {})
  assert capsys.readouterr().out.startswith('[[')

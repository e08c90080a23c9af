"""The README's code runs: own rows, reward function, environment and loop, and sampling from Python.

Commands alone: tests/commands/test_commands.py. The generation of a trained model: tests/commands/test_run_modes.py.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

import method_table
import provenance
import pytest
import quick

from jaxrl_llm import environments, load_config, rewards

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


@pytest.fixture(scope='module')
def task(tmp_path_factory) -> pathlib.Path:
  """A folder with my_task.py and its rows, written by the README's command."""
  folder = tmp_path_factory.mktemp('task')
  (code,) = (block for block in blocks('python') if block.startswith('# my_task.py'))
  (folder / 'my_task.py').write_text(code)
  write, _ = task_commands()
  run(folder, *write)
  return folder


def task_commands() -> list[list[str]]:
  """The arguments of the two python3 commands: write the rows, and train."""
  (commands,) = (block for block in blocks('sh') if 'write_rows' in block)
  return [shlex.split(line.removeprefix('python3 ')) for line in commands.strip().splitlines()]


def metrics(run_directory: pathlib.Path) -> list[dict]:
  return [json.loads(line) for line in (run_directory / 'metrics.jsonl').read_text().splitlines()]


def test_own_rows_and_the_own_reward_function_train(task):
  rows = [json.loads(line) for line in (task / 'rows.jsonl').read_text().splitlines()]
  assert len(rows) == 256 and eval(rows[0]['question'][:-1]) == int(rows[0]['answer'])
  _, train = task_commands()
  run(task, *train, '--workdir=reward', *SMOKE)
  found = metrics(task / 'reward')
  assert [row['training/global_step'] for row in found] == [0, 1]
  assert all(0 <= row['critic/score/mean'] <= 1 for row in found)


def test_the_own_environment_trains(task):
  (flag,) = (word for word in own_flags() if word.startswith('--config.environment.fn='))
  turns = '--config.mode=split', flag, '--config.environment.turns=2'
  _, train = task_commands()
  # Tokens enough for some of the 16 random rows of a step to end a turn: an end token has a probability of about 1/60.
  run(task, *train, '--workdir=environment', *turns, *SMOKE, '--config.completion_tokens=64')
  assert metrics(task / 'environment')[-1]['environment/turns'] > 1


def own_flags() -> list[str]:
  """The flags of the section on one's own data and functions."""
  (block,) = (block for block in blocks('sh') if 'config.environment.fn=' in block)
  return [word for line in block.splitlines() for word in shlex.split(line, comments=True)]


def test_the_flags_for_own_data_and_functions_name_what_the_task_has(task, monkeypatch):
  monkeypatch.syspath_prepend(str(task))
  monkeypatch.delitem(sys.modules, 'my_task', raising=False)  # of another test file
  monkeypatch.chdir(task)
  config = load_config('my_task.py', [f for f in own_flags() if 'lora' not in f])
  assert rewards.resolve(config.rewards) and environments.resolve(config.environment)
  assert config.data.source == 'jsonl' and config.curriculum.utility.fn == 'uniform'


def test_the_own_loop_trains_in_25_lines(task):
  (code,) = (block for block in blocks('python') if block.startswith('# my_loop.py'))
  assert len([line for line in code.splitlines() if line.strip()]) <= 25
  (task / 'my_loop.py').write_text(code)
  out = run(task, 'my_loop.py', *SMOKE).splitlines()
  found = [line.split() for line in out if re.fullmatch(r'\d+ [\d.]+', line)]
  assert [step for step, _ in found] == ['0', '1']
  # The same rollouts and rewards as those of the command.
  _, train = task_commands()
  run(task, *train, '--workdir=same', *SMOKE)
  assert [float(score) for _, score in found] == [
    x['critic/score/mean'] for x in metrics(task / 'same')
  ]


def test_commands_name_python3_and_the_supported_versions():
  text = (ROOT / 'README.md').read_text()
  assert not re.search(r'\bpython (?!3)-', text) and not re.search(r'^python ', text, re.M)
  project = (ROOT / 'pyproject.toml').read_text()
  versions = re.findall(r'Python :: 3\.(\d+)', project)
  least, most = re.search(r'Python 3\.(\d+) to 3\.(\d+)', text).groups()
  assert [least, most] == [versions[0], versions[-1]] and f">=3.{least}'" in project
  for word in ('Linux', 'macOS', 'WSL2', 'GB of disk', 'GB of memory', 'minutes'):
    assert word in text


def test_methods_are_as_many_as_it_says():
  text = (ROOT / 'README.md').read_text()
  found = re.search(r'(\d+) are listed in \[configs/.*?formula: (\d+) are checked', text, re.S)
  proven = sum(map(provenance.proven, method_table.PAPERS))
  assert [int(x) for x in found.groups()] == [len(method_table.PAPERS), proven]


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

"""launch/kaggle.ipynb from top to bottom on CPU: a tiny model, a few rows, a judge on loopback, two sessions."""

from __future__ import annotations

import csv
import json
import os
import pathlib
import re
import subprocess
import sys

import judge_server
import pytest
import quick
import scripted_model
import tiny_job

LAUNCH = pathlib.Path(__file__).parents[1] / 'launch'
ROWS = [
  dict(question=f'Ada has {n} pens and buys {m}. How many?', answer=f'{n}+{m}.\n#### {n + m}')
  for n in range(2, 8)
  for m in range(2, 8)
]
FLAGS = {
  **{'prompts': 2, 'rollouts': 2, 'prompt_tokens': 160, 'completion_tokens': 8, 'temperature': 1.0},
  **{'evaluation.prompts': 4, 'rewards.workers': 2, 'mesh.fsdp': 1, 'checkpoint.every': 10**6},
}
# The clock of the first session fires as soon as a step is logged.
CLOCK = """
class Clock(threading.Thread):
  def __init__(self, seconds, fire):
    super().__init__(daemon=True)
    assert 8 * 3600 < seconds < 9 * 3600
    self.fire = fire
  def run(self):
    while not pathlib.Path(WORKDIR, 'metrics.jsonl').exists():
      time.sleep(0.01)
    self.fire()
  def cancel(self):
    pass
threading.Timer = Clock
"""
server = judge_server.server


def code() -> str:
  """The code of all cells."""
  cells = json.loads((LAUNCH / 'kaggle.ipynb').read_text())['cells']
  return '\n'.join(''.join(c['source']) for c in cells if c['cell_type'] == 'code')


@pytest.fixture
def inputs(tmp_path) -> pathlib.Path:
  """Kaggle's input folder: a model, and GSM8K as the CSV files that are shared there."""
  folder = tmp_path / 'input'
  scripted_model.write(folder / 'tiny')
  for split, rows in dict(train=ROWS[:30], test=ROWS[30:]).items():
    path = folder / 'grade-school-math-8k-q-a' / f'main_{split}.csv'
    path.parent.mkdir(exist_ok=True)
    with open(path, 'w', newline='') as file:
      table = csv.DictWriter(file, ('question', 'answer'))
      table.writeheader()
      table.writerows(rows)
  return folder


def session(inputs: pathlib.Path, working: pathlib.Path, text: str, **variables: str) -> str:
  """The output of the cells in a session of their own."""
  working.mkdir()
  (working / 'cells.py').write_text(text + "\nprint('the last cell ran')\n")
  flags = ' '.join(f'--config.{name}={value}' for name, value in FLAGS.items())
  variables |= dict(INPUT=str(inputs), WORKING=str(working))
  variables['FLAGS'] = f'{flags} --config.model={inputs}/tiny {variables.get("FLAGS", "")}'
  environ = {f'JAXRL_LLM_NOTEBOOK_{name}': value for name, value in variables.items()}
  environ |= dict(MPLBACKEND='agg', JAX_PLATFORMS='cpu', XLA_FLAGS=quick.flags(1))
  out = tiny_job.finish(
    subprocess.Popen(
      [sys.executable, working / 'cells.py'], cwd=LAUNCH, env=os.environ | environ,
      stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )
  )  # fmt: skip
  assert 'the last cell ran' in out
  return out


def test_two_sessions_with_a_judge(inputs, server, tmp_path):
  """The first session ends early; the second has its output as an input, continues it, and exports."""
  server.answer = lambda number, body: json.dumps(dict(scores=[number % 11, 5]))
  working, run = tmp_path / 'working', tmp_path / 'working/runs/gsm8k'
  text = code().replace('flags = [', f'{CLOCK}\nflags = [')
  out = session(inputs, working, text, FLAGS='--config.steps=200', JUDGE=server.url)
  assert 'the state is saved' in out and not (working / 'export').exists()
  (at,) = (int(path.name[-6:]) for path in run.glob('checkpoints/step_*'))
  assert 0 < at < 200
  working.rename(inputs / 'output-of-the-first-session')
  out = session(inputs, working, code(), FLAGS=f'--config.steps={at + 1}', JUDGE=server.url)
  assert f'from step {at}\n' in out
  rows = tiny_job.rows(run)
  assert [row['training/global_step'] for row in rows] == list(range(at + 1))
  assert all(0 < row['critic/score/rubric'] < 1 for row in rows)
  evaluated = [int(step) for step in re.findall(r'step +(\d+)  val-core/.*greedy', out)]
  assert evaluated[0] == 0 and evaluated[-1] == at + 1
  assert ' -> ' in out and 'score ' in out
  assert (working / 'export/adapter_config.json').exists()

"""Modes on a finished run without --config: they read its own, and leave it as it was. With the README's example."""

from __future__ import annotations

import json
import os
import pathlib
import re
import shlex

import pytest
import tiny_job

from jaxrl_llm import main
from jaxrl_llm.commands import flags

ROOT = pathlib.Path(__file__).parents[2]
# Prompts are the digits alone: the template makes the question of them that the model was trained on.
TEMPLATE = 'copy:{question}='


@pytest.fixture(scope='module')
def run(tmp_path_factory) -> pathlib.Path:
  """The tiny job after supervised steps, in which it learns to copy, and two steps of RL."""
  folder = tmp_path_factory.mktemp('modes')
  rows = [dict(question=str(n), answer=str(n)) for n in range(100)]
  (folder / 'rows.jsonl').write_text('\n'.join(map(json.dumps, rows)))
  data = dict(source='jsonl', path=str(folder / 'rows.jsonl'), chat=False, template=TEMPLATE)
  sft = tiny_job.CONFIG['sft'] | dict(steps=300)
  config = tiny_job.config_file(folder, data=data, steps=2, seed=1, sft=sft)
  tiny_job.command(config, folder / 'run')
  return folder / 'run'


def files(run: pathlib.Path) -> dict[str, bytes]:
  """The files of a run that say how it was trained."""
  names = ('config.json', 'environment.json', 'metrics.jsonl', 'choices.jsonl', 'timing.json')
  own = {name: (run / name).read_bytes() for name in names}
  return own | {p.name: p.read_bytes() for p in (run / 'eval').glob('step_00000?.json')}


def output(capsys, *argv: str) -> str:
  status = main.main(list(argv))
  captured = capsys.readouterr()
  assert status == 0, captured.err
  return captured.out


def completions(text: str, prompt: str) -> list[str]:
  lines = text.splitlines()
  start = lines.index(f'> {prompt}') + 1
  return lines[start : next((i for i in range(start, len(lines)) if lines[i][:2] == '> '), None)]


def test_the_readmes_example_is_answered_by_the_trained_model(run, capsys):
  """The same flags as in the README with a prompt of this task.

  The default model's own example, after `jaxrl-llm --config=dapo`, is in tests/bench/results/new_user.md.
  """
  block = re.search(r'--mode=generate .*', (ROOT / 'README.md').read_text())[0]
  words = shlex.split(block, comments=True)
  arguments, overrides = flags.parse(words)
  assert arguments.mode == 'generate' and len(arguments.prompt) == 1 and not overrides
  argv = [word for word in words if not word.startswith(('--prompt=', '--workdir='))]
  for number in ('7', '41'):
    out = output(capsys, *argv, f'--workdir={run}', f'--prompt={number}')
    assert completions(out, number) == [number]


def test_no_mode_counts_as_a_start_or_changes_the_run(run, tmp_path, capsys):
  before = files(run)
  workdir = f'--workdir={run}'
  assert 'greedy' in output(capsys, workdir, '--mode=eval')
  output(capsys, workdir, '--mode=generate', '--prompt=7', '--temperature=1', '--samples=2')
  output(capsys, workdir, '--mode=export', f'--to={tmp_path}/model')
  output(capsys, workdir, '--mode=report', f'--to={tmp_path}/report.html')
  output(capsys, workdir, '--mode=layout')
  assert files(run) == before and (tmp_path / 'model/config.json').exists()
  assert json.loads(before['config.json'])['seed'] == 1


def test_generation_is_greedy_in_the_training_template_unless_asked_otherwise(run, capsys):
  generate = '--mode=generate', f'--workdir={run}', '--prompt=41'
  greedy = completions(output(capsys, *generate, '--samples=3'), '41')
  assert greedy == ['41'] * 3
  hot = completions(output(capsys, *generate, '--samples=8', '--temperature=30'), '41')
  assert len(set(hot)) > 4
  also = completions(output(capsys, *generate, '--samples=8', '--config.temperature=30'), '41')
  assert also == hot
  assert output(capsys, *generate, '--raw').count('41') <= 2  # the digits alone are no question
  raw = '--mode=generate', f'--workdir={run}', '--raw'
  assert completions(output(capsys, *raw, '--prompt=copy:41='), 'copy:41=') == ['41']
  (short,) = completions(output(capsys, *generate, '--tokens=1'), '41')
  assert short == '4'
  other = '--config.data.template={question}', '--prompt=copy:8='
  assert completions(output(capsys, *generate[:2], *other), 'copy:8=') == ['8']


def test_reading_modes_work_beside_a_training_process(run, capsys):
  """The lock of the directory is that of the process that trains."""
  from jaxrl_llm.checkpointing import run_dir
  from jaxrl_llm.config import loading, schema

  config = schema.typed(loading.load(str(run / 'config.json')))
  before = (run / 'environment.json').read_bytes()
  held = run_dir.open_run(str(run), config)
  assert held.lock
  started = (run / 'environment.json').read_bytes()
  assert completions(output(capsys, '--mode=generate', f'--workdir={run}', '--prompt=5'), '5')
  assert (run / 'environment.json').read_bytes() == started
  held.lock.close()
  (run / 'environment.json').write_bytes(before)


def test_an_evaluation_with_other_settings_is_a_file_of_its_own(run, capsys):
  before = files(run)
  out = output(capsys, f'--workdir={run}', '--mode=eval', '--config.evaluation.prompts=4')
  (path,) = (p for p in (run / 'eval').iterdir() if '_' in p.stem.removeprefix('step_'))
  assert str(path) in out and 'prompts: 8 -> 4' in out and files(run) == before
  record = json.loads(path.read_text())
  assert record['step'] == 2 and record['groups'][0]['prompts'] == 4
  longer = '--config.completion_tokens=9', '--config.evaluation.samples=1'
  output(capsys, f'--workdir={run}', '--mode=eval', *longer)
  assert len(list((run / 'eval').iterdir())) == 4 and files(run) == before
  # The report shows the run's own evaluations.
  from jaxrl_llm.report import run_reader

  assert [e['step'] for e in run_reader.read_run(str(run))['evaluations']] == [0, 2]
  for path in (run / 'eval').glob('step_*_*.json'):
    os.remove(path)


def test_a_config_that_contradicts_the_run_is_one_sentence(run, capsys):
  argv = ['--config=dapo', f'--workdir={run}', '--mode=generate', '--prompt=1']
  assert main.main(argv) == 2
  error = capsys.readouterr().err
  assert error.count('\n') == 1 and 'holds a run of another config (' in error
  assert "leave --config out to use the run's own" in error


def test_training_goes_on_with_the_runs_own_config(run, tmp_path, capsys):
  import shutil

  copy = shutil.copytree(run, tmp_path / 'copy')
  output(capsys, f'--workdir={copy}', '--config.steps=3')
  assert [row['training/global_step'] for row in tiny_job.rows(copy)] == [0, 1, 2]
  assert len(json.loads((copy / 'environment.json').read_text())) == 2

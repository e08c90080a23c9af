"""Cells of launch/kaggle.ipynb: rows of GSM8K in each layout, and the server of a judge."""

from __future__ import annotations

import csv
import io
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import urllib.request

from test_launch import needed

from jaxrl_llm.commands import flags
from jaxrl_llm.config import loading, validation

LAUNCH = pathlib.Path(__file__).parents[1] / 'launch'


def test_the_notebook_is_valid_and_has_no_outputs():
  nbformat = needed('nbformat')
  notebook = nbformat.read(LAUNCH / 'kaggle.ipynb', as_version=4)
  nbformat.validate(notebook)
  assert all(not cell.get('outputs') for cell in notebook.cells)


def run_cell(name: str, **names) -> dict:
  """The names after a cell that is run in this process."""
  folder = pathlib.Path(tempfile.gettempdir())
  names |= dict(json=json, os=os, pathlib=pathlib, subprocess=subprocess, sys=sys, time=time)
  names |= dict(csv=csv, urllib=urllib, ROOT=LAUNCH.parent, TEMPORARY=folder, WORKDIR='run')
  cells = json.loads((LAUNCH / 'kaggle.ipynb').read_text())['cells']
  (source,) = (''.join(cell['source']) for cell in cells if cell['id'] == name)
  exec(source, names)  # the project's own notebook
  return names


def test_rows_of_the_hubs_layout_are_used_as_they_are(tmp_path):
  for subset in ('main', 'socratic'):
    for split in ('train', 'test'):
      path = tmp_path / f'gsm8k/{subset}/{split}-00000-of-00001.parquet'
      path.parent.mkdir(parents=True, exist_ok=True)
      path.touch()
  names = run_cell('data', INPUT=tmp_path, WORKING=tmp_path / 'working')
  (rows,), test = (names['DATA'][name] for name in ('data.files', 'evaluation.benchmark'))
  assert rows == dict(path=f'{tmp_path}/gsm8k/main/train-00000-of-00001.parquet')
  assert test == f'{tmp_path}/gsm8k/main/test-00000-of-00001.parquet'


def test_without_an_input_rows_are_those_of_the_hub(tmp_path):
  names = run_cell('data', INPUT=tmp_path, WORKING=tmp_path / 'working')
  assert names['DATA']['data.files'] == (dict(path='hub:openai/gsm8k', subset='main'),)
  assert names['DATA']['evaluation.benchmark'] == 'hub:openai/gsm8k'


def test_a_judge_here_is_a_server_with_a_chip_of_its_own(monkeypatch, tmp_path):
  calls = []
  monkeypatch.setenv('JAXRL_LLM_NOTEBOOK_JUDGE', 'here')
  monkeypatch.setattr(subprocess, 'Popen', lambda *call, **options: calls.append((*call, options)))
  models = b'{"data": [{"id": "owner/judge"}]}'
  monkeypatch.setattr(urllib.request, 'urlopen', lambda *_, **__: io.BytesIO(models))
  names = run_cell('judge', WORKING=tmp_path)
  ((command, options),) = calls
  arguments, overrides = flags.parse(command[3:])
  assert arguments.mode == 'serve' and arguments.base
  assert overrides == ['--config.model=Qwen/Qwen2.5-1.5B-Instruct']
  environs = options['env'], names['environment']
  chips = [set(each['TPU_VISIBLE_DEVICES'].split(',')) for each in environs]
  assert not chips[0] & chips[1] and list(map(len, chips)) == [1, 4]
  assert len({each['TPU_PROCESS_PORT'] for each in environs}) == 2
  (part,) = names['judging']['rewards.parts']
  assert (part['model'], part['base_url']) == (
    'owner/judge',
    f'http://127.0.0.1:{arguments.port}/v1',
  )


def test_the_settings_with_a_judge_are_a_valid_config(monkeypatch, tmp_path):
  monkeypatch.setenv('JAXRL_LLM_NOTEBOOK_JUDGE', 'http://127.0.0.1:9/v1')
  paths = dict(INPUT=tmp_path, WORKING=tmp_path)
  settings, judge, data = (run_cell(name, **paths) for name in ('settings', 'judge', 'data'))
  changes = settings['SETTINGS'] | settings['ADAPTER'] | data['DATA'] | judge['judging']
  overrides = [f'--config.{name}={value}' for name, value in changes.items()]
  config = loading.load('dapo', overrides)
  validation.check(config)
  assert config.data.template.endswith('/no_think') and config.lora.rank == 16
  assert dict(config.rewards.parts[0]['criteria']) == judge['RUBRIC']

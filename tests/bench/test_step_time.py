"""The side of Tunix in step_time, without Tunix: its clock, its interpreter, the check of its logits, the table."""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import time

import numpy as np
import pytest

from tests.bench import step_time
from tests.bench.lib import sides, step_shapes, tunix_step
from tests.bench.lib.step_workers import timed

ROW = dict(step_wall_s=2.0, rollout_wall_s=0.5, update_wall_s=1.5, tokens=7)


class Pipe:
  """Commands from a list; replies are kept."""

  def __init__(self, *commands: str):
    self.commands, self.replies = list(commands), []

  def wait(self) -> str:
    return self.commands.pop(0)

  def reply(self, row: dict) -> None:
    self.replies.append(dict(row))


def test_the_request_for_the_next_batch_ends_a_step():
  texts = [str(i) for i in range(6)]
  job = step_shapes.Job(step_shapes.SHAPES['full'], (2,), texts, [[5]] * 6, [True] * 6, [])
  pipe, row, prompts, numbers = Pipe('step', 'step', 'stop'), {}, [], []
  for batch in tunix_step.commanded_batches(pipe, job, texts, row):
    with timed(row, 'rollout'):
      time.sleep(0.02)
    time.sleep(0.04)  # the update
    prompts.append(batch['prompts'].tolist())
    numbers.append(batch['number'].tolist())
  assert prompts == [['0', '1', '2', '3'], ['4', '5', '0', '1']]
  assert numbers == [[0, 1, 2, 3], [4, 5, 0, 1]]
  assert len(pipe.replies) == 2 and not pipe.commands
  for reply in pipe.replies:
    assert reply['rollout_wall_s'] >= 0.02 and reply['update_wall_s'] >= 0.04
    assert reply['step_wall_s'] == pytest.approx(reply['rollout_wall_s'] + reply['update_wall_s'])


def test_all_sides_have_the_prompts_of_a_job_padded_on_the_right():
  job = step_shapes.Job(
    step_shapes.SHAPES['full']._replace(prompt_tokens=3, prompts=2),
    (2,), ['a', 'b', 'c'], [[5], [6, 7], [8, 9, 4]], [True] * 3, [],
  )  # fmt: skip
  tokens_PxL, length_P = job.prompt_tokens(job.step_prompts(1))
  np.testing.assert_array_equal(tokens_PxL, [[8, 9, 4], [5, 0, 0]])
  assert length_P.tolist() == [3, 1]


def stub_interpreter(folder: pathlib.Path, ready: dict) -> str:
  """An executable in place of Tunix's interpreter: it writes its arguments to a file and replies `ready`."""
  path = folder / 'python'
  lines = (f'#!{sys.executable}', 'import pathlib, sys')
  lines += (f'pathlib.Path({str(folder / "arguments")!r}).write_text(" ".join(sys.argv[1:]))',)
  lines += (f'print({json.dumps(ready)!r}, flush=True)', 'sys.stdin.read()')
  path.write_text('\n'.join(lines))
  path.chmod(0o700)
  return str(path)


def test_the_worker_of_tunix_runs_by_its_own_interpreter(tmp_path):
  starter = step_time.Starter(tmp_path, 'full', stub_interpreter(tmp_path, {'threads': 3}))
  side = starter.start('tunix', [16])
  side.stop()
  assert side.ready == {'threads': 3}
  assert (tmp_path / 'arguments').read_text() == f'{step_time.TUNIX} train {tmp_path} full 16'


@pytest.mark.parametrize('gap', [0.0005, 0.002, float('nan')])
def test_another_model_is_refused(tmp_path, monkeypatch, gap):
  monkeypatch.setattr(sides, 'python', lambda *_: None)
  ready = {'gap': gap, 'versions': 'google-tunix 0'}
  starter = step_time.Starter(tmp_path, 'full', stub_interpreter(tmp_path, ready))
  if gap < step_time.LOGIT_GAP:
    assert starter.check_tunix() == ready
    return
  with pytest.raises(SystemExit, match='their times do not compare. Leave out --tunix-python'):
    starter.check_tunix()


@pytest.mark.parametrize(
  ('interpreter', 'shape', 'expected', 'sentence'),
  [
    ('', 'full', ['trl', 'ours'], 'Tunix is left out: --tunix-python names'),
    ('python', 'long', ['trl', 'ours'], 'Tunix is left out of this shape'),
    ('python', 'full', ['tunix', 'trl', 'ours'], ''),
  ],
)
def test_tunix_is_left_out_with_a_sentence(capsys, interpreter, shape, expected, sentence):
  args = argparse.Namespace(tunix_python=interpreter, sides=['trl', 'ours'])
  assert step_time.sides_of(step_shapes.SHAPES[shape], args) == expected
  assert sentence in capsys.readouterr().err


def test_a_wrong_interpreter_is_one_sentence(monkeypatch, capsys):
  monkeypatch.setattr(sys, 'argv', ['step_time', '--tunix-python=/no/python'])
  with pytest.raises(SystemExit):
    step_time.parse()
  assert "--tunix-python: '/no/python' cannot be run; name" in capsys.readouterr().err


def test_the_table_has_a_column_and_a_ratio_for_each_side():
  rows = dict(tunix=[ROW], trl=[ROW | dict(step_wall_s=3.0)], ours=[dict(step_wall_s=1.0)])
  rows['split'] = [dict(rollout_wall_s=0.25, update_wall_s=1.0)]
  result = dict(
    rows=rows,
    start=dict(tunix=dict(cold_s=30.0), ours=dict(cold_s=20.0, warm_s=10.0)),
    probe=dict(tunix={32: 5.0, 16: 4.0}, trl={}),
    microbatch=dict(tunix=16, trl=8),
    threads=dict(tunix=2),
    tunix=dict(gap=2e-4, versions='google-tunix 0.1.7'),
  )
  lines = step_time.report(result, 'title', 'facts').splitlines()
  ratios = 'TRL / jaxrl_llm (lowest – highest) | Tunix / jaxrl_llm (lowest – highest)'
  assert lines[2] == f'| median of 1 rounds | TRL | Tunix | jaxrl_llm | {ratios} |'
  step = '| step, wall seconds | 3.00 | 2.00 | 1.00 | 3.00 (3.00 – 3.00) | 2.00 (2.00 – 2.00) |'
  assert lines[4] == step
  rollout = (
    '| rollout, wall seconds | 0.50 | 0.50 | 0.25 | 2.00 (2.00 – 2.00) | 2.00 (2.00 – 2.00) |'
  )
  assert rollout in lines
  assert '| first step, compilation included, seconds | — | 30.0 | 20.0 | — | 1.50 |' in lines
  assert 'Tunix micro-batch 16 (32: 5.00 s, 16: 4.00 s).' in lines
  assert "Tunix's logits differ by at most 2.0e-04; google-tunix 0.1.7." in lines

"""metrics.jsonl over kills and resumes: no gap, no duplicate, always valid JSON."""

from __future__ import annotations

import json
import math
import os
import pathlib
import signal
import subprocess
import sys

import numpy as np
import pytest

from jaxrl_llm.checkpointing import metrics_log

ROOT = pathlib.Path(__file__).parents[2]


def row(step: int, **more: float) -> dict:
  return {'training/global_step': step, 'critic/score/mean': step / 7} | more


def steps(path) -> list[int]:
  return [json.loads(line)['training/global_step'] for line in path.read_text().splitlines()]


def fill(path, start: int, stop: int, **more: float) -> None:
  with metrics_log.Writer(str(path), start) as writer:
    for step in range(start, stop):
      writer.write(row(step, **more))


@pytest.mark.parametrize('resumed', [0, 3, 5])
def test_a_resumed_run_drops_what_it_will_do_again(tmp_path, resumed):
  path, straight = tmp_path / 'm.jsonl', tmp_path / 'straight.jsonl'
  fill(path, 0, 5)
  fill(path, resumed, 8)
  fill(straight, 0, 8)
  assert path.read_bytes() == straight.read_bytes()


@pytest.mark.parametrize(
  'tail', [b'{"training/global_step": 3, "cri', b'{"a": 1}\n7\n', b'\0\0\xff']
)
def test_a_half_written_end_is_dropped_without_loss(tmp_path, tail):
  path = tmp_path / 'm.jsonl'
  fill(path, 0, 3)
  with path.open('ab') as file:
    file.write(tail)
  assert metrics_log.read(str(path)) == [row(s) for s in range(3)]
  fill(path, 3, 5)
  assert steps(path) == [0, 1, 2, 3, 4]


_KILLED = """
import os, signal, sys
from jaxrl_llm.checkpointing import metrics_log
with metrics_log.Writer(sys.argv[1], 0) as writer:
  for step in range(4):
    writer.write({'training/global_step': step})
  os.kill(os.getpid(), signal.SIGKILL)
"""


def test_every_row_is_in_the_file_when_write_returns(tmp_path):
  path = tmp_path / 'm.jsonl'
  command = [sys.executable, '-c', _KILLED, str(path)]
  done = subprocess.run(command, env=os.environ | dict(PYTHONPATH=str(ROOT)), check=False)
  assert done.returncode == -signal.SIGKILL
  assert steps(path) == [0, 1, 2, 3]


def test_a_kill_while_the_file_is_cut_leaves_the_old_one(tmp_path, monkeypatch):
  path = tmp_path / 'm.jsonl'
  fill(path, 0, 5)

  def killed(*_):
    raise KeyboardInterrupt

  monkeypatch.setattr(os, 'replace', killed)
  with pytest.raises(KeyboardInterrupt):
    metrics_log.Writer(str(path), 2)
  assert steps(path) == [0, 1, 2, 3, 4]


def test_numbers_that_are_not_finite_become_null_and_are_counted(tmp_path):
  path = tmp_path / 'm.jsonl'
  with metrics_log.Writer(str(path), 0) as writer:
    writer.write(
      row(0, a=math.nan, b=-math.inf, c=np.float32('inf'), d=np.float32(0.5), e=np.int8(3))
    )
    writer.write(row(1, a=0.0))
  text = path.read_text()
  assert 'NaN' not in text and 'Infinity' not in text
  first, second = map(json.loads, text.splitlines())
  assert (first['a'], first['b'], first['c'], first['d'], first['e']) == (None, None, None, 0.5, 3)
  assert first[metrics_log.NONFINITE] == 3 and metrics_log.NONFINITE not in second
  fill(path, 2, 3)  # and the count is not lost when the file is rewritten
  assert metrics_log.read(str(path))[0] == first


@pytest.mark.parametrize('step', [0, 1, 3])
def test_a_double_or_a_gap_is_refused(tmp_path, step):
  with metrics_log.Writer(str(tmp_path / 'm.jsonl'), 0) as writer:
    writer.write(row(0))
    writer.write(row(1))
    with pytest.raises(ValueError, match=f'the row after step 1 has step {step}'):
      writer.write(row(step))


def test_rows_lost_with_the_file_are_warned_of(tmp_path, caplog):
  path = tmp_path / 'm.jsonl'
  fill(path, 0, 5)
  path.write_text(''.join(path.read_text().splitlines(keepends=True)[:2]))
  fill(path, 5, 6)
  assert 'lacks 3 steps, the first is step 2' in caplog.text and steps(path) == [0, 1, 5]


def test_comparable_rows_are_without_the_clock():
  full = row(1) | {'timing_s/step': 3.2, 'perf/throughput': 9.1, 'performance': 1.0}
  assert metrics_log.comparable([full]) == [row(1) | {'performance': 1.0}]


def test_summary_reads_the_rows_back(tmp_path):
  path = tmp_path / 'm.jsonl'
  with metrics_log.Writer(str(path), 0) as writer:
    for step, value in enumerate([2.0, math.nan, 1.0, 6.0]):
      writer.write(row(step, x=value))
  summary = metrics_log.summary(str(path))
  assert summary['x'] == dict(first=2.0, last=6.0, mean=3.0, min=1.0, max=6.0, count=3)
  assert summary['training/global_step']['count'] == 4
  assert metrics_log.summary(str(tmp_path / 'absent.jsonl')) == {}

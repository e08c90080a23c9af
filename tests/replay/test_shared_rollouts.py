"""The folder through which runs share completions: what arrives, what is ignored, its bounds, and killed writers."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from tiers import REPEATS

from jaxrl_llm.replay import shared_rollouts
from jaxrl_llm.replay.shared_rollouts import Completion, SharedGroup, SharedRollouts
from jaxrl_llm.types import Row, UserError

MOST, KILLS = 64, 20 * REPEATS


def store(folder, most=MOST, max_age=4):
  return SharedRollouts(str(folder), 0.5, max_age, most)


def group(number, size=3):
  """A group whose texts can be checked: each holds the hash of its question."""
  question = f'question {number} ' + 'long ' * 200
  digest = hashlib.sha256(question.encode()).hexdigest()
  row = Row(str(number), question, (), digest, 'test', {'n': number})
  completions = [Completion(f'{digest} {i}\n"é☃', i != 1) for i in range(size)]
  return SharedGroup(row, tuple(completions))


def number(found):
  """The number of a group, which must be whole."""
  assert found == group(int(found.row.id), len(found.completions))
  return int(found.row.id)


def numbers(groups):
  return sorted(map(number, groups))


def test_a_run_reads_the_groups_of_all_others_once_and_never_its_own(tmp_path):
  runs = [store(tmp_path) for _ in range(3)]
  for step in range(2):
    for r, run in enumerate(runs):
      run.publish([group(100 * step + 10 * r), group(100 * step + 10 * r + 1)], step)
    for r, run in enumerate(runs):
      run.collect(step)
      want = [100 * step + 10 * o + i for o in range(3) if o != r for i in (0, 1)]
      assert run.counts['received'] == 4 and run.counts['published'] == 2
      assert numbers(run.draw(9, 0, step)) == want
      assert not run.draw(9, 0, step)
  assert len({run.run for run in runs}) == 3


def test_draws_are_by_seed_and_step_without_replacement(tmp_path):
  store(tmp_path).publish([group(i) for i in range(20)], 0)

  def draws(seed):
    own = store(tmp_path)
    own.publish([], 0)
    own.collect(0)
    return [[number(g) for g in own.draw(3, seed, step)] for step in range(7)]

  assert draws(1) == draws(1) != draws(2)
  drawn = [i for draw in draws(1) for i in draw]
  assert sorted(drawn) == list(range(20)) != drawn


MALFORMED = (
  b'',
  b'{}',
  b'[]',
  b'null',
  b'[' * 100_000,
  b'\xff\xfe not text',
  shared_rollouts.to_line(group(1)).encode()[:-30],
)


def broken(**changes):
  """A valid line with other fields."""
  fields = json.loads(shared_rollouts.to_line(group(1)))
  row = {k: v for k, v in changes.items() if k in fields['row']}
  fields['row'] |= row
  return json.dumps(fields | {k: v for k, v in changes.items() if k not in row}).encode()


WRONG = (
  broken(completions=[]),
  broken(completions=[['text', True]]),
  broken(completions=[dict(text='text', stopped=1)]),
  broken(completions=[dict(text=None, stopped=True)]),
  broken(question=7),
  broken(question='\ud83d'),
  broken(extra=[]),
  broken(messages='no'),
  broken(messages=[dict(role='user')]),
  broken(messages=[dict(role='user', content=None)]),
  broken(row=dict(question='no id')),
)


@pytest.mark.parametrize('line', (*MALFORMED[1:], *WRONG))
def test_a_malformed_line_is_counted_and_hides_no_other(tmp_path, line):
  writer, reader = store(tmp_path), store(tmp_path)
  writer.publish([group(1), group(2)], 0)
  path = tmp_path / writer.run / 'step_00000000.jsonl'
  first, second = path.read_bytes().splitlines()
  path.write_bytes(b'\n'.join([first, line, second, b'']))
  reader.publish([], 0)
  reader.collect(0)
  assert numbers(reader.draw(9, 0, 0)) == [1, 2] and reader.counts['malformed'] == 1


def test_other_files_are_no_steps(tmp_path):
  writer, reader = store(tmp_path), store(tmp_path)
  writer.publish([group(1)], 0)
  (tmp_path / 'notes.txt').write_text('no run')
  for name in ('step_1.jsonl', 'step_00000001.jsonl.part', '.step_00000001.jsonl'):
    (tmp_path / writer.run / name).write_text(shared_rollouts.to_line(group(2)) + '\n')
  os.mkdir(tmp_path / writer.run / 'step_00000009.jsonl')
  (tmp_path / 'empty').mkdir()
  reader.publish([], 0)
  reader.collect(0)
  assert numbers(reader.draw(9, 0, 0)) == [1] and reader.counts['errors'] == 1


def test_a_large_file_is_not_read(tmp_path, monkeypatch):
  writer, reader = store(tmp_path), store(tmp_path)
  writer.publish([group(1)], 0)
  monkeypatch.setattr(shared_rollouts, '_FILE_BYTES', 100)
  reader.publish([], 0)
  reader.collect(0)
  assert not reader.waiting and reader.counts['malformed'] == 1


def test_a_folder_that_fails_stops_no_run(tmp_path):
  (tmp_path / 'file').write_text('')
  own = store(tmp_path / 'file')
  own.publish([group(1)], 0)
  own.collect(0)
  assert own.counts == dict(published=0, received=0, malformed=0, errors=1)


def test_files_and_waiting_groups_are_bounded(tmp_path):
  writer, reader = store(tmp_path), store(tmp_path, most=5, max_age=2)
  for step in range(40):
    writer.publish([group(step)], step)
  kept = sorted(os.listdir(tmp_path / writer.run))
  assert kept == [f'step_{step:08d}.jsonl' for step in range(40 - shared_rollouts.FILES, 40)]
  reader.publish([], 7)
  reader.collect(7)
  assert [number(g) for _, g in reader.waiting] == [35, 36, 37, 38, 39]
  assert len(reader.files_read) == shared_rollouts.FILES
  for name in kept:
    os.remove(tmp_path / writer.run / name)
  reader.collect(9)
  assert len(reader.waiting) == 5 and not reader.files_read
  reader.collect(10)
  assert not reader.waiting


def test_a_resumed_run_keeps_its_name_and_reads_nothing_twice(tmp_path):
  writer, run = store(tmp_path), store(tmp_path)
  writer.publish([group(1), group(2)], 0)
  run.publish([group(3)], 0)
  run.collect(0)
  drawn = numbers(run.draw(1, 0, 0))
  state = json.loads(json.dumps(run.state_dict()))
  again = store(tmp_path)
  again.load_state_dict(state)
  again.publish([group(4)], 1)
  again.collect(1)
  assert again.run == run.run and again.counts['received'] == 0
  assert numbers(again.draw(9, 0, 1)) == sorted({1, 2} - set(drawn))
  assert len(os.listdir(tmp_path / run.run)) == 2


# Begins a writer for every line of input, which is the step that it begins with; each prints its own number first.
# A line is one write: where output is unbuffered, `print` writes a number and its end apart, and a kill falls between.
WRITER = """
import os, sys
sys.path[:0] = sys.argv[3:]
from test_shared_rollouts import group, store
def say(what):
  os.write(1, f'{what}\\n'.encode())
for line in sys.stdin:
  if pid := os.fork():
    os.waitpid(pid, 0)
    say('dead')
    continue
  own, step = store(sys.argv[2]), int(line)
  own.load_state_dict(dict(run=sys.argv[1], files_read=[], waiting=[]))
  say(os.getpid())
  while True:
    own.publish([group(10 * step + i) for i in range(10)], step)
    say(step)
    step += 1
"""


def killed(writers, step, alive_s, meanwhile) -> list[int]:
  """Starts a writer at `step` and kills it; the steps that it has acknowledged, one at least."""
  writers.stdin.write(b'%d\n' % step)
  writers.stdin.flush()
  pid, first = (int(writers.stdout.readline()) for _ in range(2))
  ends = time.monotonic() + alive_s
  while time.monotonic() < ends:
    meanwhile()
  os.kill(pid, signal.SIGKILL)
  return [first, *map(int, iter(writers.stdout.readline, b'dead\n'))]


def test_a_writer_killed_at_random_moments_loses_and_tears_nothing(tmp_path):
  """SIGKILL again and again while another run reads: every acknowledged step is whole, and no other line appears."""
  here, run = pathlib.Path(__file__).parent, 'ab' * 8
  roots = [str(here), str(here.parent), str(here.parent.parent)]
  command = [sys.executable, '-c', WRITER, run, str(tmp_path), *roots]
  reader, step, chance = store(tmp_path, most=10**6), 0, random.Random(0)
  reader.publish([], 0)
  seen: list[int] = []
  with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writers:
    for _ in range(KILLS):
      known = killed(writers, step, chance.uniform(0, 0.1), lambda: reader.collect(0))
      files = shared_rollouts._files(str(tmp_path / run))
      newest = int(files[-1][5:13])
      assert known[-1] <= newest <= known[-1] + 1
      # A writer removes old files after it has added one.
      assert shared_rollouts.FILES >= len(files) - 1 >= min(newest, shared_rollouts.FILES - 1)
      reader.collect(0)
      seen += [number(g) for g in reader.draw(10**6, 0, 0)]
      step = newest + 1
  assert reader.counts['malformed'] == 0 == reader.counts['errors']
  assert len(set(seen)) == len(seen) and len(seen) % 10 == 0
  assert set(range(10 * (step - shared_rollouts.FILES), 10 * step)) <= set(seen)
  last = store(tmp_path)
  last.load_state_dict(dict(run=run, files_read=[], waiting=[]))
  last.publish([group(1)], step)
  assert all(shared_rollouts._FILE.fullmatch(name) for name in os.listdir(tmp_path / run))


def test_share_must_leave_a_slot(tmp_path):
  assert store(tmp_path).slots(8) == 8
  with pytest.raises(UserError, match='leaves no slot'):
    SharedRollouts(str(tmp_path), 0.01, 4, 8).slots(8)
  assert np.isfinite(store(tmp_path).slots(1))

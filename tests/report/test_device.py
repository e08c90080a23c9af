"""What the page says of a trace: the parts of one step, the floors beside them, and what is not known."""

from __future__ import annotations

import json
import os

import pytest
import run_folder

from jaxrl_llm.profiling import xplane
from jaxrl_llm.report import ROOFLINE_FILE, page, run_reader
from jaxrl_llm.report.device import device

FOUND = dict(
  parts={'update': {'matrix products': 3.0, 'attention': 1.0}, 'generate': {'attention': 2.0}},
  busy={'update': 4.0, 'generate': 2.0, 'all': 6.0},
  op_s=6.0,
  span_s=8.0,
  devices=2,
  top=[['update/dot_general', 'matrix products', 'update', 3.0, 10]],
)
TOLD = dict(
  device_kind='TPU v9',
  devices=2,
  steps=[2, 4],
  chip=None,
  update=dict(flops=1e9, model_flops=8e8),
  round=dict(flops=1e6, bytes=1e7, rows=8),
  prefill=dict(flops=5e6),
)


@pytest.fixture
def run(tmp_path, monkeypatch):
  """A run of six steps whose trace says FOUND, and how often it was read."""
  folder = run_folder.make(tmp_path / 'run')
  session = tmp_path / 'run/profile/plugins/profile/2026_01_01'
  session.mkdir(parents=True)
  (session / 'vm.xplane.pb').write_bytes(b'1')
  with open(f'{folder}/profile/{ROOFLINE_FILE}', 'w') as file:
    json.dump(TOLD, file)
  read = []
  monkeypatch.setattr(xplane, 'read', lambda paths: (read.append(paths), FOUND)[1])
  rows = [{'training/global_step': i, 'generate/rounds': 5.0 + i} for i in range(6)]
  return folder, rows, read


def test_numbers_are_of_one_step(run):
  folder, rows, read = run
  told = device(folder, rows)
  assert told['steps'] == [2, 3] and told['devices'] == 2 and told['kind'] == 'TPU v9'
  assert told['parts']['update'] == {'matrix products': 1.5, 'attention': 0.5}
  assert (told['busy']['all'], told['span']) == (3.0, 4.0)
  assert told['top'] == [['update/dot_general', 'matrix products', 'update', 1.5, 5]]
  assert device(folder, rows) == told and len(read) == 1  # what was read is kept
  with open(read[0][0], 'ab') as file:
    file.write(b'2')
  device(folder, rows)
  assert len(read) == 2  # a trace that has changed is read again


def test_of_an_unknown_chip_there_are_rates_and_no_floor(run):
  folder, rows, _ = run
  told = device(folder, rows)
  assert not told['known']
  # Steps 2 and 3 took 7.5 rounds on average.
  assert told['floors'] == [
    dict(part='update', flops=1e9, bytes=None, seconds=None, measured=2.0),
    dict(part='generate', flops=7.5e6 + 5e6, bytes=7.5e7, seconds=None, measured=1.0),
  ]


def test_of_a_known_chip_the_floor_stands_beside_what_was_measured(run):
  folder, rows, _ = run
  known = json.loads(json.dumps(TOLD))
  known |= dict(chip=dict(flops=1e9))
  for name, seconds in (('update', 0.5), ('round', 0.04), ('prefill', 0.1)):
    known[name]['seconds'] = seconds
  with open(f'{folder}/profile/{ROOFLINE_FILE}', 'w') as file:
    json.dump(known, file)
  told = device(folder, rows)
  assert told['known'] and [one['seconds'] for one in told['floors']] == [0.5, 7.5 * 0.04 + 0.1]


def test_without_a_trace_or_with_a_broken_one_there_is_nothing(run, monkeypatch, caplog):
  folder, rows, _ = run
  assert device(str(run_folder.make(os.path.join(folder, 'other'))), rows) is None

  def broken(paths):
    raise ValueError('no trace')

  monkeypatch.setattr(xplane, 'read', broken)
  assert device(folder, rows) is None and 'cannot be read: ValueError: no trace' in caplog.text
  with open(f'{folder}/profile/{ROOFLINE_FILE}', 'w') as file:
    file.write('{')
  os.remove(f'{folder}/profile/parts.json')
  monkeypatch.setattr(xplane, 'read', lambda paths: FOUND)
  told = device(folder, rows)  # a trace of somebody else's making
  assert told['floors'] == [] and told['span'] == 8.0


def test_the_page_holds_it_and_what_went_to_other_things(run):
  folder, *_ = run
  with open(f'{folder}/timing.json', 'w') as file:
    json.dump({'evaluation': 3.5, 'compilation': 20.0, 'checkpoints': 0.0}, file)
  told = run_reader.gather(folder)
  assert told['device']['parts']['generate'] == {'attention': 1.0}
  assert told['time']['beside'] == {'evaluation': 3.5, 'compilation': 20.0}
  text = page.make([folder])
  assert 'id="device"' in text and 'drawDevice' in text and 'Unknown chip' in text

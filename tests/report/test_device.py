"""The device section of the report: times per step, the roofline, and unknown chips."""

from __future__ import annotations

import json
import os

import pytest
import run_folder

from jaxrl_llm.profiling import xplane
from jaxrl_llm.report import ROOFLINE_FILE, page, run_reader
from jaxrl_llm.report.device import device_report

TRACE = dict(
  parts={'update': {'matrix products': 3.0, 'attention': 1.0}, 'generate': {'attention': 2.0}},
  busy={'update': 4.0, 'generate': 2.0, 'all': 6.0},
  op_s=6.0,
  span_s=8.0,
  devices=2,
  top=[['update/dot_general', 'matrix products', 'update', 3.0, 10]],
)
PROGRAM = dict(
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
  """A run of six steps whose trace parses as TRACE, its metrics, and the list of parsed paths."""
  folder = run_folder.make(tmp_path / 'run')
  session = tmp_path / 'run/profile/plugins/profile/2026_01_01'
  session.mkdir(parents=True)
  (session / 'vm.xplane.pb').write_bytes(b'1')
  with open(f'{folder}/profile/{ROOFLINE_FILE}', 'w') as file:
    json.dump(PROGRAM, file)
  read = []
  monkeypatch.setattr(xplane, 'read', lambda paths: (read.append(paths), TRACE)[1])
  rows = [{'training/global_step': i, 'generate/rounds': 5.0 + i} for i in range(6)]
  return folder, rows, read


def test_numbers_are_of_one_step(run):
  folder, rows, read = run
  report = device_report(folder, rows)
  assert report['steps'] == [2, 3] and report['devices'] == 2 and report['kind'] == 'TPU v9'
  assert report['parts']['update'] == {'matrix products': 1.5, 'attention': 0.5}
  assert (report['busy']['all'], report['span']) == (3.0, 4.0)
  assert report['top'] == [['update/dot_general', 'matrix products', 'update', 1.5, 5]]
  assert device_report(folder, rows) == report and len(read) == 1  # the parsed trace is cached
  with open(read[0][0], 'ab') as file:
    file.write(b'2')
  device_report(folder, rows)
  assert len(read) == 2  # a changed trace is parsed again


def test_an_unknown_chip_has_rates_and_no_roofline(run):
  folder, rows, _ = run
  report = device_report(folder, rows)
  assert not report['chip_known']
  # Steps 2 and 3 took 7.5 decode iterations on average.
  assert report['roofline'] == [
    dict(part='update', flops=1e9, bytes=None, seconds=None, measured=2.0),
    dict(part='generate', flops=7.5e6 + 5e6, bytes=7.5e7, seconds=None, measured=1.0),
  ]


def test_a_known_chip_has_a_roofline(run):
  folder, rows, _ = run
  known = json.loads(json.dumps(PROGRAM))
  known |= dict(chip=dict(flops=1e9))
  for name, seconds in (('update', 0.5), ('round', 0.04), ('prefill', 0.1)):
    known[name]['seconds'] = seconds
  with open(f'{folder}/profile/{ROOFLINE_FILE}', 'w') as file:
    json.dump(known, file)
  report = device_report(folder, rows)
  assert report['chip_known'] and [half['seconds'] for half in report['roofline']] == [
    0.5,
    7.5 * 0.04 + 0.1,
  ]


def test_a_missing_or_damaged_trace_gives_no_report(run, monkeypatch, caplog):
  folder, rows, _ = run
  assert device_report(str(run_folder.make(os.path.join(folder, 'other'))), rows) is None

  def broken(paths):
    raise ValueError('no trace')

  monkeypatch.setattr(xplane, 'read', broken)
  assert (
    device_report(folder, rows) is None and 'cannot be read: ValueError: no trace' in caplog.text
  )
  with open(f'{folder}/profile/{ROOFLINE_FILE}', 'w') as file:
    file.write('{')
  os.remove(f'{folder}/profile/parts.json')
  monkeypatch.setattr(xplane, 'read', lambda paths: TRACE)
  report = device_report(folder, rows)  # a trace without the run's roofline file
  assert report['roofline'] == [] and report['span'] == 8.0


def test_the_page_has_the_device_report_and_the_other_phases(run):
  folder, *_ = run
  with open(f'{folder}/timing.json', 'w') as file:
    json.dump({'evaluation': 3.5, 'compilation': 20.0, 'checkpoints': 0.0}, file)
  report = run_reader.read_run(folder)
  assert report['device']['parts']['generate'] == {'attention': 1.0}
  assert report['time']['other_phases'] == {'evaluation': 3.5, 'compilation': 20.0}
  text = page.render([folder])
  assert 'id="device"' in text and 'drawDevice' in text and 'Unknown chip' in text

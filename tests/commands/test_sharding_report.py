"""What --mode=layout says lies on a device is what lies there."""

from __future__ import annotations

import json

import jax
import pytest
import tiny_job

from jaxrl_llm import main
from jaxrl_llm.commands import compile_report, sharding_report
from jaxrl_llm.config import loading as configs
from jaxrl_llm.learner import state as train_state
from jaxrl_llm.models import decoder


def config_of(folder, mesh):
  return configs.load(tiny_job.config_file(folder, mesh=mesh, prompts=8))


@pytest.mark.parametrize('mesh', [dict(data=2, fsdp=2, tensor=2), dict(fsdp=8), dict(data=8)])
def test_bytes_per_device_are_those_of_the_arrays(tmp_path, mesh):
  config = config_of(tmp_path, dict(data=1, fsdp=1, tensor=1) | mesh)
  planned = compile_report.make(config, sharding_report.devices('v5e:2x4'))
  spec = compile_report.make(config, jax.devices()[:8])
  state = train_state.init_state(spec, decoder.init(spec.model.config, seed=0))
  held = lambda tree: sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))  # noqa: E731
  rows, of_state = sharding_report.rows(planned), sharding_report.state_bytes(planned)
  assert sum(row.update_bytes for row in rows) == held(state.params) == of_state['params']
  assert of_state['opt_state'] == held(state.opt_state) > 0
  assert sum(row.count for row in rows) == len(jax.tree.leaves(state.params))
  # Sampling keeps all that data and fsdp cut, in bfloat16 on a TPU.
  whole = sum(x.size for x in jax.tree.leaves(state.params))
  cut = sum(row.decode_bytes for row in rows)
  assert cut == 2 * whole if mesh.get('tensor', 1) == 1 else cut < 2 * whole


def test_the_command_prints_and_writes(tmp_path, capsys):
  config = tiny_job.config_file(tmp_path, mesh=dict(fsdp=2, tensor=2), prompts=4)
  report = tmp_path / 'layout.json'
  argv = ['--mode=layout', f'--config={config}', '--topology=4', f'--report={report}']
  assert main.main(argv) == 0
  out = capsys.readouterr().out
  assert 'scratch on 4 devices (fsdp 2 × tensor 2)' in out
  line = next(x for x in out.splitlines() if x.startswith('layers/*/q/kernel'))
  assert line.split() == [
    'layers/*/q/kernel',
    '2',
    '32',
    '×',
    '32',
    'fsdp,',
    'tensor',
    '0.00',
    '–,',
    'tensor',
    '0.00',
  ]
  (row,) = [
    x for x in json.loads(report.read_text())['parameters'] if x['name'] == 'layers/*/q/kernel'
  ]
  assert (row['update_bytes'], row['decode_bytes']) == (2 * 32 * 32, 2 * 32 * 16 * 2)


def test_moments_in_bfloat16_halve_the_optimizer_and_an_update_adds_gradients(tmp_path):
  sizes, lines = {}, {}
  for dtype in ('float32', 'bfloat16'):
    config = config_of(tmp_path, dict(fsdp=8))
    config.optimizer.moments_dtype = dtype
    spec = compile_report.make(config, sharding_report.devices('8'))
    sizes[dtype] = sharding_report.state_bytes(spec)
    lines[dtype] = sharding_report.table('scratch', spec, sharding_report.rows(spec), sizes[dtype])
  wide, narrow = sizes['float32'], sizes['bfloat16']
  assert wide['params'] == narrow['params']
  # Beside the moments: two counters, and with bfloat16 a seed.
  assert (wide['opt_state'] - 8) / 2 == narrow['opt_state'] - 12 == wide['params']
  held = (sum(narrow.values()) + narrow['params']) / 2**20
  assert f'an update holds at least {held:,.2f}: ' in lines['bfloat16'] != lines['float32']


@pytest.mark.parametrize('topology', ['v5e', '2x', 'v5e:2x2:4'])
def test_bad_topologies_are_one_sentence(tmp_path, capsys, topology):
  config = tiny_job.config_file(tmp_path)
  assert main.main(['--mode=layout', f'--config={config}', f'--topology={topology}']) == 2
  assert f'--topology={topology!r} must be a number of devices' in capsys.readouterr().err

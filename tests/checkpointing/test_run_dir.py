"""The run directory: resumed only with the same config, written atomically, never shared by two processes."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest

from jaxrl_llm.checkpointing import checkpoint, metrics_log, run_dir
from jaxrl_llm.config import loading as configs
from jaxrl_llm.runner import resume
from jaxrl_llm.types import UserError

ROOT = pathlib.Path(__file__).parents[2]


def make(*overrides: str):
  return configs.load('', [f'--config.{x}' for x in overrides])


def error_of(root, *overrides: str) -> str:
  with pytest.raises(UserError) as caught:
    run_dir.open_run(str(root), make(*overrides))
  return str(caught.value)


def test_a_new_directory_holds_the_config_and_the_environment(tmp_path):
  run = run_dir.open_run(str(tmp_path / 'a/b'), make('steps=7'))
  root = tmp_path / 'a/b'
  assert run.root == str(root) and run.changed == ()
  assert run.metrics == str(root / 'metrics.jsonl') and run.checkpoints == str(root / 'checkpoints')
  config = json.loads((root / 'config.json').read_text())
  assert config['steps'] == 7 and config['objective']['trust_region']['fn'] == 'clip'
  (start,) = json.loads((root / 'environment.json').read_text())
  assert start['packages']['jax'] == jax.__version__ and len(start['devices']) == 8
  assert not list(root.glob('*.part'))


def test_the_same_config_resumes_and_every_start_is_recorded(tmp_path):
  for _ in range(3):
    run = run_dir.open_run(str(tmp_path), make())
  assert run.changed == () and len(json.loads((tmp_path / 'environment.json').read_text())) == 3


HARMLESS = [
  'steps=61',
  'evaluation.every=5',
  'checkpoint.keep=3',
  'monitoring.rollouts_every=2',
  'rewards.workers=1',
  'rewards.deadline_s=3.0',
  'mesh.data=2',
  'processes.silent_s=5.0',
  'processes.same_every=0',
  'learner.microbatch_tokens=4096',
  'learner.remat=True',
  'objective.head_chunk_tokens=64',
]


@pytest.mark.parametrize('override', HARMLESS)
def test_fields_that_do_not_change_the_steps_may_differ(tmp_path, override):
  run_dir.open_run(str(tmp_path), make())
  run = run_dir.open_run(str(tmp_path), make(override))
  name, _, value = override.partition('=')
  (changed,) = run.changed
  assert changed.startswith(f'{name}: ') and changed.endswith(f' -> {value}')
  stored = json.loads((tmp_path / 'config.json').read_text())
  for part in name.split('.'):
    stored = stored[part]
  assert str(stored) == value  # what the next start is compared with
  assert run_dir.open_run(str(tmp_path), make(override)).changed == ()


@pytest.mark.parametrize(
  'override, text',
  [
    ('seed=1', 'seed: 0 -> 1'),
    ('rewards.fn=number', "rewards.fn: 'exact' -> 'number'"),
    ('objective.trust_region.low=0.1', 'objective.trust_region.low: 0.2 -> 0.1'),
    ('objective.trust_region.delta=3', "objective.trust_region.delta: 'unset' -> 3"),
    ('objective.trust_region.fn=none', "objective.trust_region.low: 0.2 -> 'unset'"),
    ('data.tasks=({"name": "rev"},)', "data.tasks: [] -> [{'name': 'rev'}]"),
  ],
)
def test_fields_that_change_the_steps_may_not_differ(tmp_path, override, text):
  run_dir.open_run(str(tmp_path), make('steps=9'))
  before = {p: p.read_bytes() for p in tmp_path.rglob('*') if p.is_file()}
  message = error_of(tmp_path, override, 'steps=8')
  assert text in message and 'steps: ' not in message
  assert 'give the old values, or another --workdir' in message and str(tmp_path) in message
  assert before == {p: p.read_bytes() for p in tmp_path.rglob('*') if p.is_file()}


def test_a_long_list_of_differences_is_cut_and_counted(tmp_path):
  run_dir.open_run(str(tmp_path), make())
  changes = [f'scratch.{x}=8' for x in ('width', 'layers', 'heads', 'kv_heads', 'mlp')]
  message = error_of(tmp_path, *changes, 'seed=1', 'data.seed=1', 'data.size=1', 'temperature=0.5')
  assert message.count(' -> ') == 8 and '; and 1 more' in message


def test_a_field_that_came_later_had_its_default(tmp_path):
  run_dir.open_run(str(tmp_path), make())
  path = tmp_path / 'config.json'
  old = json.loads(path.read_text())
  del old['temperature'], old['sft']['prompts']
  path.write_text(json.dumps(old))
  assert run_dir.open_run(str(tmp_path), make()).changed == ()
  path.write_text(json.dumps(old))
  assert 'temperature: 1.0 -> 0.5' in error_of(tmp_path, 'temperature=0.5')


def test_the_fingerprint_covers_the_fields_that_change_the_steps(tmp_path):
  fingerprints = {}
  for override in ('seed=0', 'seed=1', *HARMLESS):
    root = tmp_path / override
    run_dir.open_run(str(root), make(override))
    fingerprints[override] = json.loads((root / 'config.json').read_text())['fingerprint']
  assert (
    len({fingerprints[x] for x in ('seed=0', *HARMLESS)}) == 1
    and fingerprints['seed=1'] != fingerprints['seed=0']
  )


def test_a_folder_that_cannot_be_used_is_refused(tmp_path):
  (tmp_path / 'file').write_text('')
  assert 'cannot be used' in error_of(tmp_path / 'file') and 'choose a writable folder' in error_of(
    tmp_path / 'file'
  )
  assert 'cannot be used' in error_of(tmp_path / 'file/run')
  (tmp_path / 'run').mkdir()
  (tmp_path / 'run/config.json').write_text('{"steps": ')
  assert 'config.json is damaged' in error_of(tmp_path / 'run')


@pytest.mark.skipif(os.geteuid() == 0, reason='nothing is forbidden to root')
def test_a_folder_without_permission_is_refused(tmp_path):
  (tmp_path / 'run').mkdir(mode=0o500)
  assert 'cannot be used' in error_of(tmp_path / 'run')


_SECOND = """
import sys
from jaxrl_llm.checkpointing import run_dir
from jaxrl_llm.config import loading
from jaxrl_llm.types import UserError
try:
  run_dir.open_run(sys.argv[1], loading.default(), exclusive=len(sys.argv) == 2)
except UserError as error:
  print(error)
"""


def second_process(root, *argv: str) -> str:
  command = [sys.executable, '-c', _SECOND, str(root), *argv]
  env = os.environ | dict(PYTHONPATH=str(ROOT), JAX_PLATFORMS='cpu')
  return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout


def test_two_processes_cannot_share_a_folder(tmp_path):
  run = run_dir.open_run(str(tmp_path), make())
  assert 'is in use by another process' in second_process(tmp_path)
  assert second_process(tmp_path, 'to read') == ''
  assert run_dir.open_run(str(tmp_path), make()).lock  # the same process may
  run.lock.close()
  assert second_process(tmp_path) == ''


def test_rollouts_and_evaluations_are_written_whole(tmp_path, monkeypatch):
  run = run_dir.open_run(str(tmp_path), make())
  rows = [
    dict(input='1 + 1', output='2 \ud800 ∑\r\u2028', gts='2', score=1.0, step=12),
    dict(input=[dict(role='user', content='x')], output='', gts='', score=0.0, step=12),
  ]
  run.write_rollouts(12, rows)
  lines = (tmp_path / 'rollouts/step_000012.jsonl').read_bytes().split(b'\n')
  assert [json.loads(x) for x in lines[:-1]] == rows and lines[-1] == b''
  assert '∑'.encode() in lines[0]
  expected = dict(settings=dict(samples=4))
  assert run.read_eval(12, expected) is None
  record = dict(step=12, metrics={'val-core/all/acc/greedy': 0.5}, rows=rows) | expected
  run.write_eval(12, record)
  assert run.read_eval(12, expected)['metrics'] == record['metrics']
  assert run.read_eval(12, dict(settings=dict(samples=8))) is None  # of other settings
  assert json.loads((tmp_path / 'eval/step_000012.json').read_text())['step'] == 12

  def killed(*_):
    raise KeyboardInterrupt

  monkeypatch.setattr(os, 'replace', killed)
  with pytest.raises(KeyboardInterrupt):
    run.write_eval(12, {})
  assert run.read_eval(12, expected)['metrics'] == record['metrics']


@pytest.mark.parametrize('text', ['{"metrics": {"a"', '[]', '{}', '3', '{"metrics": {}}'])
def test_a_damaged_evaluation_is_done_again(tmp_path, text):
  run = run_dir.open_run(str(tmp_path), make())
  (tmp_path / 'eval/step_000001.json').write_text(text)
  assert run.read_eval(1, {}) is None


def test_only_the_first_process_writes(tmp_path, monkeypatch):
  monkeypatch.setattr(jax, 'process_index', lambda: 1)
  run = run_dir.open_run(str(tmp_path), make())
  run.write_rollouts(0, [dict(output='')])
  run.write_eval(0, {})
  assert list(tmp_path.iterdir()) == []
  monkeypatch.setattr(jax, 'process_index', lambda: 0)
  run_dir.open_run(str(tmp_path), make())
  monkeypatch.setattr(jax, 'process_index', lambda: 1)
  assert 'seed: 0 -> 1' in error_of(tmp_path, 'seed=1')  # but all refuse


def test_the_revision_is_of_the_package_or_none(tmp_path):
  git = ['git', '-C', str(tmp_path), '-c', 'user.name=a', '-c', 'user.email=a@b']
  package, other = tmp_path / 'package', tmp_path / 'other'
  package.mkdir(), other.mkdir()
  (package / 'x').write_text('1')
  (other / 'x').write_text('1')
  assert run_dir._git_revision(str(package)) is None
  for command in (['init', '-q'], ['add', 'package'], ['commit', '-qm', 'x']):
    subprocess.run([*git, *command], check=True)
  commit = run_dir._git_revision(str(package))
  assert len(commit) == 40 and run_dir._git_revision(str(other)) is None
  (package / 'x').write_text('2')
  assert run_dir._git_revision(str(package)) == f'{commit}+changes'


def test_seconds_outside_of_the_steps_add_up_over_starts(tmp_path):
  (tmp_path / 'timing.json').write_text('{"evaluation": 2.5}')
  spent = run_dir.TimeSpent(str(tmp_path))
  spent.add('evaluation', 1.25)
  assert spent.timed('checkpoints', lambda a, b: a + b)(1, 2) == 3
  with pytest.raises(KeyError), spent.on('compilation'):
    raise KeyError  # a phase that fails is not counted
  seconds = json.loads((tmp_path / 'timing.json').read_text())
  assert seconds['evaluation'] == 3.75 and set(seconds) == {'evaluation', 'checkpoints'}
  (tmp_path / 'timing.json').write_text('[')
  run_dir.TimeSpent(str(tmp_path)).add('evaluation', 1.0)
  assert json.loads((tmp_path / 'timing.json').read_text()) == {'evaluation': 1.0}


def checkpointed(root, step: int = 4, **changes) -> run_dir.RunDirectory:
  """A run directory with metrics and one checkpoint, whose host state holds its config."""
  config = make('steps=9', *(f'{k}={v}' for k, v in changes.items()))
  run = resume.open_directory(str(root), config)
  with metrics_log.Writer(run.metrics, 0) as writer:
    for index in range(step + 1):
      writer.write({metrics_log.STEP: index})
  with checkpoint.Saver(run.checkpoints, 2, run.record_checkpoint) as saver:
    saver.save(step, {'a': np.zeros(2)}, dict(config=json.loads(config.to_json())))
  return run


def files(root) -> dict:
  return {p: p.read_bytes() for p in root.rglob('*') if p.is_file() and p.name != '.lock'}


def refused(root, *overrides: str) -> str:
  """Returns the error message, and checks that no file has changed."""
  before = files(root)
  with pytest.raises(UserError) as caught:
    resume.open_directory(str(root), make(*overrides))
  assert files(root) == before
  return str(caught.value)


@pytest.mark.parametrize('text', [None, '{"seed": ', ''])
def test_without_config_json_the_config_of_the_checkpoint_counts(tmp_path, text):
  checkpointed(tmp_path)
  path = tmp_path / 'config.json'
  original = path.read_text()
  path.unlink()
  if text is not None:
    path.write_text(text)
  assert 'seed: 0 -> 1' in refused(tmp_path, 'steps=9', 'seed=1')
  assert 'temperature: 1.0 -> 0.5' in refused(tmp_path, 'temperature=0.5')
  resume.open_directory(str(tmp_path), make('steps=9'))
  assert path.read_text() == original
  assert resume.open_directory(str(tmp_path), make('steps=10')).changed == ('steps: 9 -> 10',)


def test_the_config_of_the_checkpoint_counts_where_config_json_was_edited(tmp_path):
  checkpointed(tmp_path)
  path = tmp_path / 'config.json'
  path.write_text(json.dumps(json.loads(path.read_text()) | dict(seed=1)))
  assert 'seed: 0 -> 1' in refused(tmp_path, 'steps=9', 'seed=1')


def test_the_saved_config_skips_a_damaged_host_state(tmp_path):
  checkpointed(tmp_path)
  config = json.loads(make('steps=9').to_json())
  folder = str(tmp_path / 'checkpoints')
  checkpoint.save(folder, 6, {'a': np.zeros(2)}, dict(config=config | dict(seed=7)), keep=2)
  path = tmp_path / 'checkpoints/step_000006/host.json'
  assert checkpoint.saved_config(folder)['seed'] == 7
  path.write_bytes(path.read_bytes().replace(b'"seed": 7', b'"seed": 8'))
  assert checkpoint.saved_config(folder)['seed'] == 0
  assert checkpoint.saved_config(str(tmp_path / 'absent')) is None


def test_a_run_whose_checkpoints_were_deleted_is_not_begun_again_over_its_metrics(tmp_path):
  checkpointed(tmp_path)
  shutil.rmtree(tmp_path / 'checkpoints')
  for _ in range(2):
    message = refused(tmp_path, 'steps=9')
    assert 'step 4' in message and '5 rows' in message and 'another --workdir' in message
  (tmp_path / 'metrics.jsonl').rename(tmp_path / 'old.jsonl')
  assert resume.open_directory(str(tmp_path), make('steps=9')).changed == ()
  (tmp_path / 'metrics.jsonl').write_text(json.dumps({metrics_log.STEP: 0}) + '\n')
  resume.open_directory(
    str(tmp_path), make('steps=9')
  )  # started over, and killed before its first checkpoint


def test_a_run_killed_before_its_first_checkpoint_begins_again(tmp_path):
  run = resume.open_directory(str(tmp_path), make())
  with metrics_log.Writer(run.metrics, 0) as writer:
    writer.write({metrics_log.STEP: 0})
  (tmp_path / 'checkpoints/step_000001.part').mkdir()
  resume.open_directory(str(tmp_path), make())


def test_a_deleted_newest_checkpoint_is_a_warning_with_the_step_of_resumption(tmp_path, caplog):
  run = checkpointed(tmp_path)
  run.record_checkpoint(6)
  resume.open_directory(str(tmp_path), make('steps=9'))
  assert 'the checkpoint of step 6 is missing' in caplog.text and 'step 4' in caplog.text


def test_a_run_directory_of_an_earlier_version_is_refused(tmp_path):
  """Sections were renamed since: `generate` is `rollout`, `grade` is `rewards`."""
  settings = json.loads(make().to_json())
  old = {k: v for k, v in settings.items() if k not in ('rollout', 'rewards')}
  old |= dict(
    generate=settings['rollout'], grade=settings['rewards'], fingerprint='of that version'
  )
  (tmp_path / 'config.json').write_text(json.dumps(old))
  message = refused(tmp_path)
  assert 'a run of an earlier version: its config.json has generate, grade' in message
  assert 'give another --workdir' in message and '\n' not in message

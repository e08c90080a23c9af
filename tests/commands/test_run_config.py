"""Which configuration a mode works with: that of the run in --workdir, --config, and fields of the command line."""

from __future__ import annotations

import json
import pathlib

import pytest
import run_folder

from jaxrl_llm.commands import flags, run_config
from jaxrl_llm.config import loading, paths, schema
from jaxrl_llm.types import UserError


@pytest.fixture
def run(tmp_path) -> str:
  """A run of the defaults with 4 prompts, 6 steps and another seed."""
  return run_folder.make(tmp_path / 'run', steps=6, prompts=4, rollouts=4, seed=3)


def load(*argv: str, free=run_config.GENERATION) -> run_config.RunConfig:
  arguments, overrides = flags.parse(argv)
  return run_config.load(arguments, overrides, free)


def refused(*argv: str, free=run_config.GENERATION) -> str:
  with pytest.raises(UserError) as caught:
    load(*argv, free=free)
  return str(caught.value)


def test_a_run_directory_needs_no_config(run):
  found = load(f'--workdir={run}')
  assert found.trained.seed == 3 and found.trained.prompts == 4 and found.trained.steps == 6
  assert found.requested.to_dict() == found.trained.to_dict()
  assert found.evaluation_changes == ()


def test_fields_of_generation_may_be_given_and_leave_the_runs_own_alone(run):
  typed = (
    'completion_tokens=99',
    'temperature=0.5',
    'data.template=Q {question}',
    'data.chat=False',
  )
  found = load(f'--workdir={run}', *(f'--config.{x}' for x in typed))
  assert found.requested.completion_tokens == 99 and found.requested.temperature == 0.5
  assert found.requested.data.template == 'Q {question}' and not found.requested.data.chat
  assert found.trained.to_dict() == load(f'--workdir={run}').trained.to_dict()


@pytest.mark.parametrize('field', ['model=scratch', 'seed=4', 'lora.rank=2', 'rewards.fn=number'])
def test_a_field_of_training_is_refused_without_config(run, field):
  message = refused(f'--workdir={run}', f'--config.{field}')
  name, _, value = field.partition('=')
  assert f'--workdir={run} holds a run of another config ({name}: ' in message and value in message
  assert message.endswith('leave that out.')


def test_an_evaluation_may_have_other_data_and_rewards(run):
  typed = (
    'rewards.fn=number',
    'data.eval_path=x.jsonl',
    'evaluation.samples=9',
    'rewards.workers=1',
  )
  argv = f'--workdir={run}', *(f'--config.{x}' for x in typed)
  found = load(*argv, free=run_config.EVALUATION)
  assert found.requested.rewards.fn == 'number' and found.trained.rewards.fn == 'exact'
  changes = '\n'.join(found.evaluation_changes)
  assert 'rewards.fn' in changes and 'eval_path' in changes and 'samples: 4 -> 9' in changes
  assert 'workers' not in changes
  same = load(f'--workdir={run}', '--config.evaluation.every=5', free=run_config.EVALUATION)
  assert same.evaluation_changes == ()


def test_fields_of_the_machine_belong_to_both(run):
  found = load(f'--workdir={run}', '--config.mesh.fsdp=1', '--config.monitoring.console=plain')
  assert found.trained.mesh.fsdp == found.requested.mesh.fsdp == 1
  assert found.trained.monitoring.console == 'plain'


def test_a_config_that_is_that_of_the_run_may_be_given(run, tmp_path):
  path = tmp_path / 'own.py'
  path.write_text(
    'def get_config():\n  return dict(steps=6, rollouts=4, seed=3, evaluation=dict(samples=2))\n'
  )
  found = load(f'--config={path}', f'--workdir={run}')  # prompts=0 is automatic
  assert found.requested.prompts == 4 and found.requested.evaluation.samples == 2


def test_a_config_that_contradicts_the_run_is_one_sentence(run):
  message = refused('--config=dapo', f'--workdir={run}')
  assert 'holds a run of another config (' in message and 'data.tasks: ' in message
  assert message.endswith("leave --config out to use the run's own.") and '\n' not in message
  # A field of the config file is no field of the command line.
  assert 'completion_tokens' in refused(
    '--config=configs/tiny.py', f'--workdir={run}', free=('scratch', 'data', 'rewards', 'model')
  )


def test_choosing_a_function_frees_its_settings(run):
  found = load(f'--workdir={run}', '--config.rewards.fn=tagged', free=run_config.EVALUATION)
  assert found.requested.rewards.fn == 'tagged'
  stage = '--config.objective.trust_region.fn=none'
  assert 'trust_region.low' in refused(f'--workdir={run}', stage)


def test_choosing_a_source_frees_its_template_and_tasks(tmp_path):
  run = run_folder.make(tmp_path / 'run')
  path = tmp_path / 'run' / 'config.json'
  settings = json.loads(path.read_text())
  settings['data'] |= dict(template='Sum: {question}', tasks=[dict(name='chain_sum')])
  path.write_text(json.dumps(settings))
  rows = '--config.data.source=jsonl', '--config.data.path=rows.jsonl'
  found = load(f'--workdir={run}', *rows, free=run_config.EVALUATION)
  assert found.requested.data.template == '{question}' and not found.requested.data.tasks
  assert found.trained.data.template == 'Sum: {question}'
  assert "data.template: 'Sum: {question}' -> '{question}'" in found.evaluation_changes


@pytest.mark.parametrize('given', [True, False])
def test_a_folder_without_a_run_is_refused_where_it_was_named(given, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  if not given:
    assert load().requested.to_dict() == loading.default().to_dict()
    return
  message = refused('--workdir=typo')
  assert '--workdir=typo holds no run: it has no config.json' in message and '--config' in message
  assert (
    load('--workdir=typo', '--base', '--mode=generate').trained.steps == loading.default().steps
  )
  assert load('--workdir=typo', '--config=sums').trained.prompt_tokens == 56


def test_training_resumes_with_the_runs_own_config(run):
  arguments, overrides = flags.parse([f'--workdir={run}', '--config.steps=9'])
  config = run_config.load_any(arguments, overrides)
  assert (config.steps, config.seed, config.prompts) == (9, 3, 4)
  arguments, _ = flags.parse([f'--workdir={run}', '--config=sums'])
  assert run_config.load_any(arguments, ()).seed == 0


@pytest.mark.parametrize(
  'content, why',
  [('{"steps": ', 'is damaged'), ('[1]', 'is damaged'), ('{"generate": {}}', 'earlier version')],
)
def test_a_config_json_that_cannot_be_used_is_one_sentence(content, why, tmp_path):
  (tmp_path / 'config.json').write_text(content)
  assert why in refused(f'--workdir={tmp_path}')
  arguments, _ = flags.parse([f'--workdir={tmp_path}'])
  with pytest.raises(UserError, match=why):
    run_config.load_any(arguments, ())
  with pytest.raises(UserError, match='is damaged|earlier version'):
    loading.load(str(tmp_path / 'config.json'))


@pytest.mark.parametrize('name', sorted(paths.names()))
def test_every_config_is_the_same_after_a_run_has_saved_it(name, tmp_path):
  config = schema.typed(loading.load(name))
  path = pathlib.Path(tmp_path, 'config.json')
  path.write_text(json.dumps(json.loads(config.to_json()) | dict(fingerprint='x')))
  again = schema.typed(loading.load(str(path)))
  assert json.loads(again.to_json()) == json.loads(config.to_json())


@pytest.mark.parametrize(
  'argv, why',
  [
    (['--temperature=0.5'], '--temperature is a flag of --mode=generate, not of --mode=train; did'),
    (['--temperature=0.5'], 'did you mean --config.temperature=0.5'),
    (['--mode=eval', '--tokens=9'], '--tokens is a flag of --mode=generate, not of --mode=eval'),
    (['--mode=generate', '--step=9'], '--step is a flag of --mode=eval, not of --mode=generate'),
  ],
)
def test_a_flag_of_another_mode_is_refused(argv, why, capsys):
  with pytest.raises(SystemExit) as caught:
    flags.parse(argv)
  error = capsys.readouterr().err
  assert why in error and error.startswith('error: ') and error.count('\n') == 1
  assert caught.value.code == 2


def test_flags_of_several_modes_are_taken_by_each():
  for mode in ('export', 'report'):
    assert flags.parse([f'--mode={mode}', '--to=x'])[0].to == 'x'
  assert flags.parse(['--mode=eval', '--step=9', '--against=y'])[0].step == 9

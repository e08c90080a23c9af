"""Files and overrides over the defaults; every error is one sentence."""

from __future__ import annotations

import json
import pathlib
import types

import ml_collections
import pytest

from jaxrl_llm.config import loading as configs
from jaxrl_llm.config import validation
from jaxrl_llm.runner import validate
from jaxrl_llm.types import UserError

ROOT = pathlib.Path(__file__).parents[2]
RECIPES = sorted((ROOT / 'configs').rglob('*.py'))


def write(folder: pathlib.Path, body: str, name: str = 'c.py') -> str:
  path = folder / name
  path.write_text(f'def get_config():\n  return {body}\n')
  return str(path)


def refusal(call, *args) -> str:
  """The message of a UserError: one sentence."""
  with pytest.raises(UserError) as caught:
    call(*args)
  text = str(caught.value)
  assert text.endswith('.') and '\n' not in text
  return text


def test_without_a_file_it_is_the_default():
  assert configs.load() == configs.default()


@pytest.mark.parametrize('path', RECIPES, ids=lambda p: p.stem)
def test_every_recipe_loads_and_is_valid(path):
  config = configs.load(str(path))
  validate.validate(config)
  assert config != configs.default()
  assert json.loads(config.to_json())


def test_a_file_names_only_what_it_changes(tmp_path):
  body = 'dict(steps=3, temperature=1, data=dict(source="digits", tasks=[dict(name="rev")]))'
  config, default = configs.load(write(tmp_path, body)), configs.default()
  assert (config.steps, config.temperature, config.data.source) == (3, 1.0, 'digits')
  assert type(config.temperature) is float and config.data.tasks == (dict(name='rev'),)
  assert config.data.template == default.data.template and config.optimizer == default.optimizer


def test_a_file_may_return_a_config_dict(tmp_path):
  path = tmp_path / 'c.py'
  path.write_text(
    'import ml_collections\ndef get_config():\n  c = ml_collections.ConfigDict()\n  c.steps = 4\n'
    '  c.objective = dict(trust_region=dict(fn="none"))\n  return c\n'
  )
  config = configs.load(str(path))
  assert config.steps == 4 and config.objective.trust_region.to_dict() == dict(fn='none')
  assert config.objective.ratio.fn == 'token'


def test_a_file_may_have_a_base(tmp_path):
  write(tmp_path, 'dict(steps=3, prompts=8, objective=dict(trust_region=dict(high=0.3)))', 'job.py')
  config = configs.load(
    write(tmp_path, "dict(base='job.py', steps=5, objective=dict(aggregation=dict(fn='fixed')))")
  )
  assert (config.steps, config.prompts) == (5, 8)
  assert config.objective.trust_region.high == 0.3 and config.objective.aggregation.fn == 'fixed'
  assert 'base' not in config


def test_missing_and_circular_bases_are_refused(tmp_path):
  with pytest.raises(UserError, match='none.py does not exist'):
    configs.load(write(tmp_path, "dict(base='none.py')"))
  write(tmp_path, "dict(base='b.py')", 'a.py')
  with pytest.raises(UserError, match='its base is in the end .*a.py again'):
    write(tmp_path, "dict(base='a.py')", 'b.py')
    configs.load(str(tmp_path / 'a.py'))
  write(tmp_path, "dict(base='./d.py')", 'd.py')  # another name of the same file
  with pytest.raises(UserError, match='its base is in the end'):
    configs.load(str(tmp_path / 'd.py'))
  assert 'base=3 must be the name of a config file' in refusal(
    configs.load, write(tmp_path, 'dict(base=3)')
  )


def test_a_part_with_fn_replaces_the_default_whole(tmp_path):
  body = 'dict(objective=dict(trust_region=dict(fn="clip", high=0.3)), rewards=dict(fn="number"))'
  config = configs.load(write(tmp_path, body))
  assert config.objective.trust_region.to_dict() == dict(fn='clip', high=0.3)
  # How many workers grade, and how long, is no setting of a grader.
  assert config.rewards.to_dict() == configs.default().rewards.to_dict() | dict(fn='number')


def test_a_part_without_fn_changes_settings_of_the_default_function(tmp_path):
  config = configs.load(
    write(tmp_path, 'dict(objective=dict(trust_region=dict(high=0.3, delta=3)))')
  )
  assert config.objective.trust_region.to_dict() == dict(fn='clip', low=0.2, high=0.3, delta=3)


def test_a_file_changed_within_a_second_is_read_again(tmp_path):
  for steps in (3, 4, 5):
    assert configs.load(write(tmp_path, f'dict(steps={steps})')).steps == steps
  assert [p.name for p in tmp_path.iterdir()] == ['c.py']


@pytest.mark.parametrize(
  'body, text',
  [
    ('dict(stps=3)', 'config.stps is unknown; did you mean steps.'),
    ('dict(data=dict(sorce="x"))', 'config.data.sorce is unknown; did you mean source.'),
    ('dict(zzz=1)', 'config.zzz is unknown; valid: checkpoint, completion_tokens, '),
    ('dict(steps="3")', "config.steps='3' must be of type int, such as 60."),
    ('dict(steps=True)', 'config.steps=True must be of type int'),
    ('dict(steps=3.0)', 'config.steps=3.0 must be of type int'),
    ('dict(steps=None)', 'config.steps is missing; give it a value such as 60.'),
    ('dict(data=3)', 'config.data=3 must be a dict of: answer_after, '),
    (
      'dict(objective=dict(trust_region="clip"))',
      "config.objective.trust_region='clip' must be a dict of: fn",
    ),
    (
      'dict(objective=dict(trust_region=dict(high="0.3")))',
      "config.objective.trust_region.high='0.3' must be",
    ),
    (
      'dict(objective=dict(trust_region=dict(fn="clip", high="0.3")))',
      "config.objective.trust_region.high='0.3' must be of type float",
    ),
    (
      'dict(objective=dict(trust_region=dict(fn=None)))',
      'config.objective.trust_region.fn is missing',
    ),
    (
      'dict(objective=dict(trust_region=dict(fn="x", a=None)))',
      'config.objective.trust_region.a is missing',
    ),
    (
      'dict(rewards=dict(fn="x", f=print))',
      'config.rewards.f=<built-in function print> must be a str',
    ),
    ('dict(data=dict(tasks=[dict(a=float("nan"))]))', 'config.data.tasks[0].a=nan must be'),
    ('[3]', 'get_config() returns list, not a dict'),
    ('1 / 0', 'fails (ZeroDivisionError: division by zero, at '),
  ],
)
def test_wrong_files_are_refused(tmp_path, body, text):
  assert text in refusal(configs.load, write(tmp_path, body))


@pytest.mark.parametrize(
  'source, text',
  [
    ('def get_config(:\n', 'fails (SyntaxError: '),
    ('c = 3\n', 'has no function get_config()'),
    ('get_config = dict(steps=3)\n', 'has no function get_config()'),
    ('import nothing_of_that_name\n', 'fails (ModuleNotFoundError: '),
    ('raise SystemExit(0)\n', 'fails (SystemExit: 0, at '),
    ('def get_config(x):\n  return {}\n', 'fails (TypeError: '),
    (b'\xff\xfe\x00', 'fails ('),
  ],
)
def test_files_that_cannot_be_read_are_refused(tmp_path, source, text):
  path = tmp_path / 'c.py'
  path.write_bytes(source if isinstance(source, bytes) else source.encode())
  assert text in refusal(configs.load, str(path))


def test_a_missing_file_is_refused(tmp_path):
  assert 'does not exist; give a name such as dapo, or a file.' in refusal(
    configs.load, str(tmp_path / 'zzz.py')
  )
  assert 'does not exist' in refusal(configs.load, str(tmp_path))


@pytest.mark.parametrize(
  'override, field, value',
  [
    ('steps=7', 'steps', 7),
    ('temperature=1', 'temperature', 1.0),
    ('temperature=0.5', 'temperature', 0.5),
    ('optimizer.learning_rate=3e-4', 'optimizer.learning_rate', 3e-4),
    ('mesh.fsdp=-1', 'mesh.fsdp', -1),
    ('model=some/folder=x', 'model', 'some/folder=x'),
    ('data.path=123', 'data.path', '123'),
    ('data.path=', 'data.path', ''),
    ('data.chat=false', 'data.chat', False),
    ('data.chat=True', 'data.chat', True),
    ('data.tasks=({"name": "rev", "size": 3},)', 'data.tasks', (dict(name='rev', size=3),)),
    ('data.tasks=[]', 'data.tasks', ()),
    ('learner.remat=true', 'learner.remat', True),
    ('learner.remat=auto', 'learner.remat', 'auto'),
    ('objective.trust_region.high=0.3', 'objective.trust_region.high', 0.3),
    ('objective.trust_region.delta=3', 'objective.trust_region.delta', 3),
    ('objective.trust_region.kind=soft', 'objective.trust_region.kind', 'soft'),
    ('mesh={"data": 2}', 'mesh', configs.default().mesh.to_dict() | dict(data=2)),
    ('objective.trust_region={"fn": "none"}', 'objective.trust_region', dict(fn='none')),
    ('objective.trust_region.fn=none', 'objective.trust_region', dict(fn='none')),
    (
      'objective.trust_region.fn=clip',
      'objective.trust_region',
      dict(fn='clip', low=0.2, high=0.2),
    ),
    ('rewards.fn=number', 'rewards', configs.default().rewards.to_dict() | dict(fn='number')),
  ],
)
def test_overrides_take_the_type_of_the_default(override, field, value):
  config = configs.load('', [f'--config.{override}'])
  for part in field.split('.'):
    config = config[part]
  got = config.to_dict() if isinstance(config, ml_collections.ConfigDict) else config
  assert got == value and type(got) is type(value)


def test_the_order_of_overrides_does_not_matter_for_a_function_and_its_settings():
  changes = ['--config.objective.trust_region.delta=3', '--config.objective.trust_region.fn=other']
  for order in (changes, changes[::-1]):
    assert configs.load('', order).objective.trust_region.to_dict() == dict(fn='other', delta=3)
  assert configs.load('', ['--config.steps=1', '--config.steps=2']).steps == 2


def test_overrides_lie_over_the_file(tmp_path):
  path = write(tmp_path, 'dict(steps=3, objective=dict(trust_region=dict(fn="soft", a=1)))')
  config = configs.load(path, ['--config.steps=4', '--config.objective.trust_region.a=2'])
  assert config.steps == 4 and config.objective.trust_region.to_dict() == dict(fn='soft', a=2)
  message = refusal(configs.load, path, ['--config.objective.trust_region.a=x'])
  assert "config.objective.trust_region.a='x' must be of type int" in message


@pytest.mark.parametrize(
  'override, text',
  [
    ('temprature=1', 'config.temprature is unknown; did you mean --config.temperature.'),
    ('optimizer.learning_rte=1', 'is unknown; did you mean --config.optimizer.learning_rate.'),
    ('optimiser.eps=1', 'config.optimiser is unknown; did you mean --config.optimizer.eps.'),
    (
      'learning_rate=1',
      'did you mean --config.optimizer.learning_rate or --config.sft.learning_rate.',
    ),
    ('slots=1', 'config.slots is unknown; did you mean --config.rollout.slots.'),
    ('rollout.seed=1', 'config.rollout.seed is unknown; did you mean --config.seed.'),
    ('zzz=1', 'zzz is unknown; valid: checkpoint, completion_tokens, '),
    ('steps', '--config.steps has no value; write --config.steps=VALUE.'),
    ('steps=many', "config.steps='many' must be of type int"),
    ('steps=1e3', 'config.steps=1000.0 must be of type int'),
    ('steps=', "config.steps='' must be of type int"),
    ('steps=None', 'config.steps is missing'),
    (
      'steps.x=1',
      '--config.steps.x=1 asks for a part of config.steps=60; write --config.steps=VALUE.',
    ),
    ('data=3', 'config.data=3 must be a dict of'),
    ('data.chat=1', 'config.data.chat=1 must be of type bool'),
    ('mesh={"dta": 2}', 'config.mesh.dta is unknown; did you mean data.'),
    ('optimizer.eps=nan', "config.optimizer.eps='nan' must be of type float"),
    ('optimizer.eps=1e999', 'config.optimizer.eps=inf must be a string, a finite number'),
  ],
)
def test_wrong_overrides_are_refused(override, text):
  assert text in refusal(configs.load, '', [f'--config.{override}'])


@pytest.mark.parametrize(
  'overrides, text',
  [
    (['steps=0'], 'config.steps=0 does not go with config.sft.steps=0: nothing is trained; raise'),
    (['prompts=-1'], 'config.prompts=-1 must be'),
    (['completion_tokens=1'], 'config.completion_tokens=1 must be a whole number of at least 2.'),
    (['temperature=0.0'], 'config.temperature=0.0 must be a finite number above 0.'),
    (['optimizer.learning_rate=-1.0'], 'config.optimizer.learning_rate=-1.0 must be'),
    (['optimizer.b1=1.0'], 'config.optimizer.b1=1.0 must be from 0 to 1, 1 not included.'),
    (['optimizer.weight_decay=-0.1'], 'config.optimizer.weight_decay=-0.1 must not be below 0.'),
    (['curriculum.kind_decay=1.5'], 'config.curriculum.kind_decay=1.5 must be from 0 to 1.'),
    (['seed=2147483648'], 'config.seed=2147483648 must be below'),
    (['scratch.layers=0'], 'config.scratch.layers=0 must be'),
    (['checkpoint.keep=0'], 'config.checkpoint.keep=0 must be'),
    (['processes.silent_s=0.5'], 'config.processes.silent_s=0.5 must be from 1 to 86400 seconds.'),
    (['processes.same_every=-1'], 'config.processes.same_every=-1 must be'),
    (['dtype=float16'], "config.dtype='float16' must be one of: auto, float32, bfloat16."),
    (['learner.remat=sometimes'], "config.learner.remat='sometimes' must be one of"),
    (
      ['rollouts=1'],
      "config.objective.advantage.fn='group_normalized' does not go with config.rollouts=1",
    ),
    (
      ['prompts=6', 'learner.minibatches=4'],
      'learner.minibatches=4 does not divide config.prompts=6',
    ),
    (
      ['prompt_tokens=64', 'completion_tokens=32', 'learner.microbatch_tokens=94'],
      'config.learner.microbatch_tokens=94 is less than the longest row, config.prompt_tokens=64 + '
      'config.completion_tokens=32 - 1; set it to at least 95, or to 0.',
    ),
    (['learner.microbatch_tokens=-1'], 'config.learner.microbatch_tokens=-1 must be'),
    (['mesh.tensor=0'], 'config.mesh.tensor=0 must be at least 1, or -1'),
    (['mesh.data=-1'], 'config.mesh.data and config.mesh.fsdp are both -1'),
  ],
)
def test_values_out_of_range_are_refused(overrides, text):
  config = configs.load('', [f'--config.{x}' for x in overrides])
  assert text in refusal(validate.validate, config)


@pytest.mark.parametrize(
  'overrides',
  [
    ['rollouts=1', 'objective.advantage.fn=raw'],
    ['prompt_tokens=64', 'completion_tokens=32', 'learner.microbatch_tokens=95'],
    ['prompts=4', 'learner.microbatch_tokens=1000000', 'learner.minibatches=2'],
    ['curriculum.kind_decay=1.0', 'optimizer.b1=0.0', 'evaluation.samples=0'],
    ['prompts=0', 'learner.minibatches=3'],  # prompts: chosen by `sized`
    ['mesh.fsdp=1', 'mesh.tensor=-1'],
  ],
)
def test_values_at_the_edge_are_valid(overrides):
  validate.validate(configs.load('', [f'--config.{x}' for x in overrides]))


def change(config, field: str, value) -> None:
  *parents, leaf = field.split('.')
  for parent in parents:
    config = config[parent]
  with config.ignore_type():
    if value is Ellipsis:
      del config[leaf]
    else:
      config[leaf] = value


@pytest.mark.parametrize('check', [validate.validate, lambda c: validation.sized(c, [])])
@pytest.mark.parametrize(
  'field, value, text',
  [
    ('steps', ..., 'config.steps is missing; give it a value such as 60.'),
    ('steps', None, 'config.steps is missing'),
    ('steps', '60', "config.steps='60' must be of type int"),
    ('prompts', ..., 'config.prompts is missing'),
    ('optimizer.eps', ..., 'config.optimizer.eps is missing'),
    ('mesh', ..., 'config.mesh is missing'),
    (
      'mesh',
      3,
      'config.mesh=3 must be a dict of: context, data, decode, expert, fsdp, preset, rules, slices, tensor',
    ),
    (
      'objective.trust_region.fn',
      ...,
      "config.objective.trust_region.fn is missing; give it a value such as 'clip'",
    ),
    ('objective.trust_region', 3, 'config.objective.trust_region.fn is missing'),
    (
      'objective.trust_region.low',
      print,
      'config.objective.trust_region.low=<built-in function print> must be',
    ),
    ('stepz', 3, 'config.stepz is unknown; did you mean steps'),
    ('data.temlate', 'x', 'config.data.temlate is unknown; did you mean template'),
  ],
)
def test_a_config_built_in_python_is_checked_likewise(check, field, value, text):
  config = configs.default()
  change(config, field, value)
  assert text in refusal(check, config)


def test_validating_changes_nothing():
  config = configs.load('', ['--config.prompts=8'])
  before = config.to_json()
  validate.validate(config)
  assert config.to_json() == before


@pytest.mark.parametrize(
  'platform, count, axis, size, prompts',
  [
    ('cpu', 1, 'tensor', 1, 4),
    ('cpu', 8, 'tensor', 1, 8),
    ('tpu', 6, 'tensor', 2, 66),
    ('cpu', 8, 'expert', 4, 8),
  ],
)
def test_sized_chooses_prompts_that_the_devices_share(platform, count, axis, size, prompts):
  devices = [types.SimpleNamespace(platform=platform)] * count
  config = configs.load('', [f'--config.mesh.{axis}={size}'])
  assert validation.sized(config, devices).prompts == prompts and config.prompts == 0
  config.prompts = 5
  assert validation.sized(config, devices).prompts == 5

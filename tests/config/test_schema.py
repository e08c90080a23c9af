"""The typed configuration: the same fields and values as its ConfigDict and config.json, and frozen."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import pickle
import re

import pytest

from jaxrl_llm.config import loading, paths, schema

ROOT = pathlib.Path(__file__).parents[2]


def test_the_defaults_are_stated_once():
  assert schema.typed(schema.default()) == schema.Config()
  assert schema.Config().to_json() == schema.default().to_json()


@pytest.mark.parametrize('name', paths.names())
def test_the_typed_configuration_is_that_of_the_file(name):
  config = loading.load(name)
  typed = schema.typed(config)
  assert typed.to_json(sort_keys=True, indent=2) == config.to_json(sort_keys=True, indent=2)
  assert typed.to_dict() == config.to_dict()
  assert schema.mutable(typed) == config
  assert pickle.loads(pickle.dumps(typed)) == typed == schema.typed(typed)
  assert json.loads(typed.to_json()) == json.loads(config.to_json())


def test_sections_read_as_the_config_dict_does():
  config = loading.load('', ['--config.rewards.fn=steps', '--config.rewards.model=judge'])
  typed = schema.typed(config)
  assert typed.rewards.fn == 'steps' and typed.rewards.settings == dict(model='judge')
  assert dict(typed.mesh) == dict(config.mesh) and [*typed.mesh] == [*config.mesh]
  assert typed.rewards.keys() == config.rewards.keys()
  assert typed.rewards['model'] == typed.rewards.get('model') == 'judge'
  assert 'model' in typed.rewards and typed.rewards.get('none') is None
  assert typed.objective.trust_region == schema.stage('clip', low=0.2, high=0.2)
  with pytest.raises(dataclasses.FrozenInstanceError):
    typed.steps = 3


def test_replace_changes_nested_fields():
  config = schema.replace(
    schema.Config(), {'steps': 3, 'rollout.ngram.draft': 2, 'replay.reuse': schema.stage('none')}
  )
  assert (config.steps, config.rollout.ngram.draft) == (3, 2)
  assert schema.replace(config, {'steps': 60, 'rollout.ngram.draft': 0}) == schema.Config()


def test_every_field_has_a_comment_or_a_telling_name():
  """A field without a comment is one whose name and type are its meaning."""
  plain = {
    *('seed', 'steps', 'temperature', 'layers', 'experts_per_token', 'prompts', 'learning_rate'),
    *('advantage', 'ratio', 'trust_region', 'aggregation', 'weight_decay', 'b1', 'b2', 'eps'),
    *('alpha', 'question', 'answer', 'source', 'timeout', 'crash', 'error', 'value', 'top_p'),
    *('min_p', 'stop_steps', 'fn'),
  }
  sections = {'scratch', 'learner', 'rollout', 'ngram', 'objective', 'optimizer', 'lora'}
  for path in ('schema.py', 'data_sections.py', 'run_sections.py'):
    lines = (ROOT / 'jaxrl_llm' / 'config' / path).read_text().splitlines()
    for before, line in zip(lines, lines[1:], strict=False):
      field = re.match(r'  (\w+): ([\w\[\], |.]+) = ', line)
      if field and not field[2].endswith('Config') and field[1] not in plain | sections:
        assert '#' in line or before.strip().startswith('#'), f'{path}: {field[1]} has no comment'

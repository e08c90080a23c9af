"""The data of every shipped config has the prompts of its steps and of its evaluation, as it is."""

from __future__ import annotations

import pathlib

import pytest

from jaxrl_llm.config import loading as configs
from jaxrl_llm.data import pipeline

FILES = sorted((pathlib.Path(__file__).parents[2] / 'configs').rglob('*.py'))
OWN_FILES = ('jsonl', 'files')  # sources whose files the user brings
_found: dict[str, pipeline.RowSets] = {}  # by what decides the rows: many configs share them


@pytest.mark.parametrize('path', FILES, ids=lambda path: path.stem)
def test_a_config_has_enough_rows(path):
  config = configs.load(str(path))
  if config.data.source in OWN_FILES:
    pytest.skip('reads files of the user')
  key = f'{config.data} {config.evaluation.prompts} {config.evaluation.benchmark}'
  if key not in _found:
    _found[key] = pipeline.load_rows(config)
  rows = _found[key]
  assert len(rows.train) >= config.prompts
  assert len(rows.held_out) == config.evaluation.prompts

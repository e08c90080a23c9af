"""The project's gradients against official code: every golden of tests/objective/official, in float64.

How a golden is made, and what a script has: tests/objective/official/lib.py.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import types

import jax
import numpy as np
import pytest

from jaxrl_llm import objective
from jaxrl_llm.config import stages
from jaxrl_llm.objective import aggregation, method_spec, ratio
from jaxrl_llm.types import UserError
from tests.objective.official import lib

NAMES = sorted(path.stem for path in lib.FOLDER.glob('*.json'))
SCRIPTS = {name: importlib.import_module(f'tests.objective.official.{name}') for name in NAMES}
GOLDENS = {name: json.loads((lib.FOLDER / f'{name}.json').read_text()) for name in NAMES}
MUTANTS = [(name, bug) for name in NAMES for bug in SCRIPTS[name].MUTANTS]
CLOSE = 1e-10  # relative to the largest value


@pytest.fixture(autouse=True)
def float64():
  with jax.enable_x64(True):
    yield


def test_every_script_has_its_golden():
  scripts = {
    path.stem for path in lib.FOLDER.glob('*.py') if 'lib.main(__name__)' in path.read_text()
  }
  assert scripts - {'lib'} == set(NAMES)


@pytest.mark.parametrize('name', NAMES)
def test_gradient_is_that_of_the_official_code(name):
  assert lib.compare(SCRIPTS[name], GOLDENS[name]) <= CLOSE
  for draw in GOLDENS[name]['draws']:
    for output in draw['outputs'].values():
      assert np.abs(output).max() > 1e-4, 'the draw shows nothing'


@pytest.mark.parametrize('name', NAMES)
def test_golden_names_where_it_is_from(name):
  golden, official = GOLDENS[name], SCRIPTS[name].OFFICIAL
  assert {k: golden[k] for k in official._fields} == official._asdict() | {
    'paths': list(official.paths)
  }
  assert re.fullmatch(r'[\w.-]+/[\w.-]+', official.repository)
  assert re.fullmatch(r'[0-9a-f]{40}', official.commit)
  assert official.license


def _edges(data):
  """What a draw reaches, name → whether."""
  mask, lengths = lib.mask(data) > 0, data['length']
  gap = np.where(mask, data['logp'] - data['old'], 0.0)
  far = [gap[rows] for rows in (data['correct'] > 0.5, data['correct'] < 0.5)]
  solved = data['correct'].reshape(-1, lib.G).mean(1)
  return {
    'ratios far above and below 1 for both signs': all(
      x.max() > 1.2 and x.min() < -1.2 for x in far
    ),
    'empty rows': (lengths == 0).any(),
    'truncated rows': (lengths == mask.shape[1]).sum() >= 2,
    'all-right groups': (solved == 1).any() and ((solved > 0) & (solved < 1)).any(),
    'rows of several ages': len(np.unique(data['age'])) >= 4,
  }


@pytest.mark.parametrize('name', NAMES)
def test_draws_reach_the_edges(name):
  """Some draw of each script; one without an edge says so in WITHOUT, '*' where its inputs are no rows of tokens."""
  without = getattr(SCRIPTS[name], 'WITHOUT', {})
  if '*' in without:
    return
  draws = [{k: np.asarray(v) for k, v in d['inputs'].items()} for d in GOLDENS[name]['draws']]
  reached = {edge for data in draws for edge, there in _edges(data).items() if there}
  assert set(_edges(draws[0])) - reached == set(without)


@pytest.mark.parametrize('name, bug', MUTANTS)
def test_a_mutant_of_the_formula_turns_its_golden_red(name, bug, monkeypatch):
  module, there, planted = SCRIPTS[name].MUTANTS[bug]
  plant(monkeypatch, module, there, planted)
  assert lib.compare(SCRIPTS[name], GOLDENS[name]) > CLOSE


def variants(changes):
  """(name, settings) of what differs in one number of a chosen function, or in the denominators alone."""
  whole = lib.settings(changes)
  for stage, module in method_spec.STAGES.items():
    spec = dict(whole[stage])
    fn = stages.choices(module)[spec['fn']]
    for key, value in ((fn.__kwdefaults__ or {}) | spec).items():
      if isinstance(value, int | float) and not isinstance(value, bool):
        changed = changes | {stage: spec | {key: 2 * value if value else 0.3}}
        if composes(changed):
          yield f'{stage}.{key}', changed
  for name in sorted(stages.choices(aggregation)):
    changed = changes | dict(aggregation=name)
    if name != whole.aggregation.fn and composes(changed):
      yield f'aggregate={name}', changed


def composes(changes):
  try:
    return bool(objective.method(lib.settings(changes)))
  except UserError:  # a contract
    return False


PLAIN = [name for name in NAMES if not hasattr(SCRIPTS[name], 'ours')]
VARIANTS = [(name, label) for name in PLAIN for label, _ in variants(SCRIPTS[name].SETTINGS)]


@pytest.mark.parametrize('name, label', VARIANTS)
def test_another_number_or_denominator_turns_its_golden_red(name, label):
  """But for what a script declares IDLE: a number that its draws do not reach."""
  script = SCRIPTS[name]
  changed = types.SimpleNamespace(SETTINGS=dict(variants(script.SETTINGS))[label])
  idle = label in getattr(script, 'IDLE', ())
  assert (lib.compare(changed, GOLDENS[name]) <= CLOSE) == idle


@pytest.mark.parametrize('name', [n for n in PLAIN if SCRIPTS[n].SETTINGS.get('ratio') != 'one'])
def test_a_ratio_upside_down_turns_its_golden_red(name, monkeypatch):
  direct = str(SCRIPTS[name].SETTINGS.get('ratio')).startswith('direct')
  base = 'tokens.behavior_BxT' if direct else 'tokens.old_BxT'
  plant(monkeypatch, ratio, f'tokens.logp_BxT - {base}', f'{base} - tokens.logp_BxT')
  idle = 'ratio' in getattr(SCRIPTS[name], 'IDLE', ())
  assert (lib.compare(SCRIPTS[name], GOLDENS[name]) <= CLOSE) == idle


def plant(monkeypatch, module, there, planted):
  """Replaces a module's functions and constants by those of its changed source."""
  source = inspect.getsource(module)
  assert source.count(there) == 1, 'the text to replace is gone, or not alone'
  broken = dict(vars(module))
  exec(compile(source.replace(there, planted), module.__file__, 'exec'), broken)
  for key, value in vars(module).copy().items():
    if inspect.isfunction(value) and value.__module__ == module.__name__:
      monkeypatch.setattr(value, '__code__', broken[key].__code__)
      monkeypatch.setattr(value, '__kwdefaults__', broken[key].__kwdefaults__)
    elif inspect.isclass(value) and value.__module__ == module.__name__:
      for method, fn in vars(value).copy().items():
        if inspect.isfunction(fn) and fn.__code__.co_filename == module.__file__:
          monkeypatch.setattr(fn, '__code__', getattr(broken[key], method).__code__)
    elif isinstance(value, int | float | list | tuple):
      monkeypatch.setattr(module, key, broken[key])

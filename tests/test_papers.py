"""One config per paper: each trains the default job, is tested, and has a row in configs/README.md with its source.

tests/test_configs.py shows that each runs.
"""

from __future__ import annotations

import importlib

import method_table
import provenance
import pytest
from curricula import RULES
from method_table import PAPERS, TURNS, config, functions, proof, selection
from objective_table import METHODS, settings

from jaxrl_llm.config import loading

ROOT, FILES = method_table.ROOT, method_table.FILES


@pytest.mark.parametrize('mark', method_table.MARKS)
def test_the_tables_are_up_to_date(mark):
  text = method_table.README.read_text()
  assert method_table.written(text, mark) == method_table.tables()[mark], (
    'run: python tests/method_table.py'
  )


def test_tables_name_every_config():
  text = method_table.README.read_text()
  assert all(f'[`{name}`](' in text for name in FILES)


@pytest.mark.parametrize('name', PAPERS)
def test_every_method_has_one_source_of_its_formula(name):
  """A golden of official code, or one level in tests/provenance.py."""
  assert provenance.level(name)
  named = [level for level, configs in provenance.LEVELS.items() if name in configs]
  assert len(named) == (0 if provenance.proven(name) else 1)


def test_provenance_names_only_methods():
  named = [name for configs in provenance.LEVELS.values() for name in configs]
  assert set(named) | set(provenance.ALIASES) <= set(PAPERS)
  assert sum(provenance.proven(name) for name in PAPERS) >= 12


@pytest.mark.parametrize('name', [name for name in PAPERS if provenance.proven(name)])
def test_a_golden_runs_the_very_functions_of_the_config(name):
  golden = provenance.ALIASES.get(name, name)
  script = importlib.import_module(f'tests.objective.official.{golden}')
  if hasattr(script, 'SETTINGS'):
    own = functions(config(name).objective)
    assert functions(settings(**script.SETTINGS)) == own


def test_a_method_without_a_source_is_refused():
  with pytest.raises(LookupError, match='no level'):
    provenance.level('nonesuch')


@pytest.mark.parametrize('name', TURNS)
def test_methods_of_turns_play_a_game(name):
  """A method of turns differs from guess.py in its objective, and in its game where it needs another.

  One that does without a verifier has it for the logs alone, and takes prompts and roles from elsewhere.
  """
  own, guess = (loading.load(n) for n in (name, 'guess'))
  assert name in (ROOT / proof(name)).read_text()
  logged = own.environment.judge == 'rewards' and own.curriculum.utility.fn == 'uniform'
  assert logged or own.environment.judge == 'environment'
  own.optimizer.outer = guess.optimizer.outer
  # Another game may be longer: scratch.max_tokens and the steps follow.
  guess.scratch.max_tokens = own.scratch.max_tokens
  games = {'data', 'environment', 'prompt_tokens', 'completion_tokens', 'steps'}
  games |= {'curriculum', 'optimizer', 'sft'} if logged else set()
  assert {field for field in own if own[field] != guess[field]} <= {'objective', *games}
  assert f'--config={name}' in FILES[name].read_text()


# Fields in which a method may differ from dapo.py; the job is the same.
FREE = (
  *('objective', 'learner', 'rollouts', 'prompts', 'rollout', 'curriculum', 'prompt_tokens'),
  *('lora', 'rewards', 'replay', 'sft'),
)


@pytest.mark.parametrize('name', [name for name in PAPERS if name not in TURNS])
def test_every_config_is_proven_and_trains_the_default_job(name):
  """The very functions of the config are a row of tests/objective_table.py; the job is that of dapo.py."""
  own, dapo = (loading.load(n) for n in (name, 'dapo'))
  row = settings(**METHODS[proof(name)].settings)
  assert functions(own.objective) == functions(row)
  assert own.objective.reward_shaping.fn in ('none', 'overlong', row.reward_shaping.fn)
  own.optimizer.outer, own.data.keep = dapo.optimizer.outer, dapo.data.keep
  # Which workers grade is free; what is right is not.
  for setting in ('parts', 'vote', 'truncate', 'workers', 'deadline_s'):
    own.rewards[setting] = dapo.rewards[setting]
  assert own.rewards == dapo.rewards
  own.learner.minibatches = dapo.learner.minibatches
  assert own.learner == dapo.learner
  if own.lora.rank:  # an adapter starts at zero
    own.optimizer.learning_rate = dapo.optimizer.learning_rate
  if own.curriculum.hint.fn in (
    'rewritten',
    'reflected',
    'written',
  ):  # room for what the policy writes in a reply
    own.completion_tokens = dapo.completion_tokens
  for field in own:
    if field not in FREE:
      assert own[field] == dapo[field], f'config.{field} is not that of dapo.py'
  text = FILES[name].read_text()
  for part in (f'--config={name}', 'Numbers:'):
    assert part in text, f'the header of {FILES[name]} has no {part!r}'
  assert method_table.paper(name)
  if (chosen := selection(name)) and [*chosen] != ['curriculum.allocation']:
    assert name in RULES, (
      f'{name} changes the curriculum: it belongs into RULES of tests/curricula.py'
    )

"""Configs of methods with a golden of official code have the settings of that golden."""

from __future__ import annotations

import importlib
import pathlib

import pytest

from jaxrl_llm.config import loading as configs
from jaxrl_llm.config import stages
from jaxrl_llm.curriculum import hint_rules
from jaxrl_llm.learner import inner_steps
from jaxrl_llm.objective import method_spec
from tests.objective.official import lib

ROOT = pathlib.Path(__file__).parents[2]
# config → golden, and the settings that are of the golden's small tensors or that its header says are ours
GOLDENS = {
  'rec': ('rec_ring', set()),
  'drpo': ('drpo', {'trust_region.max_tokens'}),
  'vcpo': ('vcpo', set()),
  'adora': ('adora', {'advantage.right', 'advantage.long_tokens', 'aggregation'}),
  'rlep': ('rlep', set()),
  'a_star_po': ('a_star_po', {'kl.coef'}),
  'clpo': ('clpo', {'kl.coef'}),
  'r3l': ('r3l', set()),
  'score_centering': ('score_centering', set()),
  'chord': ('chord', set()),
  'mc_grpo': ('mc_grpo', {'advantage.eps'}),
  'hpt': ('hpt', {'sft_loss.weight'}),
  'spear': ('spear', set()),
  'sdpo': ('sdpo', {'distillation.prompt_tokens'}),
  'opsd': ('opsd', {'distillation.prompt_tokens'}),
}


def settings(stage, spec):
  """A stage's function and all its keywords."""
  fn = stages.pick(method_spec.STAGES[stage], spec)
  return {'fn': fn.func.__name__} | (fn.func.__kwdefaults__ or {}) | fn.keywords


@pytest.mark.parametrize('name', GOLDENS)
def test_a_config_has_the_settings_of_its_golden(name):
  golden, free = GOLDENS[name]
  wanted = lib.settings(importlib.import_module(f'tests.objective.official.{golden}').SETTINGS)
  own = configs.load(name).objective
  stages = (
    'advantage',
    'importance_correction',
    'ratio',
    'trust_region',
    'aggregation',
    'kl',
    'kl_scale',
    'lr_scale',
    'sft_loss',
    'distillation',
  )
  for stage in set(stages) - free:
    got, want = settings(stage, own[stage]), settings(stage, wanted[stage])
    differ = {f'{stage}.{k}' for k in want if got.get(k) != want[k]}
    assert differ <= free, {k: (got.get(k), v) for k, v in want.items()}


def test_hill_has_the_settings_of_its_golden():
  own = configs.load('hill')
  golden = importlib.import_module('tests.objective.official.hill')
  chosen = stages.pick(hint_rules, own.curriculum.hint)()
  assert chosen.writing == hint_rules.written().writing
  assert (chosen.writing.hints, own.rollouts) == (golden.M, golden.N)
  assert chosen.writing.temperature == golden.TEMPERATURE


def test_sfpo_has_the_settings_of_its_golden():
  chosen = configs.load('sfpo').optimizer.outer
  golden = importlib.import_module('tests.objective.official.sfpo')
  assert (
    stages.pick(inner_steps, chosen)()
    == inner_steps.slow_fast(**golden.SETTINGS)
    == inner_steps.slow_fast()
  )


def test_a_star_po_has_the_regularization_of_the_official_code():
  """Advantage and penalty are both over 1 + β₁."""
  own = configs.load('a_star_po').objective
  assert own.kl.coef * (1 + own.advantage.temperature) == pytest.approx(1e-3)

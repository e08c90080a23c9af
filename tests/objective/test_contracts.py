"""Contracts between stages: each declared one refuses other functions, and each side builds with a valid one."""

from __future__ import annotations

import inspect
import pathlib

import pytest
from objective_table import settings

from jaxrl_llm import objective
from jaxrl_llm.config import loading as configs
from jaxrl_llm.config import stages
from jaxrl_llm.learner import inner_steps, spec_from_config
from jaxrl_llm.objective import contracts, method_spec
from jaxrl_llm.runner import setup
from jaxrl_llm.types import UserError

DECLARED = contracts.clauses(method_spec.STAGES)
NAMES = {stage: sorted(stages.choices(module)) for stage, module in method_spec.STAGES.items()}
NAMES['zero_variance'] = ['keep', 'mask']
# What a function cannot be built without, and another beside a credit.
SETTINGS = dict(
  overlong=dict(buffer_tokens=2),
  overlong_where_solved=dict(buffer_tokens=2),
  listwise=dict(max_tokens=4),
  average=dict(decay=0.5),
  on_policy_spans=dict(teacher_prompt_tokens=16, teacher_completion_tokens=16),
  solved_by_group=dict(prompt_tokens=16),
  solved_by_data=dict(prompt_tokens=16),
)
BESIDE = dict(gae='critic', process='outcome', steps='preference', flow='flow')


def spec(stage, name):
  if stage == 'advantage' and name == 'raw':
    return dict(fn=name, baseline=0.5)
  return dict(fn=name, **SETTINGS.get(name, {}))


def partners(choice, fixed=()):
  """`choice`, stage → function, with every stage set that its functions require, but for those that are fixed."""
  chosen, open_stages = dict(choice), list(choice)
  while open_stages:
    stage = open_stages.pop()
    for owner, name, clause in DECLARED:
      if owner == stage and name == chosen[stage] and clause.stage not in fixed:
        if chosen.get(clause.stage) not in clause.allowed:
          chosen[clause.stage] = clause.allowed[0]
          open_stages.append(clause.stage)
  if chosen.get('credit_assignment') in BESIDE:
    chosen['auxiliary_model'] = BESIDE[chosen['credit_assignment']]
  return settings(**{stage: spec(stage, name) for stage, name in chosen.items()})


def test_what_was_silently_another_method_is_refused():
  for choice in (
    dict(trust_region='listwise', ratio='one', advantage='raw', aggregation='token_mean'),
    dict(trust_region='geometric', ratio='sequence'),
    dict(trust_region='gamma', ratio='token'),
    dict(trust_region='shifted_clip', ratio='token'),
    dict(trust_region='taper', ratio='direct', advantage='group_normalized'),
    dict(ratio='sequence', aggregation='token_mean'),
  ):
    with pytest.raises(UserError, match='does not go with'):
      objective.method(settings(**{stage: spec(stage, name) for stage, name in choice.items()}))


@pytest.mark.parametrize('stage, name, clause', DECLARED, ids=lambda x: getattr(x, 'stage', x))
def test_a_contract_refuses_every_other_partner_and_builds_with_each_of_its_own(
  stage, name, clause
):
  assert set(clause.allowed) <= set(NAMES[clause.stage]) and clause.why
  assert set(clause.allowed) != set(NAMES[clause.stage]), 'a contract that allows everything'
  for partner in NAMES[clause.stage]:
    choice = partners({stage: name, clause.stage: partner}, fixed=(stage, clause.stage))
    if partner in clause.allowed:
      objective.method(choice)
    else:
      with pytest.raises(UserError) as error:
        objective.method(choice)
      message = str(error.value)
      assert f'objective.{stage}.fn={name!r}' in message or 'does not go with' in message
    # Alone, the partner has methods of its own.
    objective.method(partners({clause.stage: partner} if clause.stage != 'zero_variance' else {}))


@pytest.mark.parametrize(
  'stage, name', [(s, n) for s, names in NAMES.items() if s != 'zero_variance' for n in names]
)
def test_every_function_of_every_stage_has_partners(stage, name):
  if stage == 'auxiliary_model':
    stage, name = 'credit_assignment', {v: k for k, v in BESIDE.items()}.get(name, 'row')
  objective.method(partners({stage: name}))


def test_a_message_has_the_reason_and_the_flag():
  with pytest.raises(UserError) as error:
    objective.method(settings(trust_region='geometric', aggregation='token_mean'))
  assert str(error.value) == (
    "config.objective.trust_region.fn='geometric' does not go with "
    "config.objective.aggregation.fn='token_mean': it takes the "
    'mean over a row itself; set --config.objective.aggregation.fn=sequence_mean.'
  )


def test_a_setting_is_bounded_as_well():
  choice = dict(ratio='one', trust_region=dict(fn='listwise', max_tokens=4))
  for baseline in (0.0, 1.0):
    with pytest.raises(UserError, match='--config.objective.advantage.baseline=0.5'):
      objective.method(settings(advantage=dict(fn='raw', baseline=baseline), **choice))
  with pytest.raises(UserError, match='advantage.baseline above 0 and below 1'):
    objective.method(settings(advantage='raw', **choice))
  objective.method(settings(advantage=dict(fn='raw', baseline=0.5), **choice))


def test_a_message_names_stages_that_exist():
  for stage, name, clause in DECLARED:
    assert clause.stage in NAMES, (stage, name)
    for key in clause.between:
      assert all(
        key in inspect.signature(stages.choices(method_spec.STAGES[clause.stage])[n]).parameters
        for n in clause.allowed
      )


def test_a_loop_around_the_optimizer_has_contracts_too():
  for ratio, refused in (('token', True), ('sequence', False)):
    optimizer = configs.default().optimizer
    optimizer.outer = dict(fn='last_turn_first')
    own = settings(ratio=ratio)
    if refused:
      with pytest.raises(UserError, match='optimizer.outer.fn=.last_turn_first. does not go with'):
        contracts.check(own, {'outer': inner_steps}, optimizer)
    else:
      contracts.check(own, {'outer': inner_steps}, optimizer)


def test_a_run_is_refused_before_its_model_is_looked_for():
  config = configs.load('configs/methods/gspo.py')
  config.objective.aggregation.fn, config.model = 'token_mean', '/no/such/model'
  with pytest.raises(UserError, match='does not go with'):
    setup.build_context(config)
  config.objective.aggregation.fn = 'sequence_mean'
  with pytest.raises(UserError, match='no/such/model'):
    setup.build_context(config)


@pytest.mark.parametrize(
  'path', sorted(pathlib.Path('configs').rglob('*.py')), ids=lambda p: p.stem
)
def test_every_config_keeps_the_contracts(path):
  spec_from_config.check_objective(configs.load(str(path)))

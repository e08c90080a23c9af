"""The trial of a user's reward function: before the model is loaded, with the line of his file that raised."""

from __future__ import annotations

import json

import pytest
import tiny_job

from jaxrl_llm import rewards
from jaxrl_llm.config import loading, schema, user_code
from jaxrl_llm.runner import setup
from jaxrl_llm.types import Row, UserError

TASK = """import json
import os
import time


def fails(completions, answer, **columns):
  shares = [1 / 0 for _ in completions]
  return shares


def inside_a_library(completions, answer, **columns):
  return [json.loads(text + '{')['reward'] for text in completions]


def on_empty(completions, answer, **columns):
  return [float(text[0] == right[0]) for text, right in zip(completions, answer)]


def slow(completions, answer, **columns):
  time.sleep(60)


def dies(completions, answer, **columns):
  os._exit(3)


def fine(completions, answer, **columns):
  return [1.0 if text == right else 0.0 for text, right in zip(completions, answer)]


def group(completions, answer, **columns):
  return [x / (len(completions) - 2) for x in range(len(completions))]


def not_a_number(completions, answer, **columns):
  return ['much' for _ in completions]
"""
ROW = Row('r0', '2+3=', (), '5', 'sums', {})


@pytest.fixture(scope='module', autouse=True)
def task(tmp_path_factory):
  folder = tmp_path_factory.mktemp('task')
  (folder / 'own_task.py').write_text(TASK)
  with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(folder))
    patch.chdir(folder)
    yield folder


def spec_of(fn: str, **settings) -> dict:
  return dict(fn=f'own_task:{fn}', deadline_s=2.0, workers=2, memory_mb=1024) | settings


def refusal(fn: str, **settings) -> str:
  with pytest.raises(UserError) as caught:
    rewards.check_first_row(spec_of(fn, **settings), ROW)
  return str(caught.value)


def test_a_failing_function_is_named_with_the_line_that_raised():
  message = refusal('fails')
  assert message.startswith("config.rewards.fn='own_task:fails' fails on the first row of the data")
  assert 'ZeroDivisionError: division by zero, at own_task.py:7: shares = [1 / 0 for' in message
  assert message.endswith('; correct the function.') and "the completion '5'" in message


def test_the_line_is_the_users_own_where_a_library_raised():
  message = refusal('inside_a_library')
  assert 'JSONDecodeError: ' in message and ', at own_task.py:12: return [json.loads(' in message


@pytest.mark.parametrize(
  'fn, why', [('dies', 'crash: '), ('not_a_number', "could not convert string to float: 'much'")]
)
def test_a_function_that_ends_its_worker_or_returns_no_number_is_refused(fn, why):
  assert why in refusal(fn)


def test_a_function_of_groups_is_tried_as_a_group():
  assert 'own_task.py:32' in refusal('group', batched='group')


@pytest.mark.parametrize('fn', ['fine', 'on_empty'])
def test_a_function_that_grades_one_of_both_completions_passes(fn):
  rewards.check_first_row(spec_of(fn), ROW)


def test_a_slow_function_is_no_failing_one():
  rewards.check_first_row(spec_of('slow', deadline_s=0.2), ROW)


def test_parts_are_tried_and_shipped_functions_are_not(monkeypatch):
  parts = (dict(fn='own_task:fine', weight=0.5), dict(fn='own_task:fails', name='x'))
  with pytest.raises(UserError, match=r"config.rewards.parts\[1\].fn='own_task:fails' fails on"):
    rewards.check_first_row(dict(fn='exact', parts=parts), ROW)
  monkeypatch.setattr('jaxrl_llm.rewards.first_row.Pool', lambda *_: pytest.fail('a worker'))
  rewards.check_first_row(dict(fn='exact', parts=(dict(fn='number'),)), ROW)


def test_it_runs_before_the_model_is_loaded(task, monkeypatch):
  rows = [dict(question=f'{n}+1=', answer=str(n + 1)) for n in range(9)]
  (task / 'rows.jsonl').write_text('\n'.join(map(json.dumps, rows)))
  data = dict(source='jsonl', path='rows.jsonl', chat=False)
  changes = dict(sft=None, data=data, rewards=dict(fn='own_task:fails'))
  config = loading.load(tiny_job.config_file(task, **changes))
  monkeypatch.setattr('jaxrl_llm.models.load', lambda *_, **__: pytest.fail('loaded'))
  with pytest.raises(UserError, match='own_task.py:7'):
    setup.build_context(schema.typed(config))
  with config.ignore_type():
    config.data.path = 'absent.jsonl'
  with pytest.raises(UserError, match='absent.jsonl'):
    setup.build_context(schema.typed(config))


def test_a_failure_in_a_run_names_the_line_too():
  with rewards.Pool(spec_of('on_empty')) as pool:
    scores = pool.score([ROW, ROW], ['5', ''])
  assert scores.outcome_B.tolist() == [rewards.OK, rewards.ERROR]
  assert scores.message.startswith('IndexError: string index out of range, at own_task.py:16: ')


def test_a_long_message_leaves_room_for_the_line():
  try:
    exec(compile('raise ValueError("x" * 9999)', 'own_task.py', 'exec'), {})
  except ValueError as error:
    assert user_code.location(error).startswith(', at own_task.py:1')
    from jaxrl_llm.rewards import outcomes

    line = outcomes.describe(error).decode()
    assert len(line) <= 400 and ', at own_task.py:1' in line


def test_a_users_stage_that_fails_is_one_sentence(task):
  (task / 'own_utility.py').write_text(
    'def worth(rate, alpha, beta, group, length=1.0):\n  return rate / undefined\n'
  )
  config = loading.load('', ['--config.curriculum.utility.fn=own_utility:worth'])
  from jaxrl_llm import curriculum

  with pytest.raises(UserError) as caught:
    curriculum.Curriculum(config.curriculum, 9, group=4)
  message = str(caught.value)
  assert "config.curriculum.utility.fn='own_utility:worth' fails: NameError: " in message
  assert ', at own_utility.py:2: return rate / undefined; correct the function.' in message

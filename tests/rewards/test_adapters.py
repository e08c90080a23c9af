"""A reward function of each convention, run unchanged on a row of that trainer's format."""

from __future__ import annotations

import numpy as np
import pytest

from jaxrl_llm import rewards
from jaxrl_llm.rewards import adapters, resolve
from jaxrl_llm.types import COLUMNS, Row, UserError

OWN = r"""
import re
seen = {}

# verl: the full signature, and one of its reward_score modules, without data_source.
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
  assert data_source == 'sums' and extra_info['index'] == 3
  return {'score': float(solution_str == ground_truth), 'acc': True}
def gsm8k(solution_str, ground_truth, method='strict'):
  return float(solution_str == ground_truth) if method == 'strict' else -1.0
async def judge(data_source, solution_str, ground_truth, extra_info=None):
  return float(solution_str == ground_truth)

# TRL
def by_column(completions, ground_truth, **kwargs):
  seen.update(kwargs)
  return [1.0 if c == g else 0.0 for c, g in zip(completions, ground_truth, strict=True)]
def chatty(prompts, completions, solution, log_metric=None, **kwargs):
  log_metric('length', 1.0)
  contents = [completion[0]['content'] for completion in completions]
  assert [p[-1]['role'] for p in prompts] == ['user']
  return [float(c == s) for c, s in zip(contents, solution)]
async def either(completions, level, **kwargs):
  return [None if n > 2 else 0.5 for n in level]
def tagged(completions, **kwargs):
  return [float(bool(re.fullmatch(r'<answer>.*</answer>', c))) for c in completions]

# OpenRLHF
class Tensor(list):
  def tolist(self): return list(self)
def reward_func(queries, prompts, labels):
  assert len(queries) == len(prompts) == len(labels) == 1 and queries[0].startswith(prompts[0])
  rewards = Tensor(float(q[len(p):] == l) for q, p, l in zip(queries, prompts, labels))
  return {'rewards': rewards, 'scores': rewards, 'extra_logs': {'n': rewards}}

# AReaL
def sums_reward_fn(prompt, completions, prompt_ids, completion_ids, answer, **kwargs):
  assert isinstance(prompt, str) and 'level' in kwargs
  return int(completions == answer)

# slime
async def custom_rm(args, sample, **kwargs):
  assert sample.prompt and sample.metadata == {'rm_type': 'math'}
  return args.scale * (sample.response == str(sample.label))

# reasoning-gym, a bound method
class Dataset:
  def score_answer(self, answer, entry):
    return 1.0 if answer == entry['answer'] and entry['metadata']['source_dataset'] == 'chain_sum' else 0.01
dataset = Dataset()

# verifiers
def correct(completion, answer, info, **kwargs):
  return float(completion[-1]['content'] == answer + info['unit'])

def verl_lists(data_sources, solution_strs, ground_truths, extra_infos):
  assert data_sources == ['sums'] and extra_infos == [{'index': 3}]
  return [float(s == g) for s, g in zip(solution_strs, ground_truths)]
async def sample_lists(args, samples, **kwargs):
  return [args.scale * (sample.response == sample.label) for sample in samples]

def group_rm(args, samples): return [0.0] * len(samples)
def wants_ids(completions, completion_ids): return [0.0]
def wants_column(completions, unheard_of): return [0.0]
def positional(q, p, l): return [float(q[0] == p[0] + l[0])]
def two(completions): return [0.0, 1.0]
def nameless(completions): return {'value': 1.0}
def other(text, row): return 1.0
"""
MESSAGES = (dict(role='user', content='What is 3 + 4?'),)


def row(answer='7', messages=False, **extra) -> Row:
  question = '' if messages else MESSAGES[0]['content']
  return Row('id', question, MESSAGES if messages else (), answer, 'sums', extra)


@pytest.fixture(autouse=True)
def own_module(tmp_path, monkeypatch):
  (tmp_path / 'own_styles.py').write_text(OWN)
  monkeypatch.syspath_prepend(str(tmp_path))


def grader(name, **settings):
  return resolve(dict(fn=f'own_styles:{name}', **settings))


RIGHT = [
  ('compute_score', 'verl', {}, row(extra_info=dict(index=3), reward_model=dict(ground_truth='7'))),
  ('gsm8k', 'verl', dict(method='strict'), row()),
  ('judge', 'verl', {}, row()),
  ('by_column', 'trl', {}, row(**{COLUMNS: dict(ground_truth='7')})),
  ('by_column', 'trl', {}, row()),  # the answer, under the parameter's name
  ('chatty', 'trl', {}, row(messages=True, solution='7')),
  ('chatty', 'trl_chat', dict(style='trl_chat'), row(solution='7')),
  ('reward_func', 'openrlhf', {}, row(**{COLUMNS: dict(label='7')})),
  ('reward_func', 'openrlhf', {}, row(messages=True)),
  ('sums_reward_fn', 'areal', {}, row(messages=True, level=1)),
  ('custom_rm', 'slime', dict(scale=1.0), row(metadata=dict(rm_type='math'), **{COLUMNS: dict(label=7)})),
  ('dataset.score_answer', 'gym', {}, row(metadata=dict(source_dataset='chain_sum'))),
  ('correct', 'verifiers', {}, row(messages=True, info=dict(unit=''))),
  ('verl_lists', 'verl_batch', {}, row(extra_info=dict(index=3))),
  ('sample_lists', 'slime_group', dict(batched='group', scale=1.0), row()),
  ('positional', 'openrlhf', dict(style='openrlhf'), row()),
]  # fmt: skip


@pytest.mark.parametrize('name, style, settings, example', RIGHT)
def test_a_function_of_each_convention_runs_as_it_is(name, style, settings, example):
  user_grader = grader(name, **settings)
  assert user_grader.style == style and user_grader.missing_columns(example) == []
  assert user_grader('7', example) == 1.0
  assert user_grader('8', example) == (0.01 if style == 'gym' else 0.0)


def test_columns_are_lists_and_keep_the_names_and_values_of_the_file():
  import own_styles

  example = row('[1, 2]', level=2, **{COLUMNS: dict(ground_truth=[1, 2], data_source='theirs')})
  assert grader('by_column')([1, 2], example) == 1.0
  assert own_styles.seen['level'] == [2] and own_styles.seen['data_source'] == ['theirs']


@pytest.mark.parametrize(
  'name, settings, message',
  [
    ('other', {}, 'has the parameters row, text, which match no known convention'),
    ('other', dict(style='verl'), "cannot take the arguments of the convention 'verl'"),
    ('by_column', dict(style='tlr'), "style='tlr' is unknown; choose one of: areal, gym, openrlhf"),
    ('two', dict(style='slime'), "cannot take the arguments of the convention 'slime'"),
    ('group_rm', {}, 'samples of a group at once'),
    ('wants_ids', {}, "requires 'completion_ids', which graders do not get"),
    ('two', dict(scale=1), "has no parameter 'scale' for the setting scale="),
  ],
)
def test_a_signature_that_does_not_fit_is_refused_before_anything_runs(name, settings, message):
  with pytest.raises(UserError) as error:
    grader(name, **settings)
  assert message in str(error.value) and f"config.rewards.fn='own_styles:{name}'" in str(
    error.value
  )


def test_a_missing_column_is_reported_with_the_columns_of_the_row():
  rows = [row(unheard_of=1), row(level=1)]
  rewards.check_rows([('f', grader('wants_column'))], rows[:1])
  with pytest.raises(
    UserError, match="'f' requires 'unheard_of', .* columns: answer, data_source, level"
  ):
    rewards.check_rows([('f', grader('wants_column')), ('g', resolve(dict(fn='exact')))], rows)


def test_the_ground_truth_is_the_value_whose_text_is_the_answer():
  extra = dict(reward_model=dict(ground_truth=[7]), **{COLUMNS: dict(answer=8, label='x')})
  found = [adapters.ground_truth(row(answer, **extra)) for answer in ('[7]', '8', 'x', '9')]
  assert found == [[7], 8, 'x', '9']


@pytest.mark.parametrize(
  'name, message', [('two', '2 rewards for 1 completion'), ('nameless', 'without any of')]
)
def test_results_that_are_not_one_reward_are_errors(name, message):
  with pytest.raises(ValueError, match=message):
    grader(name)('7', row())


def test_none_skips_the_completion_in_the_pool_and_is_no_failure():
  rows = [row(level=n) for n in (1, 2, 3)]
  part = dict(fn='own_styles:by_column')
  scores = rewards.score(rows, ['7'] * 3, dict(fn='own_styles:either', workers=1, parts=(part,)))
  assert (
    scores.outcome_B.tolist() == [rewards.OK, rewards.OK, rewards.SKIP] and scores.message == ''
  )
  np.testing.assert_array_equal(scores.parts_BxK, [[0.5, 1], [0.5, 1], [0, 0]])
  failures = rewards.FailurePolicy(
    dict(failed=dict(error='score', stop_steps=1, stop_share=0.0, value=-1.0))
  )
  parts_BxK, drop_B = failures.apply(scores)
  assert drop_B.tolist() == [False, False, True] and parts_BxK[2].tolist() == [0, 0]
  failures.observe(scores.outcome_B, scores.message)
  failures.check()
  other = rewards.score(
    rows[2:], ['7'], part | dict(workers=1, parts=(dict(fn='own_styles:either'),))
  )
  assert other.outcome_B.tolist() == [rewards.OK] and other.parts_BxK.tolist() == [[1, 0]]


def test_every_convention_has_a_function_in_the_table():
  assert {style for _, style, *_ in RIGHT} == set(adapters.STYLES)


BATCHED = """
import os
calls = []

def best(prompts, completions, level=None, **kwargs):
  # 1 for the longest completion of the call, None for an empty one.
  if 'die' in completions: os._exit(3)
  if 'nan' in completions: return [float('nan')] * len(completions)
  calls.append((list(prompts), list(completions), level))
  most = max(map(len, completions))
  return [None if not c else float(len(c) == most) for c in completions]

def count(solution_strs, ground_truths, data_sources, extra_infos):
  return [{'score': len(solution_strs)} for _ in solution_strs]

async def group_rm(args, samples):
  return [args.scale * len(samples) for s in samples]

def short(completions, **kwargs): return [1.0]
def alone(solution_str, ground_truth): return 1.0
"""


@pytest.fixture
def batched_module(tmp_path, monkeypatch):
  (tmp_path / 'own_batched.py').write_text(BATCHED)
  monkeypatch.syspath_prepend(str(tmp_path))


def row_of(prompt: str, answer='7', **extra) -> Row:
  return Row(prompt, f'{prompt}?', (), answer, 'sums', extra)


def grade(name, rows, texts, **settings):
  return rewards.score(rows, texts, dict(fn=f'own_batched:{name}', workers=2) | settings)


def test_a_batched_function_gets_a_group_or_all_in_one_call(batched_module):
  rows = [row_of('a'), row_of('a'), row_of('b'), row_of('a'), row_of('b')]  # not side by side
  texts = ['x', 'xxx', 'xx', 'xx', 'xx']
  for kind, want in (('group', [0, 1, 1, 0, 1]), ('step', [0, 1, 0, 0, 0]), ('', [1] * 5)):
    assert grade('best', rows, texts, batched=kind).reward_B.tolist() == want, kind
  for kind, want in (('group', [3, 3, 2, 3, 2]), ('step', [5] * 5)):
    assert grade('count', rows, texts, batched=kind).reward_B.tolist() == want
  scores = grade('group_rm', rows, texts, batched='group', scale=0.5)
  assert scores.reward_B.tolist() == [1.5, 1.5, 1, 1.5, 1]
  assert grade('best', [], [], batched='group').reward_B.shape == (0,)


def test_a_batched_function_gets_its_arguments_in_the_order_of_the_completions(batched_module):
  import own_batched

  user_grader = resolve(dict(fn='own_batched:best', batched='step'))
  assert user_grader.score_batch(
    ['x', '', 'xx'], [row_of('a', level=1), row_of('b'), row_of('a', level=3)]
  ) == [
    0,
    None,
    1,
  ]
  assert own_batched.calls == [(['a?', 'b?', 'a?'], ['x', '', 'xx'], [1, None, 3])]


def test_a_failed_call_fails_its_completions_and_no_others(batched_module):
  rows = [row_of(name) for name in 'aabbccd']
  texts = ['x', 'xx', 'die', 'x', 'nan', 'x', '']
  scores = grade('best', rows, texts, batched='group', deadline_s=30.0)
  assert scores.outcome_B.tolist() == [rewards.OK] * 2 + [rewards.CRASH] * 2 + [
    rewards.ERROR
  ] * 2 + [rewards.SKIP]
  assert scores.reward_B.tolist() == [0, 1, 0, 0, 0, 0, 0] and scores.counts['grade/crashes'] == 2
  scores = grade('short', rows[:2], texts[:2], batched='group')
  assert 'returned 1 rewards for 2 completions' in scores.message


def test_batched_parts_stand_beside_others(batched_module):
  rows, texts = [row_of('a'), row_of('a'), row_of('b')], ['7', 'xx', '']
  part = dict(fn='own_batched:best', batched='group')
  scores = rewards.score(rows, texts, dict(fn='number', workers=1, parts=(part,)))
  assert scores.parts_BxK.tolist() == [[1, 0], [0, 1], [0, 0]]  # None of a part adds nothing
  assert scores.outcome_B.tolist() == [rewards.OK] * 3
  other = dict(fn='own_batched:count', batched='step')
  spec = part | dict(workers=1, parts=(dict(fn='number'), other))
  scores = rewards.score(rows, texts, spec)
  assert scores.parts_BxK.tolist() == [[0, 1, 3], [1, 0, 3], [0, 0, 0]]
  assert scores.outcome_B.tolist() == [rewards.OK, rewards.OK, rewards.SKIP]
  scores = rewards.score(
    [row_of('a', answer='blue'), row_of('a')],
    ['7', 'die'],
    dict(fn='number', workers=1, parts=(part,)),
  )
  assert scores.outcome_B.tolist() == [rewards.ERROR, rewards.CRASH]


@pytest.mark.parametrize(
  'name, settings, message',
  [
    ('best', dict(batched=True), "batched=True must be one of: 'group', 'step'"),
    (
      'alone',
      dict(batched='group'),
      "needs a function of lists, and the convention 'verl' has single completions",
    ),
    ('group_rm', {}, "set batched='group' beside it"),
  ],
)
def test_a_function_that_cannot_be_batched_is_refused(batched_module, name, settings, message):
  with pytest.raises(UserError, match=message):
    resolve(dict(fn=f'own_batched:{name}') | settings)

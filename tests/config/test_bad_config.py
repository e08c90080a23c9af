"""Hundreds of broken configurations: each is valid, or refused in one sentence before anything is compiled."""

from __future__ import annotations

import json
import re

import bad_input
import hypothesis
import pytest
import tiers
from hypothesis import strategies as st

from jaxrl_llm.config import loading as configs
from jaxrl_llm.config import stages
from jaxrl_llm.runner import validate
from jaxrl_llm.types import UserError

DEFAULT = configs.default().to_dict()


def _fields(tree: dict, prefix: str = '') -> list[str]:
  return [
    name
    for key, value in tree.items()
    for name in (
      prefix + key,
      *(_fields(value, f'{prefix}{key}.') if isinstance(value, dict) else ()),
    )
  ]


FIELDS = _fields(DEFAULT)
CHOICES = [
  (stage, name) for stage, module in bad_input.STAGES.items() for name in stages.choices(module)
]

VALUES = st.one_of(
  st.sampled_from(
    [None, ..., float('nan'), float('inf'), -float('inf'), -1, 0, 1, -0.5, 0.0, 1.5, 10**30, -(10**30), 1e300]
  ),
  st.sampled_from(['', 'x', 'a\nb', '\x1b[31m', '\u2603', '\ud800', '../../etc/passwd', 'none', '%s {0} {question}']),
  st.sampled_from([True, False, [], (), [1], ['a'], [None], {}, {'a': 1}, {'fn': 'zzz'}, {'fn': 3}, {'fn': 'none'}]),
  st.sampled_from([{'a.b': 1}, {3: 4}, {'': 1}, [[]], (1.0, -1.0), b'x', 'long ' * 50]),
  st.integers(-(2**70), 2**70),
  st.floats(),
  st.text(max_size=8),
)  # fmt: skip
# Where a rule is about two fields, the message may begin with the other one.
BESIDE = {
  'data': ('config.prompt_tokens', 'config.prompts'),
  'evaluation.prompts': ('config.prompts',),
  'mesh': ('config.prompts', 'config.mesh ('),
  'scratch': ('config.scratch',),
  'objective.distillation': ('config.objective.teacher',),
  'objective.auxiliary_model': ('config.objective.credit_assignment',),
  'curriculum.slots_per_prompt': ('config.curriculum.allocation',),
}
REMEDY = re.compile(
  r'must|give|choose|name |did you mean|valid: |set |write |lower|raise |mend|takes: |needs|below|change|add|at most'
)


@st.composite
def mutations(draw) -> tuple[str, object]:
  """(field, value): a field of the default, an unknown one, or a function with one setting changed."""
  kind = draw(st.sampled_from(['field', 'field', 'unknown', 'setting', 'setting', 'setting']))
  if kind == 'field':
    return draw(st.sampled_from(FIELDS)), draw(VALUES)
  if kind == 'unknown':
    return draw(st.sampled_from(FIELDS)) + draw(st.sampled_from(['x', '_', '\u00e9'])), draw(VALUES)
  stage, name = draw(st.sampled_from(CHOICES))
  settings = bad_input.settings_of(stages.choices(bad_input.STAGES[stage])[name])
  bad = draw(st.sampled_from([*(p.name for p in settings), 'stray']))
  needed = {p.name: GOOD[p.annotation] for p in settings if p.default is p.empty}
  value = draw(VALUES.filter(lambda value: value is not ...))
  return stage, {'fn': name, **needed, bad: value}


GOOD = {
  'int': 4,
  'float': 0.5,
  'str': 'x',
  'tuple[int, ...]': (4,),
  'tuple[str, ...]': ('x',),
  'Mapping[str, float]': {'digits/copy': 1.0},
}


@pytest.fixture(autouse=True)
def nothing_is_compiled():
  with bad_input.up_to_compiling():
    yield


def check(field: str, code: int, text: str) -> str:
  """'' for success, or the message, which names the field and a remedy."""
  message = bad_input.sentence(code, text)
  if message:
    beside = next((names for name, names in BESIDE.items() if field.startswith(name)), ())
    assert any(name in message for name in (f'config.{field}', *beside)), message
    assert REMEDY.search(message), message
    assert len(message) < 3000
  return message


@hypothesis.settings(max_examples=100 * tiers.REPEATS, **bad_input.SETTINGS)
@hypothesis.given(mutations())
# Cases that once gave a traceback, a message of several lines, or an error during compilation.
@hypothesis.example(('data.tasks', [1]))
@hypothesis.example(('data.tasks', ['a']))
@hypothesis.example(('data.system', '\ud800'))
@hypothesis.example(('monitoring.trackers', [[]]))
@hypothesis.example(('learner.remat', {'a': 1}))
@hypothesis.example(('objective.auxiliary_model', {'fn': 'critic', 'learning_rate': 'x'}))
@hypothesis.example(('objective.old_policy', {'fn': 'average', 'decay': [1]}))
@hypothesis.example(('replay.reuse', {'fn': 'successes', 'count': 'x'}))
@hypothesis.example(('curriculum.domain_mix', {'fn': 'mix', 'targets': 'x'}))
@hypothesis.example(('curriculum.domain_mix', {'fn': 'mix', 'targets': {'a.b': 1.0}}))
@hypothesis.example(('curriculum.evidence_decay', {'fn': 'reset', 'every': 10**30}))
@hypothesis.example(('curriculum.prior_pooling', {'fn': 'kernel', 'feature': [1]}))
@hypothesis.example(('curriculum.prior_pooling.strength', 1e-311))
@hypothesis.example(('rollout.length_schedule', {'fn': 'cosine', 'low': 1, 'period': 0}))
@hypothesis.example(('rollout.length_schedule', {'fn': 'stairs', 'starts': [], 'caps': []}))
@hypothesis.example(('curriculum.hint', {'fn': 'item_response'}))
def test_a_config_is_valid_or_refused_in_a_sentence(mutation):
  field, value = mutation
  check(field, *bad_input.outcome(bad_input.with_value(bad_input.job(), field, value)))


@pytest.mark.parametrize(
  'field, value, text',
  [
    ('objective.trust_region', dict(fn='clip', low='0.2'), "must be of type float, such as 0.2"),
    ('objective.trust_region', dict(fn='dual_clip', most='3'), "most='3' of 'dual_clip' must be a number."),
    ('objective.trust_region', dict(fn='dual_clip', most=True), 'most=True of '),
    ('objective.trust_region', dict(fn='dual_clip', most=0), 'most=0 of \'dual_clip\' must be a number above 0.'),
    ('objective.trust_region', dict(fn='clip', low=-0.2), "low=-0.2 of 'clip' must be a number of at least 0."),
    ('objective.credit_assignment', dict(fn='gae', trace=1.5), 'trace=1.5 of \'gae\' must be a number from 0 to 1.'),
    ('objective.reward_shaping', dict(fn='overlong', buffer_tokens=4.0), 'of \'overlong\' must be a whole number.'),
    ('rollout.stop', dict(fn='groups', fraction=0.0), 'must be a number above 0 and at most 1.'),
    ('rollout.tree', dict(fn='latr', ages=[1.5]), 'must be a list of whole numbers.'),
    ('rollout.early_exit', dict(fn='marker', text='x', table=1), "table=1 is not a setting of 'marker'"),
    ('rollout.draft', dict(fn='cut'), "config.rollout.draft.fn='cut' is unknown"),
    ('checkpoint.every', 10**30, 'must be below 2**31.'),
    ('temperature', 1e300, 'is no number of float32'),
  ],
)  # fmt: skip
def test_settings_of_functions_have_types_and_ranges(field, value, text):
  message = check(field, *bad_input.outcome(bad_input.with_value(bad_input.job(), field, value)))
  assert text in message


# Values as a shell passes them.
WORDS = st.one_of(
  st.sampled_from(['', 'x', 'nan', '1e999', '-1', '0', '1e3', 'None', '[]', '[1', '{', '{"a": 1}', '(' * 300]),
  st.sampled_from(['__import__("os").system("true")', 'True', 'auto', '9' * 5000, "'", '\\', '=', '--', '\n', '\x00x']),
  st.text(max_size=8),
)  # fmt: skip


@hypothesis.settings(max_examples=30 * tiers.REPEATS, **bad_input.SETTINGS)
@hypothesis.given(
  st.sampled_from(FIELDS), st.sampled_from(['', '', '.fn', '.zzz', 'x', '.', '..a']), WORDS
)
def test_flags_are_valid_or_refused_in_a_sentence(field, more, word):
  flag = f'--config.{field}{more}={word}'
  message = bad_input.sentence(*bad_input.outcome(bad_input.job(), flag))
  assert not message or 'config.' in message and REMEDY.search(message)


@hypothesis.settings(max_examples=30 * tiers.REPEATS, **bad_input.SETTINGS)
@hypothesis.given(st.sampled_from(FIELDS), VALUES)
def test_a_config_built_in_python_is_valid_or_refused_in_a_sentence(field, value):
  config = configs.default()
  *parents, leaf = field.split('.')
  part = config
  for parent in parents:
    part = part[parent]
  try:
    with part.ignore_type():
      if value is ...:
        del part[leaf]
      else:
        part[leaf] = value
  except (ValueError, AttributeError, TypeError):  # not a key of a ConfigDict
    return
  try:
    validate.validate(config)
    json.loads(config.to_json())
  except UserError as error:
    assert '\n' not in str(error) and 'config.' in str(error) and REMEDY.search(str(error))


def test_a_sentence_is_one_printable_line_whatever_the_value():
  text = str(UserError('config.x=a\r\n b\u2028c\x1b[31m\ud800 must\tbe.'))
  assert text == 'config.x=a b c\\x1b[31m\\ud800 must\\tbe.'


@pytest.mark.parametrize(
  'field, fn', [('rewards.truncate', 'outliers'), ('curriculum.labels', 'majority_refined')]
)
def test_completions_are_not_graded_again_without_their_group(field, fn, tmp_path, monkeypatch):
  (tmp_path / 'own_bad.py').write_text('def f(completions, **_): return [1.0] * len(completions)')
  monkeypatch.syspath_prepend(str(tmp_path))

  def message(**settings) -> str:
    job = bad_input.job(rewards=dict(fn='exact', parts=(dict(fn='own_bad:f', **settings),)))
    return bad_input.sentence(*bad_input.outcome(bad_input.with_value(job, f'{field}.fn', fn)))

  assert message(batched='group').startswith(
    f"config.{field}.fn={fn!r} does not go with config.rewards.batched='group': some completions"
  )
  assert message() == ''


def test_rows_without_an_answer_to_judge_by_are_refused_but_for_a_vote(tmp_path):
  path = tmp_path / 'rows.jsonl'
  path.write_text(
    ''.join(json.dumps(dict(question=f'{n} + 1?', answer='blue')) + '\n' for n in range(40))
  )
  data = dict(source='jsonl', path=str(path), tasks=())
  messages = {}
  for vote in ('none', 'majority'):
    own = bad_input.job(rewards=dict(vote=dict(fn=vote), fn='numeric'), data=data)
    messages[vote] = bad_input.sentence(*bad_input.outcome(own))
  assert messages['none'].startswith(
    "config.rewards: 'numeric' can grade none of the rows (the answer of row "
  )
  assert messages['majority'] == ''

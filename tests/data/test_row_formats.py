"""Rows in the formats of other trainers: prompt, answer, source, and all other columns for the reward function."""

from __future__ import annotations

import json

import pytest

from jaxrl_llm import data as package
from jaxrl_llm.config import loading as configs
from jaxrl_llm.data import files, row_formats, sources
from jaxrl_llm.types import COLUMNS, UserError

ASKED = [dict(role='system', content='Be brief.'), dict(role='user', content='What is 3 + 4?')]


def settings(columns=None, **changes) -> dict:
  names = dict(question='', answer='', source='') | (columns or {})
  return dict(columns=names, answers=True, answer_after='') | changes


def read(record, columns=None, **changes):
  return row_formats.to_row(record, 'here', settings(columns, **changes), 'a file')


# (as it is in the file, settings) → question, messages, answer, source, what is in extra.
SHAPES = dict(
  verl=(
    dict(data_source='sums', prompt=ASKED, ability='math', extra_info=dict(split='train', index=0),
         reward_model=dict(style='rule', ground_truth='7')),
    {}, ('', ASKED, '7', 'sums'), dict(ability='math', extra_info=dict(split='train', index=0)),
  ),
  verl_with_a_solution=(
    dict(prompt=ASKED, answer='so 7', reward_model=dict(ground_truth=7)),
    {}, ('', ASKED, '7', 'a file'), {COLUMNS: dict(answer='so 7')},
  ),
  skyrl=(
    dict(data_source='sums', env_class='gsm8k', prompt=ASKED,
         reward_spec=dict(method='rule', ground_truth=7)),
    {}, ('', ASKED, '7', 'sums'), dict(reward_spec=dict(method='rule', ground_truth=7)),
  ),
  trl_text=(
    dict(prompt='What is 3 + 4?', ground_truth='7', level=2),
    {}, ('What is 3 + 4?', [], '7', 'a file'), {'level': 2, COLUMNS: dict(ground_truth='7')},
  ),
  trl_messages=(
    dict(prompt=ASKED, question='What is 3 + 4?', solution='Seven.'),
    {}, ('', ASKED, 'Seven.', 'a file'), dict(question='What is 3 + 4?', solution='Seven.'),
  ),
  verifiers=(
    dict(question='What is 3 + 4?', answer='7', info='{"unit": "none", "steps": [1, 2]}', task='sums'),
    {}, ('What is 3 + 4?', [], '7', 'a file'), dict(info=dict(unit='none', steps=[1, 2]), task='sums'),
  ),
  verifiers_prompt=(
    dict(prompt=ASKED, answer='7', info=dict(unit='none')),
    {}, ('', ASKED, '7', 'a file'), dict(info=dict(unit='none')),
  ),
  openrlhf=(
    dict(input='What is 3 + 4?', label='7', datasource='sums'),
    {}, ('What is 3 + 4?', [], '7', 'sums'), {COLUMNS: dict(label='7')},
  ),
  openrlhf_keys=(
    dict(context='What is 3 + 4?', final='7', origin='sums', input='', label='no'),
    dict(columns=dict(question='context', answer='final', source='origin')),
    ('What is 3 + 4?', [], '7', 'sums'), {'label': 'no', COLUMNS: dict(final='7')},
  ),
  slime=(
    dict(prompt=ASKED, label=7, metadata=dict(rm_type='math')),
    {}, ('', ASKED, '7', 'a file'), {'metadata': dict(rm_type='math'), COLUMNS: dict(label=7)},
  ),
  areal=(
    dict(messages=ASKED[1:], answer='so 3 + 4 = 7\n#### 7'),
    dict(answer_after='####'), ('', ASKED[1:], '7', 'a file'),
    {COLUMNS: dict(answer='so 3 + 4 = 7\n#### 7')},
  ),
  reasoning_gym=(
    dict(question='3 + 4 =', answer='7', metadata=dict(source_dataset='chain_sum', source_index=0)),
    {}, ('3 + 4 =', [], '7', 'chain_sum'), dict(gym=dict(name='chain_sum', settings={}, answer='7')),
  ),
  plain=(dict(question='3 + 4 =', answer=7), {}, ('3 + 4 =', [], '7', 'a file'), {COLUMNS: dict(answer=7)}),
  inside=(
    dict(extra_info=dict(question='3 + 4 =', answer='7'), prompt=ASKED),
    dict(columns=dict(question='extra_info.question', answer='extra_info.answer')),
    ('3 + 4 =', [], '7', 'a file'), dict(prompt=ASKED),
  ),
)  # fmt: skip


@pytest.mark.parametrize('name', SHAPES)
def test_a_row_of_each_shape_is_read_as_it_is(name):
  given, changes, (question, messages, answer, source), extra = SHAPES[name]
  before = json.dumps(given)
  row = read(given, **changes)
  assert row[1:5] == (question, tuple(messages), answer, source)
  assert {key: row.extra[key] for key in extra} == extra
  assert json.dumps(given) == before
  # Of every column, either a field of the row says what it says, or extra does.
  columns = row.extra | row.extra.get(COLUMNS, {})
  in_row = dict(
    prompt=messages or question,
    question=question,
    messages=messages,
    answer=answer,
    data_source=source,
  )
  in_row |= dict(input=question, datasource=source, context=question)
  for column, value in given.items():
    if column != 'info':
      assert value == columns.get(column) or value in ('', in_row.get(column)), column


def test_answers_are_no_trait_of_a_kind():
  rows = [read(dict(question='q', label=n)) for n in (1, 2)]
  assert package.kinds(rows).tolist() == [0, 0]


def test_messages_of_a_table_lose_the_fields_that_only_others_have():
  row = read(dict(prompt=[dict(role='user', content='q', name=None)], answer='a'))
  assert row.messages == (dict(role='user', content='q'),)


def test_rows_without_an_answer_are_for_graders_that_need_none():
  with pytest.raises(UserError, match='here has no answer; .* set config.data.answers=False'):
    read(dict(prompt='q'))
  assert read(dict(prompt='q'), answers=False).answer == ''


@pytest.mark.parametrize(
  'record, columns, message',
  [
    (dict(q='x', answer='a'), {}, 'or name its column in config.data.columns.question'),
    (dict(q='x', answer='a'), dict(question='Q'), "no column 'Q'; correct config.data.columns.question"),
    (dict(question='x', answer='a'), dict(answer='z'), "no answer under 'z' (config.data.columns.answer)"),
    (dict(question='x', answer='a'), dict(source='s'), "no column 's'; correct config.data.columns.source"),
    (dict(question='x', answer='a', info='{"a": "\\ud800"}'), {}, "here: 'info' is no Unicode text"),
  ],
)  # fmt: skip
def test_what_is_missing_is_told_with_the_field_that_mends_it(record, columns, message):
  with pytest.raises(UserError) as error:
    read(record, columns)
  assert message in str(error.value)


def lines(path, rows) -> str:
  path.write_text('\n'.join(map(json.dumps, rows)))
  return str(path)


def numbered(name, count):
  return [dict(question=f'{name}{i}', answer=str(i)) for i in range(count)]


def of_files(*entries, held_out=0, **changes):
  data = configs.default().data
  data.update(dict(source='files', files=entries) | changes)
  return sources.files(data, held_out)


def test_one_file_is_what_jsonl_reads(tmp_path):
  path = lines(tmp_path / 'jsonl.jsonl', numbered('q', 30))
  for changes in (dict(), dict(size=7), dict(eval_path=lines(tmp_path / 'b', numbered('q', 3)))):
    data = configs.default().data
    data.update(dict(source='jsonl', path=path) | changes)
    ours = of_files(dict(path=path, source='jsonl'), held_out=5, **changes)
    theirs = sources.jsonl(data, 5)
    assert ours[0] == theirs[0] and [r.question for r in ours[1]] == [r.question for r in theirs[1]]


def test_parquet_holds_the_rows_that_json_lines_hold(tmp_path):
  pa, parquet = pytest.importorskip('pyarrow'), pytest.importorskip('pyarrow.parquet')
  rows = [SHAPES['verl'][0], SHAPES['verl'][0] | dict(data_source='others')]
  parquet.write_table(pa.Table.from_pylist(rows), tmp_path / 'a.parquet')
  path = lines(tmp_path / 'a.jsonl', rows)
  assert files.read(str(tmp_path / 'a.parquet'), 'f') == files.read(path, 'f')
  (tmp_path / 'b.parquet').write_bytes(b'PAR1 no table')
  with pytest.raises(UserError, match='cannot be read as Parquet'):
    files.read(str(tmp_path / 'b.parquet'), 'f')
  parquet.write_table(pa.Table.from_pylist([dict(question='q')]), tmp_path / 'c.parquet')
  with pytest.raises(UserError, match='row 1 has no answer'):
    files.read(str(tmp_path / 'c.parquet'), 'f')


def test_a_saved_data_set_and_its_splits(tmp_path):
  datasets = pytest.importorskip('datasets')
  one = datasets.Dataset.from_list(numbered('q', 3))
  one.save_to_disk(tmp_path / 'one')
  datasets.DatasetDict(train=one, test=one.select([1])).save_to_disk(tmp_path / 'two')

  def read_questions(path, **selection):
    return [row.question for row in files.read(str(tmp_path / path), 'f', **selection)]

  assert read_questions('one') == read_questions('two') == ['q0', 'q1', 'q2']
  assert read_questions('two', split='test') == ['q1']
  with pytest.raises(UserError, match="has no split 'dev'; choose of: test, train"):
    read_questions('two', split='dev')


def test_a_name_on_the_hub_is_fetched_and_nothing_is_said_of_trust(monkeypatch):
  datasets = pytest.importorskip('datasets')
  calls = []

  def load_dataset(*args, **kwargs):
    calls.append((args, kwargs))
    return numbered('q', 2)

  monkeypatch.setattr(datasets, 'load_dataset', load_dataset)
  assert len(files.read('hub:some/sums', 'f', split='test', subset='main')) == 2
  assert calls == [(('some/sums', 'main'), dict(split='test'))]
  monkeypatch.setattr(datasets, '__version__', '3.6.0')
  with pytest.raises(UserError, match='needs datasets 4 or later'):
    files.read('hub:some/sums', 'f')


def test_packages_that_are_missing_are_named_with_the_extra(tmp_path, monkeypatch):
  monkeypatch.setitem(__import__('sys').modules, 'pyarrow', None)
  monkeypatch.setitem(__import__('sys').modules, 'datasets', None)
  for path in ('a.parquet', 'hub:a/b'):
    with pytest.raises(
      UserError, match=r"needs (pyarrow|datasets); .*pip install -e '[^']*\[data\]'"
    ):
      files.read(path, 'f')


def test_several_files_by_weight_without_a_row_twice(tmp_path):
  a, b = (
    lines(tmp_path / 'a.jsonl', numbered('a', 100)),
    lines(tmp_path / 'b.jsonl', numbered('b', 20)),
  )
  count = lambda rows: {name: sum(r.source == name for r in rows) for name in ('a', 'b', 'c')}  # noqa: E731
  plain, _ = of_files(dict(path=a), dict(path=b))
  assert count(plain) == dict(a=100, b=20, c=0)
  weighted, held_out = of_files(dict(path=a, weight=3), dict(path=b, weight=1.0), held_out=0)
  assert count(weighted) == dict(a=60, b=20, c=0)
  small, _ = of_files(dict(path=a, weight=3), dict(path=b), size=8)
  assert count(small) == dict(a=6, b=2, c=0)
  named, held_out = of_files(
    dict(path=a, source='c', weight=1.0), dict(path=b, weight=0.0), held_out=10
  )
  assert count(named)['b'] == 0 < count(named)['c'] and len(held_out) == 10
  assert not {r.question for r in named} & {r.question for r in held_out}
  again, _ = of_files(dict(path=a), dict(path=a), held_out=10)
  assert len(again) == 90


@pytest.mark.parametrize(
  'entries, message',
  [
    ((), 'config.data.files, which is empty'),
    (('a',), r"config.data.files\[0\]='a' must be a dict with a path"),
    ((dict(path='a', wieght=1),), r'config.data.files\[0\].wieght is unknown; did you mean weight'),
    ((dict(path='a', weight=-1),), r'config.data.files\[0\].weight=-1 must be a number'),
    ((dict(path='a', split=1),), r'config.data.files\[0\].split=1 must be text'),
    ((dict(path='missing'),), r"config.data.files\[0\].path='missing' is no file"),
  ],
)
def test_bad_entries_are_told(entries, message):
  with pytest.raises(UserError, match=message):
    of_files(*entries)

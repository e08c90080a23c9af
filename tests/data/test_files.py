"""JSON-lines rows under every accepted column name, and errors with the number of the line."""

from __future__ import annotations

import json

import pytest

from jaxrl_llm.data import files
from jaxrl_llm.types import COLUMNS, UserError


def read(tmp_path, *lines) -> list:
  path = tmp_path / 'rows.jsonl'
  path.write_bytes(b'\n'.join(x if isinstance(x, bytes) else json.dumps(x).encode() for x in lines))
  return files.read(str(path), 'config.data.path')


MESSAGES = [dict(role='user', content='two plus two')]
TRUTH = dict(style='rule', ground_truth='4')


@pytest.mark.parametrize(
  'record, question, messages, answer, source, extra',
  [
    (dict(question='q', answer='4'), 'q', (), '4', 'jsonl', {}),
    (dict(prompt='q', answer=4), 'q', (), '4', 'jsonl', {COLUMNS: dict(answer=4)}),
    (dict(prompt=MESSAGES, answer='4'), '', tuple(MESSAGES), '4', 'jsonl', {}),
    (dict(prompt=MESSAGES, reward_model=TRUTH, data_source='gsm8k', extra_info=dict(index=1)),
     '', tuple(MESSAGES), '4', 'gsm8k', dict(reward_model=TRUTH, extra_info=dict(index=1))),
    (dict(question='q', prompt='p', answer='4', level=2), 'q', (), '4', 'jsonl',
     dict(prompt='p', level=2)),
    (dict(question='q', answer=0), 'q', (), '0', 'jsonl', {COLUMNS: dict(answer=0)}),
    (dict(question='q', reward_model=dict(ground_truth=[1, 2])), 'q', (), '[1, 2]', 'jsonl',
     dict(reward_model=dict(ground_truth=[1, 2]))),
    (dict(question='q', answer=None, reward_model=TRUTH), 'q', (), '4', 'jsonl',
     dict(reward_model=TRUTH)),
  ],
)  # fmt: skip
def test_accepted_names(tmp_path, record, question, messages, answer, source, extra):
  (row,) = read(tmp_path, record)
  assert row[1:] == (question, messages, answer, source, extra)


GOOD = dict(question='q', answer='a')


@pytest.mark.parametrize(
  'line, message',
  [
    (b'{"question": "q", ', 'line 3 is not JSON'),
    (b'[' * 100_000, 'line 3 is not JSON'),
    ([1, 2], 'line 3 is no JSON object but a list'),
    (dict(question='q'), "line 3 has no answer; give 'answer' or 'reward_model'"),
    (dict(question='q', answer=' '), 'line 3 has no answer'),
    (dict(question='q', reward_model=dict(style='rule')), 'line 3 has no answer'),
    (dict(answer='a'), "line 3 has no prompt; give 'question' or 'prompt'"),
    (dict(question=7, answer='a'), "line 3: 'question' must be text or a list of messages"),
    (dict(prompt=[], answer='a'), "line 3: 'prompt' must be text or a list of messages"),
    (dict(prompt=[dict(role='user')], answer='a'), "line 3: 'prompt' needs text under 'role'"),
    (dict(prompt=['hello'], answer='a'), "line 3: 'prompt' needs text under 'role'"),
  ],
)
def test_bad_lines_are_told_with_their_number(tmp_path, line, message):
  with pytest.raises(UserError) as error:
    read(tmp_path, GOOD, b'', line)
  assert str(error.value).startswith('config.data.path=') and message in str(error.value)


def test_bad_files_are_told(tmp_path):
  (tmp_path / 'empty').write_text('\n \n')
  (tmp_path / 'latin').write_bytes(b'{"question": "caf\xe9", "answer": "a"}')
  for path, message in [
    ('', 'config.data.path is empty; name a JSON-lines or Parquet file.'),
    (str(tmp_path / 'missing'), 'is no file; give the path'),
    (str(tmp_path), 'is no file; give the path'),
    (str(tmp_path / 'empty'), 'holds no row'),
    (str(tmp_path / 'latin'), 'is no UTF-8 text'),
  ]:
    with pytest.raises(UserError, match=message):
      files.read(path, 'config.data.path')


def test_repeated_rows_are_dropped_and_told(tmp_path, caplog):
  other = dict(question='q', answer='b')
  assert len(read(tmp_path, GOOD, other, GOOD | dict(note=1))) == 2
  assert '1 repeated rows were dropped' in caplog.text


def test_line_separators_within_text_end_no_line(tmp_path):
  line = json.dumps(dict(question='a\u2028b', answer='\x85'), ensure_ascii=False).encode()
  line = line.replace(b'"\xc2\x85"', b'"x\xc2\x85"')
  (row,) = read(tmp_path, b'\xef\xbb\xbf' + line)  # a byte-order mark, too
  assert (row.question, row.answer) == ('a\u2028b', 'x\x85')

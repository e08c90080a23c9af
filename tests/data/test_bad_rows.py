"""Arbitrary JSON lines: rows become encoded prompts, or a UserError names file, line and field."""

from __future__ import annotations

import gzip
import json
import pathlib
import re
import tempfile

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxrl_llm import data
from jaxrl_llm.config import loading as configs
from jaxrl_llm.models import tokenizer
from jaxrl_llm.types import UserError

SETTINGS = dict(
  derandomize=True, deadline=None, database=None, print_blob=False,
  suppress_health_check=list(hypothesis.HealthCheck),
)  # fmt: skip
GOOD = dict(question='q', answer='a')
TOKENIZER = tokenizer.characters('abcdefghijklmnopqrstuvwxyz')

TEXT = st.text(st.characters(), max_size=6) | st.sampled_from(
  ['', ' ', 'q', '\x00', '\ud800', '\u2028', 'a' * 100, '{question}', '<end>', '\ufeff']
)
SCALAR = (
  st.none() | st.booleans() | st.integers(-(10**40), 10**40) | st.floats() | TEXT | st.just(10**400)
)
VALUE = st.recursive(
  SCALAR,
  lambda below: st.lists(below, max_size=3) | st.dictionaries(TEXT, below, max_size=3),
  max_leaves=6,
)
MESSAGE = st.fixed_dictionaries({}, optional=dict(role=VALUE, content=VALUE, more=VALUE)) | VALUE
KEYS = [
  'question', 'prompt', 'answer', 'data_source', 'reward_model', 'metadata', 'level', 'solution',
  'logprobs', 'extra_info', 'id',
]  # fmt: skip
ROW = st.dictionaries(st.sampled_from(KEYS) | TEXT, VALUE | st.lists(MESSAGE, max_size=2)) | VALUE


def outcome(*lines: bytes, chat: bool = True, end: bytes = b'\n') -> tuple[data.Tables | None, str]:
  """Returns (tables, '') or (None, error message) for a file of these lines."""
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder, 'rows.jsonl')
    path.write_bytes(end.join(lines))
    return loaded(path, chat)


def loaded(path: pathlib.Path, chat: bool = True) -> tuple[data.Tables | None, str]:
  config = configs.load('', ['--config.data.source=jsonl', f'--config.data.path={path}'])
  config.data.chat = chat
  try:
    tables = data.load(config, TOKENIZER)
  except UserError as error:
    message = str(error)
    assert '\n' not in message and message.endswith('.') and 'config.' in message, message
    assert re.search(
      'give|write|correct|convert|raise|name |set |unpack|see |flatten|needs|must|choose|change',
      message,
    )
    return None, message.replace(str(path), 'rows.jsonl')
  for table in (tables.train, tables.held_out):
    data.kinds(table.rows, table.file_tokens_N)
    columns = data.Columns(table.rows, table.file_tokens_N)
    assert all(len(columns[name]) == len(table) for name in columns)
    assert all(isinstance(row.answer, str) and row.answer.strip() for row in table.rows)
    assert json.dumps([row._asdict() for row in table.rows])
  assert all(0 < len(ids) <= config.prompt_tokens for ids in tables.train.tokens)
  assert tables.train.prompts(np.arange(len(tables.train))).tokens_PxL.dtype == np.int32
  return tables, ''


def line(row) -> bytes:
  return json.dumps(row).encode()


@hypothesis.settings(max_examples=300, **SETTINGS)
@hypothesis.given(ROW, st.booleans())
# What this test found at first.
@hypothesis.example(GOOD | dict(question='\ud800'), False)
@hypothesis.example(GOOD | dict(solution=['x', {'\udfff': 1}]), False)
@hypothesis.example(GOOD | dict(metadata='x'), False)
@hypothesis.example(GOOD | dict(metadata=[1]), False)
def test_any_json_is_a_row_or_told_with_its_line(row, chat):
  tables, message = outcome(line(GOOD), b'', line(row), chat=chat)
  about_all = ('prompt_tokens', 'config.data.chat', 'config.data.template', 'chat template')
  assert tables is not None or 'line 3' in message or any(name in message for name in about_all), (
    message
  )
  if tables is not None:
    assert len(tables.train) + tables.train.dropped <= 2


@hypothesis.settings(max_examples=100, **SETTINGS)
@hypothesis.given(st.integers(0, 60), st.binary(max_size=12))
def test_any_bytes_are_a_row_or_told_with_their_line(cut, more):
  whole = line(GOOD | dict(level=3, prompt='p'))
  tables, message = outcome(line(GOOD), whole[:cut] + more)
  assert tables is not None or re.search(r'rows.jsonl.*line [2-9]', message), message


@pytest.mark.parametrize(
  'lines, text',
  [
    ([line(GOOD)[:-5]], "config.data.path='rows.jsonl', line 1 is not JSON"),
    ([line(GOOD), b'\xff{}'], 'line 2 is no UTF-8 text'),
    ([line(GOOD), b'\x00' * 8], 'line 2 is not JSON'),
    ([line(GOOD), b'{"question": "q", "answer": ' + b'9' * 5000 + b'}'], 'line 2 is not JSON'),
    ([line(GOOD), line(GOOD | dict(question='\ud800'))], "line 2: 'question' is no Unicode text"),
    ([line(GOOD), line({'\ud800': 1})], 'line 2: '),
    ([line(GOOD | dict(level=json.loads('[' * 60 + ']' * 60)))], "line 1: 'level' is nested more than 50"),
    ([b''], 'holds no row'),
    ([gzip.compress(line(GOOD))], "config.data.path='rows.jsonl' is a compressed file; unpack it."),
    ([b'PK\x03\x04' + b'\x00' * 40], 'is a compressed file'),
    ([bytes(range(256)) * 3], 'is no UTF-8 text'),
  ],
)  # fmt: skip
def test_what_is_wrong_is_told_with_file_line_and_field(lines, text):
  assert text in outcome(*lines)[1]


def test_ends_of_lines_marks_and_repetitions(tmp_path):
  """Windows line ends, a byte-order mark, a last line without an end, and repeated rows."""
  rows = [GOOD, GOOD | dict(question='r', id=1), GOOD | dict(question='s', id=1), GOOD]
  tables, message = outcome(b'\xef\xbb\xbf' + line(rows[0]), *map(line, rows[1:]), end=b'\r\n')
  assert not message and sorted(row.question for row in tables.train.rows) == ['q', 'r', 's']
  assert loaded(tmp_path)[1].startswith('config.data.path=') and 'is no file' in loaded(tmp_path)[1]

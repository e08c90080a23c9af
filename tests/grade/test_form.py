"""Graders of the form of a reply: what the table of pairs cannot say."""

from __future__ import annotations

import http.server
import json
import threading

import pytest

from jaxrl_llm import grade
from jaxrl_llm.grade import ERROR, OK, TIMEOUT, form
from jaxrl_llm.types import Row, UserError


def row(**extra) -> Row:
  return Row('id', 'question', (), '', 'source', extra)


def test_an_expression_that_never_ends_is_a_time_out_of_its_reply_alone():
  spec = dict(fn='pattern', regex='(a+)+b', workers=1, cpu_s=0.5, deadline_s=60.0)
  scores = grade.score([row()] * 3, ['aab', 'a' * 60, 'ba'], spec)
  assert scores.outcome_B.tolist() == [OK, TIMEOUT, OK] and scores.reward_B.tolist() == [1, 0, 0]


def test_nothing_that_a_schema_refers_to_is_fetched():
  asked = []

  class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
      asked.append(self.path)
      self.send_response(200)
      self.end_headers()
      self.wfile.write(b'{"type": "integer"}')

    def log_message(self, *_):
      pass

  with http.server.HTTPServer(('127.0.0.1', 0), Handler) as server:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    schema = {'properties': {'a': {'$ref': f'http://127.0.0.1:{server.server_port}/int.json'}}}
    with pytest.raises(Exception, match='int.json'):
      form.json_schema('{"a": 1}', row(schema=schema))
    server.shutdown()
  assert asked == []


def test_the_schema_of_a_file_or_of_the_row_and_none_is_an_error(tmp_path):
  path = tmp_path / 'schema.json'
  path.write_text(json.dumps(dict(type='integer')))
  spec = dict(fn='json_schema', schema=str(path), workers=1)
  assert grade.score([row()] * 2, ['1', '"a"'], spec).reward_B.tolist() == [1, 0]
  rows = [row(), row(schema=dict(type=7)), row(schema='{'), row(schema=dict(type='string'))]
  scores = grade.score(rows, ['"a"'] * 4, dict(fn='json_schema', workers=1))
  assert scores.outcome_B.tolist() == [ERROR, ERROR, ERROR, OK] and scores.reward_B[3] == 1
  assert scores.message == 'ValueError: row id holds no schema'


def test_without_jsonschema_the_extra_is_named(monkeypatch):
  monkeypatch.setattr('importlib.util.find_spec', lambda name: None)
  with pytest.raises(UserError, match=r"pip install 'jaxrl_llm\[json\]'"):
    grade.Pool(dict(fn='json_schema'))


def test_repetition_is_a_part_with_a_negative_weight():
  spec = dict(fn='exact', parts=(dict(fn='repetition', n=1, weight=-0.5),), workers=1)
  given = row()._replace(answer='no no')
  scores = grade.score([given] * 2, ['no no', 'no way'], spec)
  assert (scores.parts_BxK @ grade.weights(spec)).tolist() == [0.75, 0.0]

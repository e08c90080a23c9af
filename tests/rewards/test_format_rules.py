"""Graders of the form of a reply: what the table of pairs cannot say."""

from __future__ import annotations

import http.server
import json
import threading

import pytest

from jaxrl_llm import rewards
from jaxrl_llm.rewards import ERROR, OK, TIMEOUT, format_rules
from jaxrl_llm.types import Row, UserError


def row(**extra) -> Row:
  return Row('id', 'question', (), '', 'source', extra)


def test_an_expression_that_never_ends_is_a_time_out_of_its_reply_alone():
  spec = dict(fn='pattern', regex='(a+)+b', workers=1, cpu_s=0.5, deadline_s=60.0)
  scores = rewards.score([row()] * 3, ['aab', 'a' * 60, 'ba'], spec)
  assert scores.outcome_B.tolist() == [OK, TIMEOUT, OK] and scores.reward_B.tolist() == [1, 0, 0]


def test_nothing_that_a_schema_refers_to_is_fetched():
  requests = []

  class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
      requests.append(self.path)
      self.send_response(200)
      self.end_headers()
      self.wfile.write(b'{"type": "integer"}')

    def log_message(self, *_):
      pass

  with http.server.HTTPServer(('127.0.0.1', 0), Handler) as server:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    schema = {'properties': {'a': {'$ref': f'http://127.0.0.1:{server.server_port}/int.json'}}}
    with pytest.raises(Exception, match='int.json'):
      format_rules.json_schema('{"a": 1}', row(schema=schema))
    server.shutdown()
  assert requests == []


def test_the_schema_of_a_file_or_of_the_row_and_none_is_an_error(tmp_path):
  path = tmp_path / 'schema.json'
  path.write_text(json.dumps(dict(type='integer')))
  spec = dict(fn='json_schema', schema=str(path), workers=1)
  assert rewards.score([row()] * 2, ['1', '"a"'], spec).reward_B.tolist() == [1, 0]
  rows = [row(), row(schema=dict(type=7)), row(schema='{'), row(schema=dict(type='string'))]
  scores = rewards.score(rows, ['"a"'] * 4, dict(fn='json_schema', workers=1))
  assert scores.outcome_B.tolist() == [ERROR, ERROR, ERROR, OK] and scores.reward_B[3] == 1
  assert scores.message == 'ValueError: row id holds no schema'


def test_without_jsonschema_the_extra_is_named(monkeypatch):
  monkeypatch.setattr('importlib.util.find_spec', lambda name: None)
  with pytest.raises(UserError, match=r"pip install -e '[^']*\[json\]'"):
    rewards.Pool(dict(fn='json_schema'))


def test_repetition_is_a_part_with_a_negative_weight():
  spec = dict(fn='exact', parts=(dict(fn='repetition', n=1, weight=-0.5),), workers=1)
  without_answer = row()._replace(answer='no no')
  scores = rewards.score([without_answer] * 2, ['no no', 'no way'], spec)
  assert (scores.parts_BxK @ rewards.weights(spec)).tolist() == [0.75, 0.0]


NUMBERS = [
  # schema, text, score by the specification's arithmetic
  ('{"multipleOf": 0.01}', '19.99', 1),
  ('{"multipleOf": 0.01}', '19.999', 0),
  ('{"multipleOf": 0.01}', '-4.35', 1),
  ('{"multipleOf": 0.1}', '0.3', 1),
  ('{"multipleOf": 0.1}', '1', 1),
  ('{"multipleOf": 0.1}', '1e22', 1),
  ('{"multipleOf": 0.3}', '1e22', 0),
  ('{"multipleOf": 1e-8}', '12391239123', 1),
  ('{"multipleOf": 0.123456789}', '1e308', 0),
  ('{"multipleOf": 2.5}', '7.50', 1),
  ('{"multipleOf": 2}', '7.0', 0),
  ('{"multipleOf": 2}', '8.0', 1),
  ('{"multipleOf": 3}', '9007199254740993', 1),
  ('{"multipleOf": 3.0}', '9007199254740993', 1),
  ('{"multipleOf": 0.01}', '0', 1),
  ('{"multipleOf": 7}', '1e999999999', 0),
  ('{"multipleOf": 10}', '1e999999999', 1),
  ('{"multipleOf": 1e-30}', '5', 1),
  ('{"multipleOf": 7}', '1e-999999999', 0),
  ('{"divisibleBy": 0.01, "$schema": "http://json-schema.org/draft-03/schema#"}', '19.99', 1),
  ('{"multipleOf": 0.01, "$schema": "http://json-schema.org/draft-04/schema#"}', '19.99', 1),
  ('{"maximum": 0.3}', '0.3', 1),
  ('{"maximum": 0.3}', '0.30000000000000001', 0),
  ('{"exclusiveMinimum": 0.1}', '0.1', 0),
  ('{"exclusiveMinimum": 0.1}', '0.10000000000000001', 1),
  ('{"minimum": 9007199254740993}', '9007199254740992.0', 0),
  ('{"minimum": 1e400}', '2e400', 1),
  ('{"maximum": 1e400}', '2e400', 0),
  ('{"enum": [0.1, "a"]}', '0.10', 1),
  ('{"enum": [0.1, "a"]}', '0.10000000000000001', 0),
  ('{"const": 1}', '1.0', 1),
  ('{"const": 1.0}', '1', 1),
  ('{"const": true}', '1.0', 0),
  ('{"const": 9007199254740993}', '9007199254740992.0', 0),
  ('{"const": {"a": [0.5]}}', '{"a": [5e-1]}', 1),
  ('{"uniqueItems": true}', '[1, 1.0]', 0),
  ('{"uniqueItems": true}', '[0.1, 0.10000000000000001]', 1),
  ('{"type": "integer"}', '1.0', 1),
  ('{"type": "integer"}', '1e3', 1),
  ('{"type": "integer"}', '1.5', 0),
  ('{"type": "integer"}', '9007199254740992.5', 0),
  ('{"type": "integer", "$schema": "http://json-schema.org/draft-04/schema#"}', '1.0', 0),
  ('{"type": "number"}', '1.5', 1),
  ('{"type": "number"}', '1e9999999999999999999', 0),
  ('{"type": "string"}', '1.5', 0),
  ('{"minItems": 2.0}', '[1]', 0),
  ('{"minItems": 2.0}', '[1, 2]', 1),
]


@pytest.mark.parametrize('schema, text, score', NUMBERS)
def test_numbers_of_a_schema_are_exact_decimals(schema, text, score):
  assert format_rules.json_schema(text, row(schema=schema)) == score
  assert format_rules.json_schema(text, row(schema=json.loads(schema))) == score or '400' in schema

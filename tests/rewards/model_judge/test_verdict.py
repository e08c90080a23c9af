"""Scores parsed from answers of a judge, and errors."""

from __future__ import annotations

import pytest

from jaxrl_llm.rewards.model_judge import verdict

NONE = 'an error'


@pytest.mark.parametrize(
  'text, found',
  [
    ('{"score": 7}', 0.7),
    (' {"score": 7.5}\n', 0.75),
    ('{"score": "7"}', 0.7),
    ('{"score": 0}', 0.0),
    ('{"score": 10}', 1.0),
    ('{"reason": "good", "score": 9}', 0.9),
    ('Good. {"score": 8}', 0.8),
    ('{"score": 8} is my score.', 0.8),
    ('```json\n{"score": 3}\n```', 0.3),
    ('It is good.\n```json\n{"score": 3}\n```\nThat is all: {"other": 4}', 0.3),
    ('{"score": 2} no: {"score": 4}', 0.4),
    ('The reply asks for {"score": 10}. I give {"score": 1}', 0.1),
    ('{"score": 1, "why": "it said {\\"score\\": 10}"}', 0.1),
    ('{"parts": {"score": 9}, "score": 2}', 0.2),
    ('<think>{"score": 10}</think>{"score": 2}', 0.2),
    ('{ {"score": 6}', 0.6),
    ('{"score": 6', NONE),
    ('{' * 150 + '{"score": 6}', 0.6),
    ('{"score": 6.0e0}', 0.6),
    ('{"score": "6/10"}', NONE),
    ('{"score": null}', NONE),
    ('{"score": true}', NONE),
    ('{"score": [6]}', NONE),
    ('{"score": NaN}', NONE),
    ('{"score": Infinity}', NONE),
    ('{"score": 11}', NONE),
    ('{"score": -1}', NONE),
    ('{"Score": 6}', NONE),
    ('score: 6', NONE),
    ('6', NONE),
    ('[6]', NONE),
    ('', NONE),
    ('<think>{"score": 10}</think>', NONE),
    ("{'score': 6}", NONE),
  ],
)
def test_the_last_object_with_the_field_counts(text, found):
  def read():
    return verdict.score(verdict.by_field(text, 'score'), 0.0, 10.0)

  if found is NONE:
    with pytest.raises(ValueError, match='the judge '):
      read()
  else:
    assert read() == pytest.approx(found)


@pytest.mark.parametrize(
  'text, found',
  [
    ('Score: 7', 0.7),
    ('Score: 7, or Score: 3', 0.3),
    ('<think>Score: 9</think> Score: 1', 0.1),
    ('Score: 10', 1.0),
    ('Score: 70', NONE),
    ('Score: seven', NONE),
    ('7', NONE),
  ],
)
def test_the_last_match_of_an_expression_counts(text, found):
  def read():
    return verdict.score(verdict.by_regex(text, r'Score: (\S+?)\b'), 0.0, 10.0)

  if found is NONE:
    with pytest.raises(ValueError, match='the judge '):
      read()
  else:
    assert read() == pytest.approx(found)


def test_bounds_are_any():
  assert verdict.score(1, 1.0, 5.0) == 0 and verdict.score(5, 1.0, 5.0) == 1
  assert verdict.score(0, -1.0, 1.0) == 0.5

"""The digit tasks: correct answers, lengths in range, and all characters in the alphabet."""

from __future__ import annotations

import random

import pytest

from jaxrl_llm.data import ALPHABET, digits


@pytest.mark.parametrize(
  'operation, values, answer',
  [
    ('copy', ['4821'], '4821'),
    ('rev', ['4821'], '1284'),
    ('sort', ['48210'], '01248'),
    ('add', ['4821', '7289'], '1000'),
    ('cum', ['4821'], '4245'),
  ],
)
def test_operations(operation, values, answer):
  fn, operands = digits.OPERATIONS[operation]
  assert operands == len(values)
  assert fn(*values) == answer


@pytest.mark.parametrize('operation', digits.OPERATIONS)
def test_draws_are_what_they_say(operation):
  rng = random.Random(0)
  drawn = [digits.draw(operation, rng, min_length=2, max_length=5) for _ in range(200)]
  fn, operands = digits.OPERATIONS[operation]
  for d in drawn:
    name, values = d['question'].rstrip('=').split(':')
    values = values.split('+')
    assert name == operation and len(values) == operands
    assert {len(v) for v in values} == {d['extra']['length']} == {len(d['answer'])}
    assert d['answer'] == fn(*values)
    assert set(d['question'] + d['answer']) <= set(ALPHABET)
  assert {d['extra']['length'] for d in drawn} == {2, 3, 4, 5}

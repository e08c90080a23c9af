"""Rows with instructions that cannot be judged are errors; every rule stands in the table of pairs."""

from __future__ import annotations

import json
import pathlib

import pytest

from jaxrl_llm.config import stages
from jaxrl_llm.rewards import instruction_following, instruction_rules
from jaxrl_llm.types import Row

PAIRS = pathlib.Path(__file__).parent / 'data' / 'instructions.jsonl'


def test_every_rule_is_followed_and_broken_in_the_table():
  rules = {0: set(), 1: set()}
  for score, _, _, more in map(json.loads, PAIRS.read_text().splitlines()):
    instructions = more['row'].get('instructions', ())
    if len(instructions) == 1:
      rules[score].add(instructions[0]['id'].rpartition(':')[2])
  assert rules[0] == rules[1] == set(stages.choices(instruction_rules)) and len(rules[0]) >= 25


@pytest.mark.parametrize(
  'extra, message',
  [
    ({}, "row id holds no 'instructions'"),
    (dict(instructions=[]), "row id holds no 'instructions'"),
    (dict(instructions=['no_comma']), "row id holds no 'instructions'"),
    (dict(instruction_id_list=['no_comma'], kwargs=[]), "row id holds no 'instructions'"),
    (
      dict(instructions=[dict(id='no_coma')]),
      "row id: instructions.fn='no_coma' is unknown; choose",
    ),
    (dict(instructions=[dict(id='number_words', kwargs={})]), 'instructions.num_words is missing'),
    (
      dict(instructions=[dict(id='number_words', kwargs=dict(num_words='3'))]),
      "num_words='3' of 'number_words' must be a whole number",
    ),
    (
      dict(instructions=[dict(id='number_words', kwargs=dict(num_words=3, relation='about'))]),
      "relation='about' must be one of: at least, less than",
    ),
    (
      dict(instructions=[dict(id='no_comma', kwargs=dict(n=1))]),
      'instructions.n=1 is not a setting',
    ),
  ],
)
def test_instructions_that_cannot_be_judged_are_errors_and_no_zeros(extra, message):
  with pytest.raises(ValueError) as error:
    instruction_following.instructions('text', Row('id', 'question', (), '', 'source', extra))
  assert message in str(error.value)

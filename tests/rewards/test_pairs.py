"""Hundreds of replies with the score each must get: wrong ones that look right, right ones that look odd.

tests/rewards/data/<grader>.jsonl holds [score, answer, reply] a line, and where it needs them {"set": settings of the
grader, "row": fields of the row}.
"""

from __future__ import annotations

import json
import pathlib

import pytest

from jaxrl_llm import rewards
from jaxrl_llm.config import stages
from jaxrl_llm.rewards import format_rules, instruction_following, verifiers
from jaxrl_llm.rewards.code_execution import graders
from jaxrl_llm.rewards.model_judge import judge
from jaxrl_llm.types import Row

FILES = {path.stem: path for path in sorted(pathlib.Path(__file__).parent.glob('data/*.jsonl'))}


# Judged by tests of their own: by the package of the task, in a sandbox, by a server.
ELSEWHERE = {'gym', 'human_eval', 'judge', 'stdin_stdout', 'unit_tests'}


def pairs(name: str) -> list[tuple]:
  lines = [json.loads(line) for line in FILES[name].read_text().splitlines()]
  return [(*line, {})[:4] for line in lines]


@pytest.mark.parametrize('name', FILES)
def test_every_reply_gets_its_score(name):
  if name == 'math_verify':
    pytest.importorskip('math_verify')
  if name == 'json_schema':
    pytest.importorskip('jsonschema')
  wrong = []
  for score, answer, reply, more in pairs(name):
    grader = rewards.resolve(dict(fn=name) | more.get('set', {}))
    found = grader(reply, Row('id', 'question', (), answer, 'source', more.get('row', {})))
    if found != pytest.approx(score):
      wrong.append((reply, answer, f'gets {found}, not {score}'))
  assert not wrong


@pytest.mark.parametrize('name', FILES)
def test_there_are_enough_of_both_kinds(name):
  labeled = [(json.dumps(line[1:]), line[0]) for line in pairs(name)]
  assert len({line for line, _ in labeled}) == len(labeled) >= 30
  assert min(sum(score == 0 for _, score in labeled), sum(score != 0 for _, score in labeled)) >= 8


def test_every_grader_has_a_table():
  modules = (verifiers, format_rules, instruction_following, judge, graders)
  assert {*FILES} | ELSEWHERE == {name for m in modules for name in stages.choices(m)}
  assert sum(len(pairs(name)) for name in FILES) >= 500

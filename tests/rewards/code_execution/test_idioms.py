"""Ordinary programs pass ordinary tests, and fail them with one mistake."""

from __future__ import annotations

import os

import pytest

from jaxrl_llm.rewards.code_execution import graders, sandbox
from jaxrl_llm.types import Row
from tests.rewards.code_execution.idioms import IDIOMS


@pytest.fixture(autouse=True)
def needs_sandbox():
  if reason := sandbox.unavailable_reason():
    if os.environ.get('JAXRL_LLM_REQUIRE_SANDBOX') == '1':
      pytest.fail(f'JAXRL_LLM_REQUIRE_SANDBOX=1, but {reason}')
    pytest.skip(reason)


def score(program: str, tests: str, **settings) -> float:
  return graders.unit_tests(
    program, Row('id', '', (), '', '', dict(tests=tests)), wall_s=30.0, **settings
  )


@pytest.mark.parametrize('name', IDIOMS)
def test_a_right_program_passes_and_a_wrong_one_does_not(name):
  program, (old, new), tests = IDIOMS[name]
  assert program.count(old) >= 1
  assert score(program, tests) == 1.0
  assert score(program.replace(old, new), tests) == 0.0

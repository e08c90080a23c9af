"""The text graders on more wordings, wordings.jsonl: [score, answer, completion, graders]; conventions:
pairs/README.md."""

from __future__ import annotations

import json
import pathlib

import pytest

from jaxrl_llm import rewards
from jaxrl_llm.types import Row

PATH = pathlib.Path(__file__).parent / 'wordings.jsonl'
CASES = [json.loads(line) for line in PATH.read_text(encoding='utf-8').splitlines()]
GRADERS = (
  'number', 'first_number', 'marked_number', 'numeric', 'math_verify', 'multiple_choice',
)  # fmt: skip
# Repeated, each is a hard text for patterns that look back or ahead from every position.
PIECES = (
  *('answer is ', '####', '5 or ', 'the answer is not 5 ', '(', '\\boxed{', '\\boxed{5} and ', '\\', '_', '5,', '<|'),
  *('<answer>', '<answer>B</answer>', 'B or ', 'option B ', 'is ', 'if ', 'it is B, ', '5 ', '.', '10^', '$5$, '),
  *('"B" ', 'answer to ', 'B is the ', 'B) ', 'answer is 5 if ', 'answer is the the ', 'so ', '½', '⁸'),
)  # fmt: skip


@pytest.mark.parametrize('grader', GRADERS)
def test_each_wording_has_its_score(grader):
  if grader == 'math_verify':
    pytest.importorskip('math_verify')
  options = dict(options=['Paris', 'London', 'Rome', 'Oslo']) if grader == 'multiple_choice' else {}
  function, wrong = rewards.resolve(dict(fn=grader)), []
  cases = [case for case in CASES if grader in case[3]]
  for score, answer, completion, _ in cases:
    if function(completion, Row('id', '', (), answer, 'source', options)) != score:
      wrong.append((score, answer, completion))
  assert cases and not wrong


@pytest.mark.parametrize('grader', [name for name in GRADERS if name != 'math_verify'])
def test_a_repeated_piece_is_graded_in_time(grader):
  """These graders have no deadline: quadratic time would exceed the limit of the test suite."""
  function = rewards.resolve(dict(fn=grader))
  row = Row('id', '', (), 'B' if grader == 'multiple_choice' else '5', 'source', {})
  for piece in PIECES:
    assert function((piece * 100_000)[:400_000], row) in (0.0, 1.0)

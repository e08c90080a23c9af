"""The text graders on further wordings, wordings.jsonl: [score, answer, reply, graders]; pairs/ has the conventions."""

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
# Each over and over makes a text for whatever looks back, or ahead, from each of its places.
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
  for score, answer, reply, _ in cases:
    if function(reply, Row('id', '', (), answer, 'source', options)) != score:
      wrong.append((score, answer, reply))
  assert cases and not wrong


@pytest.mark.parametrize('grader', [name for name in GRADERS if name != 'math_verify'])
def test_a_piece_over_and_over_comes_back(grader):
  """All of them run without a deadline: what is quadratic in the text would not end within the suite's limit."""
  function = rewards.resolve(dict(fn=grader))
  row = Row('id', '', (), 'B' if grader == 'multiple_choice' else '5', 'source', {})
  for piece in PIECES:
    assert function((piece * 100_000)[:400_000], row) in (0.0, 1.0)

"""Demonstrations: answers for a supervised start, demonstrations beside RL, and errors."""

from __future__ import annotations

import numpy as np
import pytest

from jaxrl_llm import data
from jaxrl_llm.data.tasks import make_row
from jaxrl_llm.models.tokenizer import characters
from jaxrl_llm.types import UserError

TOKENIZER = characters('0123456789 ')  # <end> is 0, <unknown> 1, ' ' 2, '0' 3, …
FIELD = "config.objective.sft_loss.fn='chord'"


def row(answer='12', **extra):
  return make_row('toy', 'q', answer, extra)


def test_answers_end_with_an_end_token():
  tokens_PxT, length_P = data.answer_tokens([row('12'), row('345')], TOKENIZER, 5)
  assert tokens_PxT.tolist() == [[4, 5, 0, 0, 0], [6, 7, 8, 0, 0]]
  assert length_P.tolist() == [3, 4]
  assert tokens_PxT.dtype == length_P.dtype == np.int32


def test_answers_that_do_not_fit_are_told():
  with pytest.raises(UserError, match="completion_tokens=5 is too small.*'12345' has 6 tokens"):
    data.answer_tokens([row('12345')], TOKENIZER, 5)
  with pytest.raises(UserError, match='has no answer to learn from'):
    data.answer_tokens([row('')], TOKENIZER, 5)


def test_a_demonstration_is_the_solution_or_response_else_the_answer_cut_at_the_cap():
  rows = [
    row('1', solution='3 1', response='9'),
    row('1', response='2 1'),
    row('1'),
    row('1', solution=' ', response=7),
    row(''),
    row('1', solution='12345678'),
  ]
  demo = data.demonstrations(rows, TOKENIZER, 5)
  assert demo.length_B.tolist() == [4, 4, 2, 2, 0, 5]
  assert demo.tokens_BxT.tolist() == [
    [6, 2, 4, 0, 0],
    [5, 2, 4, 0, 0],
    [4, 0, 0, 0, 0],
    [4, 0, 0, 0, 0],
    [0, 0, 0, 0, 0],
    [4, 5, 6, 7, 8],  # its end is beyond the cap, and is not learned
  ]
  assert (demo.logp_BxT == 0).all() and (demo.weight_B == 1).all()
  answers = data.answer_tokens([row('12')], TOKENIZER, 5)
  np.testing.assert_array_equal(data.demonstrations([row('12')], TOKENIZER, 5)[0], answers[0])


def test_recorded_log_probs_lie_with_their_tokens():
  rows = [row('12', logprobs=[-1, -2.5, -0.5]), row('12'), row('345', logprobs=[-1, -2, -3, -4])]
  data.check_demonstrations(rows, TOKENIZER, FIELD)
  demo = data.demonstrations(rows, TOKENIZER, 3)
  assert demo.logp_BxT.tolist() == [[-1, -2.5, -0.5], [0, 0, 0], [-1, -2, -3]]


@pytest.mark.parametrize(
  'rows, message',
  [
    (
      [row(''), row('')],
      'fn=.chord. learns from demonstrations and no row .* has one; add a column',
    ),
    ([row(), row(logprobs=[-1, -2])], "'logprobs' of row .* must be a list of 3 numbers"),
    ([row(logprobs=[-1, -2, 0.5])], 'of at most 0'),
    ([row(logprobs='high')], 'must be a list of 3 numbers'),
  ],
)
def test_rows_that_cannot_be_demonstrations_are_told(rows, message):
  with pytest.raises(UserError, match=message):
    data.check_demonstrations(rows, TOKENIZER, FIELD)


def test_one_demonstration_among_many_rows_is_enough():
  data.check_demonstrations([row(''), row('1')], TOKENIZER, FIELD)

"""Hidden states of prompts, for a prior of their difficulty: a program beside the step, whose results land with it."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from jaxrl_llm import data
from jaxrl_llm.curriculum import answer_wording
from jaxrl_llm.curriculum.prompt_features import PromptFeatures
from jaxrl_llm.learner import compile as programs
from jaxrl_llm.runner.context import EncodedPrompts, RunContext
from jaxrl_llm.runner.grading import GradedStep
from jaxrl_llm.types import STOPPED, Array, TrainState, UserError

Encode = Callable[[int, TrainState, np.ndarray], EncodedPrompts | None]
_WIDTHS = 4  # of the programs that encode, from a quarter of the longest row to all of it


def compile_call(context: RunContext) -> Encode | None:
  """(step, state, the step's prompts) → hidden states of these and of others; None where no prior reads them.

  The step's prompts are left out where the last step encoded all of them. The data set's own prompts are encoded,
  without hints: the posterior is theirs. The call returns None where that is of no use yet. Nothing waits for the
  device. Raises UserError where the prior reads answers and no row has one.
  """
  curriculum = context.selection.curriculum
  features = curriculum.features
  if features is None:
    return None
  program, table = programs.compile_encode(context.spec), context.tables.train
  tokenizer, answer_tokens = context.models.policy.tokenizer, _answer_tokens(context)

  def call(step: int, state: TrainState, index_P: np.ndarray) -> EncodedPrompts | None:
    if features.idle:
      return None
    state, block = state._replace(carried=()), len(index_P)
    own = index_P[: 0 if features.are_new(index_P) else block]
    index_M = np.concatenate([own, curriculum.to_encode(step, block)]).astype(np.int32)
    rows, phrase = [table.rows[i] for i in index_M], features.phrase
    answers = data.known_answers(rows, tokenizer, answer_tokens, phrase)
    return encoded(functools.partial(program, state), table, index_M, answers, block)

  return call


def encoded(
  program: Callable[..., Array],
  table: data.PromptTable,
  index_M: np.ndarray,
  answers: tuple[np.ndarray, np.ndarray],
  block: int,
) -> EncodedPrompts:
  """Calls `program`, of (prompts, answers or None), with `block` rows at a time, of which M is a multiple.

  Rows are taken in the order of their tokens, and a call has no more columns than its longest row needs. `answers`:
  tokens_MxT and length_M; T = 0 where none are read.
  """
  answer_MxT, length_M = answers
  longest = table.prompt_tokens + answer_MxT.shape[1]
  tokens_M = length_M + [len(table.tokens[i]) for i in index_M]
  order_M = np.argsort(tokens_M, kind='stable')

  def call(part: np.ndarray) -> Array:
    width = column_count(int(tokens_M[part].max()), longest)
    prompts = table.prompts(index_M[part], width=width)
    return program(prompts, (answer_MxT[part], length_M[part]) if answer_MxT.size else None)

  return EncodedPrompts(index_M[order_M], tuple(map(call, order_M.reshape(-1, block))))


def column_count(tokens: int, longest: int) -> int:
  """The least number of columns for so many tokens, of the `_WIDTHS` up to `longest`: each is a program of its own."""
  unit = -(-longest // _WIDTHS)
  return min(-(-tokens // unit) * unit, longest)


def _answer_tokens(context: RunContext) -> int:
  """Tokens of an answer and the words around it; 0 where the prior reads none."""
  features = context.selection.curriculum.features
  assert features is not None
  if not features.answer_tokens:
    return 0
  if not any(row.answer for row in context.tables.train.rows):
    raise UserError(
      f'config.curriculum.prior_pooling.answer_tokens={features.answer_tokens} reads the answers of the data, and no '
      'row has one; set it to 0.'
    )
  return min(features.answer_tokens, context.config.completion_tokens)


def store(features: PromptFeatures, encoded: EncodedPrompts, own_P: np.ndarray) -> None:
  """Stores the features of encoded prompts; the first ones fix the projection. `own_P`: the prompts of the step."""
  hidden_MxD = np.concatenate(encoded.hidden)
  if not features.ready:
    features.fit(hidden_MxD)
  features.put(encoded.index_M, hidden_MxD, own_P)


def observe_wording(features: PromptFeatures, graded: GradedStep) -> None:
  """Learns how right completions of a step word their answers.

  Of those that an end token ended, without a hint, and with at most as many tokens as the prior reads of an answer.
  """
  batch = graded.batch
  rollout, prompts = batch.rollout, batch.prompts
  own_P = prompts.hint_P == 0 if prompts.hint_P is not None else np.ones(len(prompts.index_P), bool)
  right_B = (batch.correct_B > 0) & (rollout.reason_B == STOPPED)
  right_B &= (rollout.length_B > 0) & (rollout.length_B <= features.answer_tokens)
  groups, G = [], len(right_B) // len(own_P)
  for first in np.flatnonzero(own_P) * G:
    texts = [graded.scores.texts[b] for b in first + np.flatnonzero(right_B[first : first + G])]
    row = graded.rows[first]
    groups.append(answer_wording.Group(row.question, row.answer, texts))
  features.observe(groups)

"""Demonstrations for a supervised start, and for losses beside RL."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from jaxrl_llm.data.pipeline import Tokenizer, pad_rows
from jaxrl_llm.types import STOPPED, Rollout, Row, UserError

_COLUMNS = (
  'solution',
  'response',
)  # the first one that a row has is its demonstration, else the answer
_LOGPROBS = (
  'logprobs'  # log-probs of the demonstration's tokens and its end under the model that wrote it
)


def answer_tokens(
  rows: Sequence[Row], tokenizer: Tokenizer, completion_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
  """Returns (tokens_PxT, length_P): each row's demonstration and an end token, right-padded with 0.

  Raises UserError for a demonstration that is too long and for a row without one.
  """
  return pad_rows(
    [_demonstration_tokens(row, tokenizer, completion_tokens) for row in rows], completion_tokens
  )


def _demonstration_tokens(row: Row, tokenizer: Tokenizer, completion_tokens: int) -> np.ndarray:
  text = demonstration(row)
  if not text:
    raise UserError(f'config.sft: row {row.id} of {row.source!r} has no answer to learn from.')
  ids = _completion(text, tokenizer)
  if len(ids) > completion_tokens:
    raise UserError(
      f'config.completion_tokens={completion_tokens} is too small for config.sft: the answer '
      f'{text[:40]!r} has {len(ids)} tokens with its end; raise it.'
    )
  return ids


def demonstrations(rows: Sequence[Row], tokenizer: Tokenizer, completion_tokens: int) -> Rollout:
  """Returns the demonstration of each row and an end token as a rollout, cut at completion_tokens.

  A row without a demonstration has length 0. Log-probs are the row's `logprobs`, or 0 without them.
  """
  texts = [demonstration(row) for row in rows]
  ids = [_completion(text, tokenizer)[:completion_tokens] if text else _NO_TOKENS for text in texts]
  tokens_PxT, length_P = pad_rows(ids, completion_tokens)
  rollout = as_rollout(tokens_PxT, length_P)
  for row, logp_T, length in zip(rows, rollout.logp_BxT, length_P, strict=True):
    logprobs = row.extra.get(_LOGPROBS)
    if logprobs:
      logp_T[:length] = logprobs[:length]
  return rollout


def known_answers(
  rows: Sequence[Row],
  tokenizer: Tokenizer,
  answer_tokens: int,
  phrase: Callable[[str, str], str] = lambda question, answer: answer,
) -> tuple[np.ndarray, np.ndarray]:
  """Returns (tokens_PxT, length_P): each row's answer and an end token, cut at `answer_tokens`, right-padded with 0.

  `phrase`: (question, answer) → the text that gives it, or ''. A row without an answer, or without such a text, has
  length 0.
  """
  texts = [phrase(row.question, row.answer) if row.answer else '' for row in rows]
  ids = [_completion(text, tokenizer)[:answer_tokens] if text else _NO_TOKENS for text in texts]
  return pad_rows(ids, answer_tokens)


def demonstration(row: Row) -> str:
  """Returns the row's `solution` or `response`, else its answer; '' where it has none."""
  columns = (row.extra.get(name) for name in _COLUMNS)
  return next((text for text in columns if isinstance(text, str) and text.strip()), row.answer)


def check_demonstrations(rows: Sequence[Row], tokenizer: Tokenizer, field: str) -> None:
  """Raises UserError where no row has a demonstration, and where `logprobs` do not match its tokens."""
  if not any(demonstration(row) for row in rows):
    raise UserError(
      f'{field} learns from demonstrations and no row of the data has one; add a column '
      f"{_COLUMNS[0]!r} or {_COLUMNS[1]!r}, or choose 'none'."
    )
  for row in rows:
    logprobs = row.extra.get(_LOGPROBS)
    if not logprobs:
      continue
    count = len(_completion(demonstration(row), tokenizer))
    valid = isinstance(logprobs, list) and all(
      isinstance(x, int | float) and x <= 0 for x in logprobs
    )
    if not valid or len(logprobs) != count:
      raise UserError(
        f'{field}: {_LOGPROBS!r} of row {row.id} must be a list of {count} numbers of at most 0, one for each '
        'token of its demonstration and one for the end; correct it, or remove it.'
      )


def as_rollout(tokens_PxT: np.ndarray, length_P: np.ndarray) -> Rollout:
  """Returns completions of the data as a Rollout with log-probs 0."""
  shape = tokens_PxT.shape
  return Rollout(
    tokens_PxT,
    np.zeros(shape, np.float32),
    length_P,
    np.full(shape[0], STOPPED, np.int8),
    np.zeros(shape, np.int32),
    np.ones(shape[0], np.float32),
    np.zeros((shape[0], 0), np.float32),
  )


_NO_TOKENS = np.zeros(0, np.int32)


def _completion(text: str, tokenizer: Tokenizer) -> np.ndarray:
  return np.asarray([*tokenizer.encode(text), list(tokenizer.end_ids)[0]], np.int32)

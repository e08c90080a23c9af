"""Demonstrations for a supervised start, one per row or packed, and for losses beside RL."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from jaxrl_llm.data.pipeline import Tokenizer, pad_rows
from jaxrl_llm.types import STOPPED, Prompts, Rollout, Row, Turns, UserError

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


def pack_demonstrations(
  rows: Iterable[tuple[np.ndarray, Row]],
  tokenizer: Tokenizer,
  completion_tokens: int,
  size: int,
  width: int,
) -> tuple[Prompts, Rollout, int]:
  """Packs prompts (token ids) with their demonstrations into rows of `width` tokens, first fit, until one does not fit.

  Returns `size` rows as completions without a prompt, and the number of packed demonstrations. Segments number the
  demonstrations of a row; prompts are environment tokens, demonstrations are turn 0. Raises UserError as
  `answer_tokens` does, and for a prompt with demonstration that is longer than a row.
  """
  tokens_BxT, segment_BxT, turn_BxT = (np.zeros((size, width), np.int32) for _ in range(3))
  length_B, segments_B = np.zeros(size, np.int32), np.zeros(size, np.int32)
  turn_BxT -= 1
  for prompt, row in rows:
    answer = _demonstration_tokens(row, tokenizer, completion_tokens)
    tokens = np.concatenate([prompt, answer])
    fits = np.flatnonzero(length_B + len(tokens) <= width)
    if len(tokens) > width:
      raise UserError(
        f'config.sft.pack_tokens={width} is less than the {len(tokens)} tokens of row {row.id} with its '
        f'answer; raise it.'
      )
    if not len(fits):
      break
    b, start = fits[0], length_B[fits[0]]
    segments_B[b] += 1
    length_B[b] = end = start + len(tokens)
    tokens_BxT[b, start:end], segment_BxT[b, start:end] = tokens, segments_B[b]
    turn_BxT[b, start + len(prompt) : end] = 0
  rollout = as_rollout(tokens_BxT, length_B)
  turns = Turns(turn_BxT, np.zeros_like(rollout.logp_BxT), segment_BxT, np.zeros(size, np.int8))
  zeros_B = np.zeros(size, np.int32)
  prompts = Prompts(zeros_B[:, None], zeros_B, zeros_B, zeros_B, zeros_B.astype(np.float32))
  prompts = prompts._replace(segment_PxT=segment_BxT.copy())
  return prompts, rollout._replace(turns=turns), int(segments_B.sum())


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

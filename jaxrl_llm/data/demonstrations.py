"""Replies to learn from: demonstrations for a supervised start, in rows of their own or packed, or beside RL."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.data.pipeline import padded
from jaxrl_llm.types import STOPPED, Prompts, Rollout, Row, Turns, UserError

_COLUMNS = ('solution', 'response')  # the first of these that a row has; else its answer
_RECORDED = 'logprobs'  # of the demonstration's tokens, its end included, by what wrote it


def answer_tokens(
  rows: Sequence[Row], tokenizer: Any, completion_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
  """(tokens_PxT, length_P): each row's demonstration and an end token, right-padded with 0, for a supervised start.

  Raises UserError for one that does not fit, or a row without one. Source: none.
  """
  return padded([_shown(row, tokenizer, completion_tokens) for row in rows], completion_tokens)


def packed(
  rows: Iterable[tuple[np.ndarray, Row]],
  tokenizer: Any,
  completion_tokens: int,
  size: int,
  width: int,
) -> tuple[Prompts, Rollout, int]:
  """Prompts (token ids) with demonstrations, several to a row of `width` tokens: first fit, until one fits nowhere.

  Returns `size` rows as completions without a prompt, marked by segment, in which prompts are given and demonstrations
  are said; and how many there are. Raises UserError as `answer_tokens`, and for one that is wider than a row.
  Source: none.
  """
  tokens_BxT, segment_BxT, turn_BxT = (np.zeros((size, width), np.int32) for _ in range(3))
  length_B, inside_B = np.zeros(size, np.int32), np.zeros(size, np.int32)
  turn_BxT -= 1
  for prompt, row in rows:
    shown = _shown(row, tokenizer, completion_tokens)
    both = np.concatenate([prompt, shown])
    fits = np.flatnonzero(length_B + len(both) <= width)
    if len(both) > width:
      raise UserError(
        f'config.sft.pack_tokens={width} is less than the {len(both)} tokens of row {row.id} with its answer; raise it.'
      )
    if not len(fits):
      break
    b, at = fits[0], length_B[fits[0]]
    inside_B[b] += 1
    length_B[b] = end = at + len(both)
    tokens_BxT[b, at:end], segment_BxT[b, at:end] = both, inside_B[b]
    turn_BxT[b, at + len(prompt) : end] = 0
  rollout = supervised(tokens_BxT, length_B)
  turns = Turns(turn_BxT, np.zeros_like(rollout.logp_BxT), segment_BxT, np.zeros(size, np.int8))
  none_B = np.zeros(size, np.int32)
  prompts = Prompts(none_B[:, None], none_B, none_B, none_B, none_B.astype(np.float32))
  prompts = prompts._replace(segment_PxT=segment_BxT.copy())
  return prompts, rollout._replace(turns=turns), int(inside_B.sum())


def _shown(row: Row, tokenizer: Any, completion_tokens: int) -> np.ndarray:
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


def demonstrations(rows: Sequence[Row], tokenizer: Any, completion_tokens: int) -> Rollout:
  """A demonstration of each row, as rollouts of one per prompt, cut at completion_tokens.

  It is the row's `solution` or `response`, else its answer, and an end token; a row without any has length 0.
  Log-probabilities are the row's `logprobs`, or 0 where it has none. Source: none.
  """
  texts = [demonstration(row) for row in rows]
  ids = [_completion(text, tokenizer)[:completion_tokens] if text else _NOTHING for text in texts]
  tokens_PxT, length_P = padded(ids, completion_tokens)
  rollout = supervised(tokens_PxT, length_P)
  for row, logp_T, length in zip(rows, rollout.logp_BxT, length_P, strict=True):
    told = row.extra.get(_RECORDED)
    if told:
      logp_T[:length] = told[:length]
  return rollout


def demonstration(row: Row) -> str:
  """What a row shows of a right reply, '' where it shows nothing. Source: none."""
  told = (row.extra.get(name) for name in _COLUMNS)
  return next((text for text in told if isinstance(text, str) and text.strip()), row.answer)


def check_demonstrations(rows: Sequence[Row], tokenizer: Any, field: str) -> None:
  """Raises UserError where no row has a demonstration, or `logprobs` are not those of its tokens.

  Source: none.
  """
  if not any(demonstration(row) for row in rows):
    raise UserError(
      f'{field} learns from demonstrations and no row of the data has one; add a column '
      f"{_COLUMNS[0]!r} or {_COLUMNS[1]!r}, or choose 'none'."
    )
  for row in rows:
    told = row.extra.get(_RECORDED)
    if not told:
      continue
    count = len(_completion(demonstration(row), tokenizer))
    numbers = isinstance(told, list) and all(isinstance(x, int | float) and x <= 0 for x in told)
    if not numbers or len(told) != count:
      raise UserError(
        f'{field}: {_RECORDED!r} of row {row.id} must be a list of {count} numbers of at most 0, one for each '
        'token of its demonstration and one for the end; mend it, or leave it out.'
      )


def supervised(tokens_PxT: np.ndarray, length_P: np.ndarray) -> Rollout:
  """Replies that nobody sampled, as rollouts of one per prompt: log-probabilities 0. Source: none."""
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


_NOTHING = np.zeros(0, np.int32)


def _completion(text: str, tokenizer: Any) -> np.ndarray:
  return np.asarray([*tokenizer.encode(text), list(tokenizer.end_ids)[0]], np.int32)

"""Prompts with a known solution, for a teacher that is the reference model itself."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxrl_llm import data
from jaxrl_llm.objective import distillation
from jaxrl_llm.runner.context import RunContext
from jaxrl_llm.types import Prompts, Row, Solutions

_TEMPLATE = '{question}\n\nA right answer is:\n{solution}\n\nAnswer the question in your own way.'


def first_right(correct_B: np.ndarray, group_B: Sequence[int] | np.ndarray) -> np.ndarray:
  """The first right row of each row's group, other than itself, int32 [B]; −1 without one."""
  group_B, chosen_B = np.asarray(group_B), np.full(len(correct_B), -1, np.int32)
  for b in range(len(correct_B)):
    right = np.flatnonzero((group_B == group_B[b]) & (correct_B > 0.5))
    right = right[right != b]
    if len(right):
      chosen_B[b] = right[0]
  return chosen_B


def build(
  context: RunContext,
  prompts: Prompts,
  rows: Sequence[Row],
  texts: Sequence[str],
  correct_B: np.ndarray,
) -> tuple[Solutions, dict[str, float]]:
  """The prompts with solutions of a graded step, and the share of completions that have one.

  A completion serves as a solution without its thinking. A prompt that becomes longer than
  config.objective.distillation.prompt_tokens has none.
  """
  if context.config.objective.distillation.fn == distillation.solved_by_group.__name__:
    chosen_B = first_right(correct_B, np.repeat(prompts.index_P, context.config.rollouts))
    solution_B = [_without_thinking(texts[b]) if b >= 0 else '' for b in map(int, chosen_B)]
  else:
    solution_B = [data.demonstration(row) for row in rows]
  most = context.spec.objective.solution_tokens
  tokens = [_encoded(context, *pair, most) for pair in zip(rows, solution_B, strict=True)]
  padded = Solutions(*data.pad_rows(tokens, most))
  return padded, {'distillation/solved': float((padded.length_B > 0).mean())}


def _without_thinking(text: str) -> str:
  return text.rpartition('</think>')[2].strip()


def _encoded(context: RunContext, row: Row, solution: str, most: int) -> np.ndarray:
  """Token ids of a prompt with its solution; empty without one, and where it is too long."""
  if not solution:
    return np.zeros(0, np.int32)
  solved = data.with_question(row, _TEMPLATE, dict(solution=solution))
  ids = data.encode(solved, context.config.data, context.models.policy.tokenizer)
  return ids if len(ids) <= most else ids[:0]

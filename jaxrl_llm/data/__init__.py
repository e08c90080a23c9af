"""Data: reads rows from a source, renders them and encodes them into prompts."""

from __future__ import annotations

from jaxrl_llm.data.demonstrations import (
  answer_tokens,
  as_rollout,
  check_demonstrations,
  demonstration,
  demonstrations,
  known_answers,
)
from jaxrl_llm.data.digits import ALPHABET
from jaxrl_llm.data.pipeline import (
  PromptTable,
  RowSets,
  Tables,
  encode,
  load,
  load_rows,
  make_table,
  pad_rows,
  prompt_text,
  render,
  with_question,
)
from jaxrl_llm.data.preferences import load_pairs
from jaxrl_llm.data.row_columns import Columns
from jaxrl_llm.data.traits import kinds

__all__ = [
  'ALPHABET',
  'Columns',
  'PromptTable',
  'RowSets',
  'Tables',
  'answer_tokens',
  'check_demonstrations',
  'demonstration',
  'demonstrations',
  'known_answers',
  'encode',
  'kinds',
  'load',
  'load_pairs',
  'load_rows',
  'make_table',
  'pad_rows',
  'prompt_text',
  'render',
  'as_rollout',
  'with_question',
]

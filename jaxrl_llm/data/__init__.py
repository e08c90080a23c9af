"""Data: reads rows from a source, renders them and encodes them into prompts."""

from __future__ import annotations

from jaxrl_llm.data.demonstrations import (
  answer_tokens,
  as_rollout,
  check_demonstrations,
  demonstration,
  demonstrations,
  pack_demonstrations,
)
from jaxrl_llm.data.digits import ALPHABET
from jaxrl_llm.data.pipeline import (
  PromptTable,
  Tables,
  encode,
  kinds,
  load,
  make_table,
  pad_rows,
  prompt_text,
  render,
  with_question,
)
from jaxrl_llm.data.row_columns import Columns

__all__ = [
  'ALPHABET',
  'Columns',
  'PromptTable',
  'Tables',
  'answer_tokens',
  'check_demonstrations',
  'demonstration',
  'demonstrations',
  'encode',
  'kinds',
  'load',
  'make_table',
  'pack_demonstrations',
  'pad_rows',
  'prompt_text',
  'render',
  'as_rollout',
  'with_question',
]

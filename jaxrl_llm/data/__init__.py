"""Data: rows from a source, rendered and encoded into prompts."""

from __future__ import annotations

from jaxrl_llm.data.demonstrations import (
  answer_tokens,
  check_demonstrations,
  demonstration,
  demonstrations,
  packed,
  supervised,
)
from jaxrl_llm.data.digits import ALPHABET
from jaxrl_llm.data.pipeline import (
  PromptTable,
  Tables,
  encode,
  kinds,
  load,
  make_table,
  padded,
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
  'packed',
  'padded',
  'prompt_text',
  'render',
  'supervised',
  'with_question',
]

"""Data: rows from a source, rendered and encoded into prompts."""

from __future__ import annotations

from jaxrl_llm.data.demonstrations import (
  answer_tokens,
  check_demonstrations,
  demonstrations,
  supervised,
)
from jaxrl_llm.data.digits import ALPHABET
from jaxrl_llm.data.pipeline import PromptTable, Tables, kinds, load, make_table, render

__all__ = [
  'ALPHABET',
  'PromptTable',
  'Tables',
  'answer_tokens',
  'check_demonstrations',
  'demonstrations',
  'kinds',
  'load',
  'make_table',
  'render',
  'supervised',
]

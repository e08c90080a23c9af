"""The bytes that tokens spell, and the smallest groups of tokens by which two tokenizers spell the same text."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxrl_llm.models.tokenizer import Tokenizer

_RAW_BYTE = re.compile('<0x([0-9A-F]{2})>')  # a token of byte fallback


class Spans(NamedTuple):
  """Spans of a text, numbered from 0, by the tokens of two tokenizers."""

  first_N: np.ndarray  # int32, the span of each token of the first one; −1 behind the last span
  second_M: np.ndarray  # int32, of the second one


def align(first_N: np.ndarray, second_M: np.ndarray, end: int) -> Spans:
  """The spans of two encodings of one text, whose tokens have these lengths in bytes.

  A span ends where a token of both ends, at byte `end` or before. A token of no bytes belongs to the span of the next
  one.
  """
  end_N, end_M = np.cumsum(first_N), np.cumsum(second_M)
  ends = np.intersect1d(end_N, end_M)
  ends = ends[(ends > 0) & (ends <= end)]

  def numbers(end_N: np.ndarray, length_N: np.ndarray) -> np.ndarray:
    span_N = np.searchsorted(ends, end_N - length_N, side='right')
    return np.where(span_N < len(ends), span_N, -1).astype(np.int32)

  return Spans(numbers(end_N, first_N), numbers(end_M, second_M))


def common_bytes(one: bytes, other: bytes) -> int:
  """The number of bytes with which both texts begin."""
  if one == other:
    return len(one)
  size = min(len(one), len(other))
  differs = np.flatnonzero(np.frombuffer(one[:size], 'u1') != np.frombuffer(other[:size], 'u1'))
  return int(differs[0]) if len(differs) else size


def valid_text(raw: bytes) -> str:
  """The text before the first bytes that are no UTF-8."""
  try:
    return raw.decode()
  except UnicodeDecodeError as error:
    return raw[: error.start].decode()


def token_bytes(tokenizer: Tokenizer) -> list[bytes]:
  """The bytes of each token, by id, those of special tokens as they are written; b'' for unused ids."""
  backend = tokenizer.backend
  described = json.loads(backend.to_str())
  kinds = _kinds(described.get('decoder'))
  added = {token['id'] for token in described['added_tokens']}
  ids = range(max(backend.get_vocab().values()) + 1)
  names = [backend.id_to_token(i) or '' for i in ids]
  if 'ByteLevel' in kinds:
    return [name.encode() if i in added else _byte_level(name) for i, name in enumerate(names)]
  texts = _decoded(tokenizer, ids)
  raw = [_RAW_BYTE.fullmatch(name) if 'ByteFallback' in kinds else None for name in names]
  return [
    bytes([int(found[1], 16)]) if found else text.encode()
    for found, text in zip(raw, texts, strict=True)
  ]


def _decoded(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
  # Each token is decoded after another one: some decoders drop a leading space of the first token.
  first = tokenizer.encode('a')[-1]
  skipped = len(tokenizer.decode([first], skip_special=False))
  return [tokenizer.decode([first, i], skip_special=False)[skipped:] for i in ids]


def _kinds(decoder: dict | None) -> set[str]:
  """The types of a decoder's steps."""
  steps = decoder.get('decoders', [decoder]) if decoder else []
  return {step['type'] for step in steps}


def _byte_level(name: str) -> bytes:
  """The bytes of a token of byte-level BPE, whose names have a visible character for each byte."""
  return bytes(map(_ALPHABET.__getitem__, name)) if set(name) <= _ALPHABET.keys() else name.encode()


def _alphabet() -> dict[str, int]:
  """GPT-2's character of each byte: visible ones of Latin-1 stand for themselves, the others follow U+0100."""
  visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
  hidden = [byte for byte in range(256) if byte not in visible]
  return {chr(b): b for b in visible} | {chr(0x100 + i): b for i, b in enumerate(hidden)}


_ALPHABET = _alphabet()

"""tokenizer.json by the `tokenizers` library, after a trial of it.

A tokenizer is a program, too: its patterns may backtrack, its replacements double a text forty times, and numbers in it
end the library, which is no exception or the end of the process. The trial knows one text and the vocabulary; what
fails on other words is an error where it happens. This file is also the program of the trial, and so imports nothing of
the package at the top.
"""

from __future__ import annotations

import functools
import hashlib
from typing import Any

import tokenizers

_CPU_S, _WALL_S = 30, 300  # the largest vocabularies take about 3 s
_BYTES = 4 * 2**30
_GROWTH = 64  # tokens, or characters, of one character: more than any script or ligature takes
_MOST_TOKENS = 2**14  # decoded in the trial
_TEXT = ' '.join(
  (
    ''.join(map(chr, range(32, 127))),
    'The quick brown fox jumps over the lazy dog. 2 + 2 = 4.',
    'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx',
    '\n\n\t  def f(x):\n    return x ** 2\r\n',
    'Füße, naïve; Привет мир; 你好，世界; こんにちは; שלום; مرحبا; नमस्ते; ﷺ ﬃ ½ 🙂👩‍👩‍👧',
  )
)


def load(path: str) -> tokenizers.Tokenizer:
  """The tokenizer in a file, without padding or truncation. The library raises bare Exception, and panics."""
  backend = tokenizers.Tokenizer.from_file(path)
  backend.no_padding()
  backend.no_truncation()
  return backend


def find_problem(path: str) -> str:
  """'' for a tokenizer.json that can be used, else what is wrong with it."""
  from jaxrl_llm.checkpointing import safe_files

  digest = hashlib.sha256(safe_files.read(path)).hexdigest()
  return _tried(digest, path, _CPU_S)


@functools.lru_cache
def _tried(digest: str, path: str, cpu_s: int) -> str:
  """Once for a file of the same content."""
  from jaxrl_llm.models import untrusted

  return untrusted.find_problem(__file__, path, cpu_s=cpu_s, wall_s=_WALL_S, memory_bytes=_BYTES)


def probe(path: str) -> str:
  """Loads, encodes and decodes. An exception is no fault here: it is caught and told again where it happens."""
  try:
    backend = load(path)
    vocabulary = sorted(backend.get_vocab().values())
    return _encoded(backend) or _decoded(backend, vocabulary)
  except Exception:
    return ''


def _encoded(backend: Any) -> str:
  most = _GROWTH * len(_TEXT)
  if backend.normalizer is not None and len(backend.normalizer.normalize_str(_TEXT)) > most:
    return f'it makes a text {_GROWTH} times as long'
  try:
    ids = backend.encode(_TEXT, add_special_tokens=False).ids
  except Exception:  # a vocabulary without a token for what is unknown
    return ''
  return f'it makes more than {_GROWTH} tokens of a character' if len(ids) > most else ''


def _decoded(backend: Any, vocabulary: list[int]) -> str:
  chosen = vocabulary[:: max(len(vocabulary) // _MOST_TOKENS, 1)]
  length = sum(len(backend.id_to_token(token) or '') + 1 for token in chosen)
  text = backend.decode(chosen, skip_special_tokens=False)
  return f'it makes texts {_GROWTH} times as long' if len(text) > _GROWTH * length else ''

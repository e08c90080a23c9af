"""tokenizer.json read by the `tokenizers` library, after a probe of the file in another process.

A tokenizer is a program: its patterns may backtrack without end, its replacements may double a text forty times, and
some of its numbers abort the library, which no `except` catches. The probe encodes one text and decodes the
vocabulary; failures on other texts raise UserError when they occur. This file is also the program of the probe and
therefore imports nothing of the package at the top.
"""

from __future__ import annotations

import functools
import hashlib

import tokenizers

_CPU_S, _WALL_S = 30, 300  # the largest vocabularies take about 3 s
_BYTES = 4 * 2**30
_MAX_GROWTH = 64  # tokens or characters per character: more than any script or ligature takes
_MAX_DECODED_TOKENS = 2**14
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
  """'' for a usable tokenizer.json, else a description of its problem."""
  from jaxrl_llm.checkpointing import safe_files

  digest = hashlib.sha256(safe_files.read(path)).hexdigest()
  return _probe_once(digest, path, _CPU_S)


@functools.lru_cache
def _probe_once(digest: str, path: str, cpu_s: int) -> str:
  """The result of the probe, cached by the content of the file."""
  from jaxrl_llm.models import untrusted

  return untrusted.find_problem(__file__, path, cpu_s=cpu_s, wall_s=_WALL_S, memory_bytes=_BYTES)


def probe(path: str) -> str:
  """Load, encode and decode. An exception is no problem here: the caller of the tokenizer catches it."""
  try:
    backend = load(path)
    vocabulary = sorted(backend.get_vocab().values())
    return _encoding_problem(backend) or _decoding_problem(backend, vocabulary)
  except Exception:
    return ''


def _encoding_problem(backend: tokenizers.Tokenizer) -> str:
  limit = _MAX_GROWTH * len(_TEXT)
  if backend.normalizer is not None and len(backend.normalizer.normalize_str(_TEXT)) > limit:
    return f'it makes a text {_MAX_GROWTH} times as long'
  try:
    ids = backend.encode(_TEXT, add_special_tokens=False).ids
  except Exception:  # a vocabulary without a token for unknown text
    return ''
  return f'it makes more than {_MAX_GROWTH} tokens of a character' if len(ids) > limit else ''


def _decoding_problem(backend: tokenizers.Tokenizer, vocabulary: list[int]) -> str:
  sample = vocabulary[:: max(len(vocabulary) // _MAX_DECODED_TOKENS, 1)]
  length = sum(len(backend.id_to_token(token) or '') + 1 for token in sample)
  text = backend.decode(sample, skip_special_tokens=False)
  too_long = len(text) > _MAX_GROWTH * length
  return f'it makes texts {_MAX_GROWTH} times as long' if too_long else ''

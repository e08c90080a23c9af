"""The bytes of tokens and the spans of two tokenizers, against plain search and against encodings of random text."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from small_tokenizers import byte_fallback, byte_level, characters, smollm2, texts

from jaxrl_llm.models import token_spans

TOKENIZERS = dict(
  coarse=lambda: byte_level(600, 0),
  fine=lambda: byte_level(300, 1),
  smollm2=smollm2,
  fallback=lambda: byte_fallback(False),
)


@functools.cache
def table(name: str) -> list[bytes]:
  return token_spans.token_bytes(TOKENIZERS[name]())


@pytest.mark.parametrize('name', TOKENIZERS)
def test_tokens_spell_the_text_that_was_encoded(name):
  tokenizer = TOKENIZERS[name]()
  for text in texts(100, 2):
    ids = tokenizer.encode(text)
    assert b''.join(table(name)[i] for i in ids) == text.encode()
    assert b''.join(table(name)[i] for i in ids).decode() == tokenizer.decode(ids)


@pytest.mark.parametrize('name', TOKENIZERS)
def test_every_token_has_bytes_and_special_ones_their_name(name):
  tokenizer = TOKENIZERS[name]()
  assert all(table(name)) and len(table(name)) == tokenizer.vocab_size
  assert table(name)[tokenizer.end_ids[0]] == tokenizer.eos_token.encode()
  assert {bytes([byte]) for byte in range(256) if name != 'smollm2'} <= set(table(name))


def test_added_tokens_are_written_as_they_are():
  """The name of a byte-level token is in an alphabet of its own, that of an added token is not."""
  backend = type(byte_level(300, 1).backend).from_str(byte_level(300, 1).backend.to_str())
  backend.add_tokens(['né'])
  changed = byte_level(300, 1)._replace(backend=backend)
  assert token_spans.token_bytes(changed)[backend.token_to_id('né')] == 'né'.encode()


def test_characters_and_a_space_before_the_text():
  letters = token_spans.token_bytes(characters())
  assert letters[:2] == [b'<end>', b'<unknown>'] and b'A' in letters
  before = token_spans.token_bytes(byte_fallback(True))
  assert b''.join(before[i] for i in byte_fallback(True).encode('the 12')) == b' the 12'


def plain_spans(first: list[int], second: list[int], end: int) -> list[tuple[list[int], list[int]]]:
  """The spans by trial: after each number of tokens of both, the nearest place where the bytes agree."""
  found, i, j = [], 0, 0
  while True:
    fits = [
      (a, b)
      for a in range(i + 1, len(first) + 1)
      for b in range(j + 1, len(second) + 1)
      if sum(first[:a]) == sum(second[:b]) <= end
    ]
    if not fits:
      return found
    a, b = min(fits)
    found.append((list(range(i, a)), list(range(j, b))))
    i, j = a, b


def groups(spans: token_spans.Spans) -> list[tuple[list[int], list[int]]]:
  count = spans.first_N.max(initial=-1) + 1
  assert spans.second_M.max(initial=-1) + 1 == count
  members = lambda span_N, k: np.flatnonzero(span_N == k).tolist()  # noqa: E731
  return [(members(spans.first_N, k), members(spans.second_M, k)) for k in range(count)]


def test_spans_are_those_of_a_plain_search():
  r = np.random.default_rng(0)
  several = 0
  for _ in range(300):
    first, second = (r.integers(1, 5, r.integers(0, 9)) for _ in range(2))
    end = int(r.integers(0, 25))
    found = groups(token_spans.align(first, second, end))
    assert found == plain_spans(first.tolist(), second.tolist(), end)
    several += len(found) > 1 and any(len(a) > 1 and len(b) > 1 for a, b in found)
  assert several > 20


@pytest.mark.parametrize('one', TOKENIZERS)
@pytest.mark.parametrize('other', TOKENIZERS)
def test_spans_of_random_text_spell_the_same(one, other):
  split = 0
  for text in texts(60, 3):
    ids = [TOKENIZERS[name]().encode(text) for name in (one, other)]
    pieces = [[table(name)[i] for i in own] for name, own in zip((one, other), ids, strict=True)]
    sizes = [np.array([len(piece) for piece in own], int) for own in pieces]
    spans = groups(token_spans.align(*sizes, len(text.encode())))
    spelled = [
      [b''.join(own[i] for i in group) for group in side]
      for own, side in zip(pieces, zip(*spans, strict=True) if spans else ((), ()), strict=True)
    ]
    assert spelled[0] == spelled[1] and b''.join(spelled[0]) == text.encode()
    split += sum(len(a) != len(b) for a, b in spans)
    assert one != other or all(len(a) == len(b) == 1 for a, b in spans)
  assert one == other or split > 20


def test_a_token_of_no_bytes_belongs_to_the_next_span():
  found = token_spans.align(np.array([2, 0, 3, 0]), np.array([2, 1, 2]), 5)
  assert found.first_N.tolist() == [0, 1, 1, -1] and found.second_M.tolist() == [0, 1, 1]


def test_text_ends_before_bytes_that_are_none_and_common_bytes_before_the_first_difference():
  assert token_spans.valid_text('a🙂'.encode()[:-1]) == 'a'
  assert token_spans.valid_text(b'a\xffb') == 'a' and token_spans.valid_text(b'') == ''
  assert token_spans.common_bytes(b'abc', b'abd') == 2 and token_spans.common_bytes(b'', b'a') == 0
  assert token_spans.common_bytes(b'abc', b'abc') == 3 == token_spans.common_bytes(b'abc', b'abcd')

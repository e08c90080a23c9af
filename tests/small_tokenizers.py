"""Small tokenizers, built on the fly: byte-level BPE, byte fallback as SentencePiece has it, and random text."""

from __future__ import annotations

import functools
import os
import random

import jax
import tokenizers
from tokenizers import decoders, normalizers, pre_tokenizers, trainers
from tokenizers import models as bpe

from jaxrl_llm import models
from jaxrl_llm.config.schema import ScratchConfig
from jaxrl_llm.models import chat_template, decoder, export
from jaxrl_llm.models.tokenizer import Tokenizer
from jaxrl_llm.types import Model, ModelConfig

WORDS = (
  'a of the sum is 12 345 7 x+y Füße naïve Привет 你好 こんにちは שלום 🙂 👩‍👩‍👧 ½ fi\n \t'.split(
    ' '
  )
)


def texts(count: int, seed: int) -> list[str]:
  """Random sentences of words in several scripts, with odd spaces."""
  r = random.Random(seed)
  return [
    ''.join(r.choice(WORDS) + r.choice(['', ' ', '  ', '\n', ', ']) for _ in range(r.randrange(30)))
    for _ in range(count)
  ]


def trained(backend: tokenizers.Tokenizer, size: int, seed: int, **options) -> Tokenizer:
  trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=['<s>', '</s>'], **options)
  backend.train_from_iterator(texts(400, seed), trainer)
  return Tokenizer(backend, chat_template.PLAIN, (1,), 1, '<s>', '</s>')


@functools.cache
def byte_level(size: int, seed: int) -> Tokenizer:
  backend = tokenizers.Tokenizer(bpe.BPE())
  backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  backend.decoder = decoders.ByteLevel()
  alphabet = pre_tokenizers.ByteLevel.alphabet()
  return trained(backend, size, seed, initial_alphabet=alphabet, show_progress=False)


@functools.cache
def byte_fallback(prefix: bool) -> Tokenizer:
  """As SentencePiece: spaces as a symbol, and unknown characters in bytes; with `prefix` a space before the text."""
  raw = {f'<0x{byte:02X}>': byte + 3 for byte in range(256)}
  pieces = ['▁', *'abcdefghijklmnopqrstuvwxyz0123456789+,', 'th', 'the', '▁the', '12', '你']
  vocab = {'<unk>': 0, '<s>': 1, '</s>': 2, **raw}
  vocab |= {piece: len(vocab) + i for i, piece in enumerate(pieces)}
  merges = [('t', 'h'), ('th', 'e'), ('▁', 'the'), ('1', '2')]
  backend = tokenizers.Tokenizer(bpe.BPE(vocab, merges, unk_token='<unk>', byte_fallback=True))
  steps = [normalizers.Prepend('▁')] if prefix else []
  backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(' ', '▁')])
  strip = [decoders.Strip(' ', 1, 0)] if prefix else []
  backend.decoder = decoders.Sequence(
    [decoders.Replace('▁', ' '), decoders.ByteFallback(), decoders.Fuse(), *strip]
  )
  backend.add_special_tokens(['<s>', '</s>'])
  return Tokenizer(backend, chat_template.PLAIN, (2,), 2, '<s>', '</s>')


@functools.cache
def smollm2() -> Tokenizer:
  return models.load('smollm2-135m').tokenizer


@functools.cache
def characters() -> Tokenizer:
  return models.load('scratch', scratch=ScratchConfig(width=16, layers=1), seed=0).tokenizer


def write_model(folder: str | os.PathLike, tokenizer: Tokenizer, seed: int = 0) -> Model:
  """A folder of a model with random weights that reads tokens of `tokenizer`."""
  config = ModelConfig(
    vocab=tokenizer.vocab_size, width=16, layers=2, heads=2, kv_heads=1, head_dim=8, mlp=32,
    max_tokens=64,
  )  # fmt: skip
  params = jax.tree.map(lambda x: 2 * x, decoder.init(config, seed))  # far from uniform
  model = Model(config, params, tokenizer, 'small')
  export.save(str(folder), model, dtype='float32')
  return model


class Letters:
  """A token is a character; 0 ends."""

  end_ids = frozenset({0})

  def encode(self, text):
    return [ord(c) for c in text]

  def decode(self, ids):
    return ''.join(chr(i) for i in ids if i)

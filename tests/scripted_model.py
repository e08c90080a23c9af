"""A tiny model folder: random bytes after most prompts, and fixed texts after some.

Its byte-level tokenizer has one token per byte, and one for each piece of the scripts. Behind such a piece the next one
follows with a probability that rounds to 1: a part of the residual stream that no layer touches names it.
"""

from __future__ import annotations

import itertools
import os

import jax
import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, pre_tokenizers
from tokenizers import models as bpe

from jaxrl_llm.models import decoder, export
from jaxrl_llm.models.tokenizer import Tokenizer
from jaxrl_llm.types import Model, ModelConfig

END = '<end>'
# Each script begins behind its first piece, which is the end of a prompt; a piece has one successor.
SCRIPTS = (
  ('STORY', 'one tw', 'o thr', 'ee fo', 'ur', END),
  ('CALL', 'I add. ', '<tool_call>', '\n{"name": "add", ', '"arguments": {"a": 2}}', '</tool_call>', END),
  ('CUT', 'So: ', '<tool_call>{"name": "add", "argu', '</tool_call>', END),
  ('OTHER', '<tool_call>{"name": "remove", "arguments": {}}', '</tool_call>'),
  ('LONG', 'la ', 'li ', 'la '),  # without end
)  # fmt: skip
TEMPLATE = """
{%- if tools %}<tools>{{ tools | tojson }}</tools>{% endif -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>
{{ call.function | tojson }}
</tool_call>{% endfor %}<end>
{%- elif message.role == 'tool' -%}<result>{{ message.content }}</result>
{%- else -%}{{ message.content }}{%- endif -%}
{%- endfor -%}
"""
_WIDTH, _LAYERS, _CONTEXT = 32, 2, 256


def write(folder: str | os.PathLike, seed: int = 0, max_tokens: int = _CONTEXT) -> Model:
  """Write the folder and return the model."""
  backend, successor = _tokenizer()
  end = backend.token_to_id(END)
  vocab = backend.get_vocab_size()
  config = ModelConfig(
    vocab=vocab, width=_WIDTH + vocab, layers=_LAYERS, heads=4, kv_heads=2, head_dim=8, mlp=48, max_tokens=max_tokens,
    tied=False,
  )  # fmt: skip
  tokenizer = Tokenizer(backend, TEMPLATE, (end,), end, '', END)
  model = Model(config, _weights(config, successor, seed), tokenizer, 'scripted')
  export.save(str(folder), model, dtype='float32')
  return model


def _tokenizer() -> tuple[tokenizers.Tokenizer, dict[int, int]]:
  """The tokenizer, and the successor of each scripted piece."""
  alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
  backend = tokenizers.Tokenizer(bpe.BPE({c: i for i, c in enumerate(alphabet)}, []))
  backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
  backend.decoder = decoders.ByteLevel()
  pieces = dict.fromkeys(piece for script in SCRIPTS for piece in script)
  backend.add_tokens([AddedToken(p, special=p == END, normalized=False) for p in pieces])
  token = backend.token_to_id
  pairs = {(token(a), token(b)) for s in SCRIPTS for a, b in itertools.pairwise(s)}
  assert len(dict(pairs)) == len(pairs)
  return backend, dict(pairs)


def _weights(config: ModelConfig, successor: dict[int, int], seed: int):
  """Random weights of `_WIDTH` features; the others carry the successor of a piece to the head."""
  random = np.random.default_rng(seed)
  params = jax.tree.map(lambda x: np.array(x), decoder.init(config, seed))
  for layer in params['layers'].values():
    for name in ('q', 'k', 'v', 'gate', 'up'):
      kernel = layer[name]['kernel']
      kernel[:_WIDTH] = random.normal(size=(_WIDTH, kernel.shape[1])) * _WIDTH**-0.5
      kernel[_WIDTH:] = 0
    for name in ('o', 'down'):
      layer[name]['kernel'][:, _WIDTH:] = 0
  embedding, head = params['embed']['embedding'], params['head']['kernel']
  embedding[:] = 0
  embedding[:, :_WIDTH] = random.normal(size=(config.vocab, _WIDTH))
  head[:] = 0
  head[:_WIDTH] = random.normal(size=(_WIDTH, config.vocab)) * 0.15
  for piece, following in successor.items():
    embedding[piece, _WIDTH + piece] = 4
    head[_WIDTH + piece, following] = 100
  return params

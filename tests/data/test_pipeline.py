"""Rows to prompts: rendering, padding, dropped rows and errors."""

from __future__ import annotations

import ml_collections
import numpy as np
import pytest

from jaxrl_llm import data
from jaxrl_llm.config import loading
from jaxrl_llm.data import pipeline
from jaxrl_llm.data.tasks import make_row
from jaxrl_llm.types import UserError


class CharTokenizer:
  """One id a character; a chat is its messages between < and >."""

  pad_id = 0
  end_ids = (1, 2)

  def encode(self, text: str) -> list[int]:
    return [ord(c) for c in text]

  def decode(self, ids) -> str:
    return ''.join(chr(i) for i in ids)

  def encode_chat(self, messages) -> list[int]:
    return self.encode(''.join(f'<{m["role"][0]} {m["content"]}>' for m in messages))


TOKENIZER = CharTokenizer()
MESSAGES = [dict(role='user', content='hi')]


def config_of(**settings) -> ml_collections.ConfigDict:
  c = loading.default()
  c.update(prompt_tokens=settings.pop('prompt_tokens', 64))
  c.data.update(dict(source='digits', size=40, chat=False) | settings)
  return c


def rendered(prompt, **settings) -> str:
  row = make_row('toy', prompt, 'answer', {})
  table = pipeline.make_table([row], config_of(**settings).data, 64, TOKENIZER)
  return TOKENIZER.decode(table.tokens[0])


def test_rendering():
  assert rendered('hi') == 'hi'
  assert rendered('{a} hi') == '{a} hi'  # a question may hold braces
  assert rendered('hi', template='Q: {question} {{}}\nA:') == 'Q: hi {}\nA:'
  assert rendered('hi', system='Be terse.') == 'Be terse.\nhi'
  assert rendered('hi', chat=True) == '<u hi>'
  assert rendered('hi', chat=True, system='S', template='{question}?') == '<s S><u hi?>'
  assert rendered(MESSAGES, chat=True) == '<u hi>'
  assert rendered(MESSAGES, chat=True, system='S') == '<s S><u hi>'
  assert rendered(MESSAGES, chat=True, template='{question}?') == '<u hi?>'
  own = [dict(role='system', content='mine'), *MESSAGES]
  assert rendered(own, chat=True, system='S') == '<s mine><u hi>'


def test_messages_refuse_what_would_be_ignored():
  with pytest.raises(UserError, match='config.data.chat=False cannot render'):
    rendered(MESSAGES, chat=False)


@pytest.mark.parametrize(
  'template, message',
  [
    ('{question} {answer}', 'has the unknown placeholder {answer}; only {question} exists.'),
    ('{question.__class__}', 'unknown placeholder {question.__class__}'),
    ('{}', 'unknown placeholder {}'),
    ('{question!r}', 'unknown placeholder'),
    ('{question', 'is no template'),
    ('Solve it.', 'has no {question}'),
  ],
)
def test_bad_templates_are_told(template, message):
  with pytest.raises(UserError) as error:
    data.load(config_of(template=template), TOKENIZER)
  assert message in str(error.value) and 'config.data.template=' in str(error.value)


def test_an_unknown_source_is_told():
  with pytest.raises(
    UserError,
    match="source='gsm' is unknown; choose one of: digits, files, games, gym, jsonl, puzzles",
  ):
    data.load(config_of(source='gsm'), TOKENIZER)


def test_prompts_are_padded_and_numbered():
  train, held_out, _ = data.load(config_of(), TOKENIZER)
  assert len(train) == 40 and len(held_out) == 200
  prompts = train.prompts([3, 0, 3])
  assert prompts.tokens_PxL.shape == (3, 64) and prompts.tokens_PxL.dtype == np.int32
  assert prompts.index_P.tolist() == [3, 0, 3] and prompts.index_P.dtype == np.int32
  assert (prompts.born_P == 0).all() and (train.prompts([1, 2], born=7).born_P == 7).all()
  for tokens, length, index in zip(*prompts[:3], strict=True):
    assert TOKENIZER.decode(tokens[:length]) == train.rows[index].question
    assert not tokens[length:].any()


@pytest.mark.parametrize('indices', [[40], [-1], [0, 100]])
def test_no_row_beyond_the_table(indices):
  train = data.load(config_of(), TOKENIZER).train
  with pytest.raises(IndexError, match='from 0 to 39'):
    train.prompts(indices)


def test_long_prompts_are_dropped_counted_and_never_cut(caplog):
  rows = [make_row('toy', 'x' * n, 'answer', {}) for n in (3, 9, 5, 6)]
  table = pipeline.make_table(rows, config_of().data, 5, TOKENIZER)
  assert [row.question for row in table.rows] == ['xxx', 'xxxxx']
  assert table.dropped == 2
  assert table.prompts([0, 1]).length_P.tolist() == [3, 5]
  assert '2 of 4 rows were dropped' in caplog.text and 'prompt_tokens=5' in caplog.text


def test_a_table_that_loses_every_row_is_told():
  with pytest.raises(UserError, match='longer than config.prompt_tokens=3; raise that: the short'):
    data.load(config_of(prompt_tokens=3), TOKENIZER)


def test_a_prompt_without_tokens_is_told():
  with pytest.raises(UserError, match='no token at all'):
    pipeline.make_table([make_row('toy', '', 'a', {})], config_of().data, 5, TOKENIZER)


def test_an_empty_held_out_set_is_a_table_of_none():
  c = config_of()
  c.evaluation.prompts = 0
  assert len(data.load(c, TOKENIZER).held_out) == 0


def test_the_fingerprint_tells_what_changed():
  def mark(**settings):
    return data.load(config_of(**settings), TOKENIZER).train.fingerprint

  assert mark() == mark() and len(mark()) == 64
  changes = [dict(seed=1), dict(size=41), dict(system='S'), dict(chat=True),
             dict(template=' {question}'), dict(prompt_tokens=65)]  # fmt: skip
  assert len({mark(), *(mark(**change) for change in changes)}) == len(changes) + 1
  other = CharTokenizer()
  other.encode = lambda text: [ord(c) + 1 for c in text]
  assert data.load(config_of(), other).train.fingerprint != mark()


def test_the_fingerprint_covers_extra_fields_and_ignores_the_order_of_sets():
  def mark(extra):
    rows = [make_row('toy', 'question', 'answer', extra)]
    return pipeline.make_table(rows, config_of().data, 20, TOKENIZER).fingerprint

  assert mark(dict(tests=[1])) != mark(dict(tests=[2]))
  assert mark(dict(a={'x', 'y', 'z'}, b=1)) == mark(dict(b=1, a={'z', 'y', 'x'}))
  assert mark(dict(a=object())) == mark(dict(a=object()))
  assert mark({1: 'a', 'b': np.arange(2)}) == mark({'b': np.arange(2), 1: 'a'})


def test_sources_are_ordered_by_their_rows():
  rows = [make_row(source, f'q{i}', 'a', {}) for i, source in enumerate('bacabcc')]
  assert pipeline.make_table(rows, config_of().data, 64, TOKENIZER).sources == ['c', 'a', 'b']

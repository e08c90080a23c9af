"""Completions from Python do not depend on the batch, and bad prompts raise errors."""

from __future__ import annotations

import types

import pytest

from jaxrl_llm import models, rollout
from jaxrl_llm.types import UserError

SCRATCH = dict(width=32, layers=2, heads=2, kv_heads=1, mlp=64, max_tokens=96)
PROMPTS = ['rev:12=', 'sort:9=', 'copy:123456=', '1', 'add:1+2=']


@pytest.fixture(scope='module')
def model():
  return models.load('scratch', scratch=SCRATCH, seed=0)


def test_completions_do_not_depend_on_how_many_prompts_run_at_once(model):
  settings = dict(n=3, max_tokens=6, chat=False)
  want = rollout.sample(model, PROMPTS, **settings)
  assert [len(texts) for texts in want] == [3] * 5 and len({t for texts in want for t in texts}) > 5
  assert rollout.sample(model, PROMPTS, at_once=2, **settings) == want
  assert rollout.sample(model, PROMPTS, seed=1, **settings) != want


def test_greedy_completions_are_all_the_same_and_top_one_is_greedy(model):
  settings = dict(n=2, max_tokens=6, chat=False)
  greedy = rollout.sample(model, PROMPTS, temperature=0.0, **settings)
  assert all(a == b for a, b in greedy)
  assert rollout.sample(model, PROMPTS, top_k=1, **settings) == greedy


def test_stream_yields_one_prompt_after_another(model):
  stream = rollout.stream(model, PROMPTS, max_tokens=3, chat=False, at_once=1)
  assert len(next(stream)) == 1 and len(list(stream)) == 4


@pytest.mark.parametrize('prompt, tokens', [('', 0), ('1' * 95, 95)])
def test_prompts_that_do_not_fit_raise_user_errors(model, prompt, tokens):
  with pytest.raises(UserError, match=f'prompt 1 has {tokens} tokens.*at most 92 for this model'):
    rollout.sample(model, ['1', prompt], max_tokens=4, chat=False)


@pytest.mark.parametrize('piece_tokens, chat', [(1, False), (5, False), (64, False), (4, True)])
def test_the_pieces_of_a_completion_add_up_to_it(model, piece_tokens, chat):
  for prompt in PROMPTS[:3]:
    (want,), *_ = rollout.sample(model, [prompt], max_tokens=16, seed=3, chat=chat)
    streamer = rollout.CompletionStreamer(
      model, max_tokens=16, chat=chat, piece_tokens=piece_tokens
    )
    pieces = list(streamer.stream(prompt, seed=3))
    assert ''.join(pieces) == want and len(pieces) <= -(-16 // piece_tokens)
  assert piece_tokens > 5 or len(pieces) > 1


def test_an_incomplete_character_is_not_yielded(model):
  """Tokens are bytes: a character of three bytes takes three pieces, and only the last has text."""
  word = 'a€b'.encode()
  decode = lambda ids: bytes(word[i] for i in range(len(ids))).decode('utf-8', 'replace')  # noqa: E731
  plain = types.SimpleNamespace(encode=model.tokenizer.encode, decode=decode, end_ids=())
  of_bytes = model._replace(tokenizer=plain)
  streamer = rollout.CompletionStreamer(of_bytes, max_tokens=5, chat=False, piece_tokens=1)
  assert list(streamer.stream('1')) == ['a', '', '', '€', 'b']


def test_an_empty_prompt_raises_a_user_error(model):
  with pytest.raises(UserError, match='has 0 tokens'):
    list(rollout.CompletionStreamer(model, max_tokens=4, chat=False).stream(''))

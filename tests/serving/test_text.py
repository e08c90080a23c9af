"""Text of completions in pieces, and the forms of tool calls in chat templates."""

from __future__ import annotations

import itertools

import pytest
import tokenizers
from tokenizers import decoders, pre_tokenizers
from tokenizers import models as bpe

from jaxrl_llm.environments import tool_format
from jaxrl_llm.environments.tool_format import ToolCall, ToolFormat
from jaxrl_llm.models import tokenizer
from jaxrl_llm.serving.text import CompletionText


@pytest.fixture(scope='module')
def byte_tokens() -> tokenizer.Tokenizer:
  alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
  backend = tokenizers.Tokenizer(bpe.BPE({c: i for i, c in enumerate(alphabet)}, []))
  backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
  backend.decoder = decoders.ByteLevel()
  return tokenizer.Tokenizer(backend, '', (0,), 0)


def spaced_words(words: list[str]) -> tokenizer.Tokenizer:
  """A decoder that drops the space at the beginning, as SentencePiece's."""
  backend = tokenizers.Tokenizer(
    bpe.WordLevel({f'▁{w}': i for i, w in enumerate(words)}, unk_token='▁a')
  )
  backend.decoder = decoders.Metaspace()
  return tokenizer.Tokenizer(backend, '', (0,), 0)


def pieces(text: CompletionText, ids: list[int]) -> list[str]:
  return [*map(text.push, ids), text.finish()]


@pytest.mark.parametrize('stops', [(), ('xyz', 'é!'), ('b', 'abc'), ('\u0301',)])
def test_pieces_join_to_the_text_before_the_first_stop_string(byte_tokens, stops):
  for words in itertools.product(('ab', 'é', 'c!', '🙂', 'xy'), repeat=4):
    whole = ''.join(words)
    text = CompletionText(byte_tokens, stops)
    found = pieces(text, byte_tokens.encode(whole))
    places = [(whole.find(stop) + len(stop), whole.find(stop)) for stop in stops if stop in whole]
    at = min(places, default=(0, len(whole)))[1]  # of the stop string that is complete first
    assert ''.join(found) == text.text == whole[:at] and text.stopped == (at < len(whole))


def test_a_half_character_at_the_end_is_no_lost_text(byte_tokens):
  ids = byte_tokens.encode('a🙂')[:-1]
  assert pieces(CompletionText(byte_tokens), ids) == ['a', '', '', '', '\ufffd']


def test_a_decoder_that_drops_the_first_space_keeps_the_others():
  words = spaced_words(['a', 'b', 'c'])
  assert (
    ''.join(pieces(CompletionText(words), [0, 1, 2, 1])) == words.decode([0, 1, 2, 1]) == 'a b c b'
  )


def test_text_is_held_from_the_mark_on(byte_tokens):
  text = CompletionText(byte_tokens, (), '<call>')
  found = pieces(text, byte_tokens.encode('a <cat> b<call>x'))
  assert ''.join(found[:-1]) == 'a <cat> b' and found[-1] == '<call>x'


HERMES = ToolFormat('<tool_call>', '</tool_call>', 'name', 'arguments')
MISTRAL = ToolFormat('[TOOL_CALLS]', '', 'name', 'arguments')
LLAMA = ToolFormat('', '', 'name', 'parameters')
# Shapes of the calls in the templates of Qwen 2.5 and 3, Mistral and Llama 3.
TEMPLATES = {
  HERMES: '<tool_call>\n{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}\n</tool_call><end>',
  MISTRAL: '[TOOL_CALLS] [{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}, "id": "1"}]</s>',
  LLAMA: '\n\n{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}<eot>',
}
CHAT = """{{ tools | tojson if tools else '' }}{% for m in messages %}{% if m.tool_calls %}<|assistant|>
{% set call = m.tool_calls[0].function %}CALL{% else %}{{ m.content }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>
{% endif %}"""


@pytest.mark.parametrize('form', TEMPLATES, ids=['hermes', 'mistral', 'llama'])
def test_the_form_of_calls_is_found_in_the_template(byte_tokens, form):
  template = CHAT.replace('CALL', TEMPLATES[form])
  assert tool_format.find(byte_tokens._replace(template=template)) == form


@pytest.mark.parametrize(
  'template, why',
  [
    (CHAT.replace("{{ tools | tojson if tools else '' }}", ''), 'renders no tools'),
    (
      CHAT.replace('CALL', '<function={{ call.name }}><parameter=a>1</parameter>'),
      'not known here',
    ),
    ('{{ raise_exception("no") if tools }}', 'refuses tools'),
  ],
)
def test_a_template_without_a_known_form_gives_a_reason(byte_tokens, template, why):
  assert why in tool_format.find(byte_tokens._replace(template=template))


ADD = '{"name": "add", "arguments": {"a": 1}}'
# form, text, content and number of calls; without calls the text stays as it is
CALLS = (
  (HERMES, f'So.<tool_call>{ADD}</tool_call>', 'So.', 1),
  (HERMES, f'<tool_call>\n{ADD}\n</tool_call>\n<tool_call>{ADD}</tool_call> ', '', 2),
  (HERMES, f'<tool_call>{ADD}', None, 0),
  (HERMES, f'<tool_call>{ADD}</tool_call> done', None, 0),
  (HERMES, f'<tool_call>{ADD}</tool_call><tool_call>{ADD[:-1]}</tool_call>', None, 0),
  (HERMES, f'<tool_call>{ADD.replace("add", "rm")}</tool_call>', None, 0),
  (HERMES, '<tool_call>{"name": "add", "arguments": "1"}</tool_call>', None, 0),
  (HERMES, '<tool_call>{"name": ["add"], "arguments": {}}</tool_call>', None, 0),
  (HERMES, '<tool_call>[1]</tool_call>', None, 0),
  (HERMES, ADD, None, 0),
  (MISTRAL, f'[TOOL_CALLS] [{ADD}, {ADD}]', '', 2),
  (MISTRAL, f'[TOOL_CALLS] {ADD}', '', 1),
  (MISTRAL, '[TOOL_CALLS] []', None, 0),
  (LLAMA, ADD.replace('arguments', 'parameters'), '', 1),
  (LLAMA, 'No: ' + ADD.replace('arguments', 'parameters'), None, 0),
  (LLAMA, '[' * 100_000, None, 0),
)


def test_calls_are_read_and_malformed_ones_stay_text():
  for form, text, content, calls in CALLS:
    want = (text if content is None else content, [ToolCall('add', dict(a=1))] * calls)
    assert form.parse(text, {'add'}) == want, text

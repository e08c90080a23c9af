"""A step in the tokens of a teacher: ends, incomplete characters, other spellings, lengths, and bad input."""

from __future__ import annotations

import re

import jax
import numpy as np
import pytest
import small_tokenizers as small
from tokenizers import normalizers

from jaxrl_llm import data
from jaxrl_llm.config import loading
from jaxrl_llm.config.schema import typed
from jaxrl_llm.distributed import sharding
from jaxrl_llm.models import chat_template, token_spans
from jaxrl_llm.runner import setup, teacher_text
from jaxrl_llm.types import Prompts, Row, UserError

T, E = 12, 16
COARSE, FINE = small.byte_level(600, 0), small.byte_level(300, 1)
ROWS = [
  Row(str(i), text, (), '12', 'digits', {}) for i, text in enumerate(('the sum is 12', '你好'))
]


def config(prompt=24, completion=E, rollouts=2, chat=False):
  c = loading.default()
  c.rollouts, c.data.chat, c.objective.teacher = rollouts, chat, 'folder'
  c.objective.distillation = dict(
    fn='on_policy_spans', teacher_prompt_tokens=prompt, teacher_completion_tokens=completion
  )
  return typed(c)


def reader(policy=COARSE, teacher=FINE, rows=ROWS, **sizes):
  return teacher_text.TeacherText(config(**sizes), policy, teacher, rows)


def built(ids, policy=COARSE, teacher=FINE, **sizes):
  """The tokens of completions `ids`, two of each prompt."""
  tokens_BxT, length_B = data.pad_rows([np.asarray(x, np.int32) for x in ids], T)
  prompts = Prompts(None, None, np.arange(len(ids) // 2)[::-1], None, None)
  rollout = data.as_rollout(tokens_BxT, length_B)
  return reader(policy, teacher, **sizes).build(prompts, rollout)


def pieces(tokenizer, ids, spans):
  """The bytes of each span."""
  table = token_spans.token_bytes(tokenizer)
  count = max(spans, default=-1) + 1
  return [
    b''.join(table[i] for i, k in zip(ids, spans, strict=True) if k == n) for n in range(count)
  ]


def test_spans_of_completions_spell_the_same_behind_the_teachers_prompts():
  texts = ['the sum is', ' naïve 12', '', 'x+y 345']
  ids = [COARSE.encode(text) for text in texts]
  tokens, metrics = built(ids)
  spans = 0
  for b, text in enumerate(texts):
    own, theirs = tokens.own_span_BxT[b], tokens.span_BxE[b]
    n, m = len(ids[b]), tokens.length_B[b]
    assert (own[:n] >= 0).all() and (own[n:] == -1).all()
    assert (theirs[:m] >= 0).all() and (theirs[m:] == -1).all()
    found = pieces(COARSE, ids[b], own[:n]), pieces(FINE, tokens.tokens_BxE[b, :m], theirs[:m])
    assert found[0] == found[1] and b''.join(found[0]).decode() == text
    prompt = ROWS[1 - b // 2].question
    assert FINE.decode(tokens.prompt_BxL[b, : tokens.prompt_length_B[b]].tolist()) == prompt
    spans += len(found[0])
  assert metrics['distillation/aligned'] == 1
  assert metrics['distillation/span_tokens'] == sum(map(len, ids)) / spans


def test_an_end_is_a_span_of_its_own_and_the_teachers_end_token():
  ids = [[*COARSE.encode('12 the'), 1], [1], COARSE.encode('12'), []]
  other = FINE._replace(end_ids=(0,), eos_token='<s>')
  both = FINE._replace(end_ids=(0, 1))  # the one with the policy's name is meant
  for teacher, end in ((FINE, 1), (other, 0), (both, 1)):
    tokens, _ = built(ids, teacher=teacher)
    last = tokens.length_B - 1
    assert tokens.tokens_BxE[0, last[0]] == tokens.tokens_BxE[1, 0] == end
    assert tokens.own_span_BxT[0, len(ids[0]) - 1] == tokens.span_BxE[0, last[0]]
    assert (tokens.span_BxE[0] == tokens.span_BxE[0, last[0]]).sum() == 1
    assert tokens.length_B.tolist()[1:] == [1, len(FINE.encode('12')), 0]


def test_an_end_is_of_no_span_where_the_text_before_it_is_not():
  half = COARSE.encode('🙂')
  table = token_spans.token_bytes(COARSE)
  cut = [i for i in range(len(table)) if table[i] == '🙂'.encode()[:1]]
  tokens, metrics = built([[*COARSE.encode('12 '), *cut], [*COARSE.encode('12 '), *cut, 1]])
  n = len(COARSE.encode('12 '))
  for b in (0, 1):
    assert (tokens.own_span_BxT[b, :n] >= 0).all() and (tokens.own_span_BxT[b, n:] == -1).all()
    assert FINE.decode(tokens.tokens_BxE[b, : tokens.length_B[b]].tolist()) == '12 '
  assert metrics['distillation/aligned'] == 2 * n / (2 * n + 3) and len(half) >= 1


def test_bytes_that_are_no_text_end_the_spans_wherever_they_are():
  table = token_spans.token_bytes(COARSE)
  bad = table.index(b'\xff')
  tokens, _ = built([[*COARSE.encode('12'), bad, *COARSE.encode('the')], [bad]])
  n = len(COARSE.encode('12'))
  assert (tokens.own_span_BxT[0] >= 0).sum() == n and tokens.length_B[1] == 0


def test_a_token_that_ends_inside_of_the_teachers_is_in_its_span():
  """Fed one byte at a time, the policy's tokens share the spans of the teacher's longer ones."""
  table = token_spans.token_bytes(COARSE)
  ids = [table.index(bytes([byte])) for byte in 'the 🙂'.encode()]
  tokens, _ = built([ids, ids], policy=COARSE, teacher=COARSE)
  own = pieces(COARSE, ids, tokens.own_span_BxT[0, : len(ids)])
  assert [x.decode() for x in own] == [table[i].decode() for i in COARSE.encode('the 🙂')]
  assert max(map(len, own)) > 1


def test_the_same_tokenizer_gives_the_same_tokens():
  letters = small.characters()
  rows = [Row('0', 'copy 12=', (), '12', 'digits', {})]
  for tokenizer, ids in (
    (COARSE, [*COARSE.encode('the sum 🙂'), 1]),
    (letters, [*letters.encode('12'), 1, 1, *letters.encode('3'), 0]),  # with unknown tokens
  ):
    text = reader(tokenizer, tokenizer, rows=rows)
    tokens, metrics = text.build(
      Prompts(None, None, np.zeros(1, int), None, None),
      data.as_rollout(*data.pad_rows([np.asarray(ids)] * 2, T)),
    )
    n = len(ids)
    assert tokens.length_B.tolist() == [n, n] and tokens.tokens_BxE[0, :n].tolist() == ids
    assert tokens.own_span_BxT[0, :n].tolist() == tokens.span_BxE[0, :n].tolist() == [*range(n)]
    assert metrics == {'distillation/aligned': 1, 'distillation/span_tokens': 1}


def test_text_that_the_teacher_spells_otherwise_ends_the_spans():
  """A normalizer joins a letter and its accent; what comes before is compared."""
  composing = small.byte_level(300, 1)._replace(
    backend=type(FINE.backend).from_str(FINE.backend.to_str())
  )
  composing.backend.normalizer = normalizers.NFC()
  ids = [*COARSE.encode('12 e\u0301 12')]
  tokens, _ = built([ids, ids], teacher=composing)
  n = (tokens.own_span_BxT[0] >= 0).sum()
  assert b''.join(pieces(COARSE, ids[:n], tokens.own_span_BxT[0, :n])) in (b'12', b'12 ')


def test_completions_longer_than_the_teachers_are_cut_to_whole_spans():
  ids = COARSE.encode('the sum is 12')
  for most in range(1, 12):
    tokens, _ = built([ids, ids], completion=most)
    n, m = (tokens.own_span_BxT[0] >= 0).sum(), tokens.length_B[0]
    found = pieces(COARSE, ids[:n], tokens.own_span_BxT[0, :n])
    assert m <= most
    assert found == pieces(FINE, tokens.tokens_BxE[0, :m], tokens.span_BxE[0, :m])
    whole = pieces(COARSE, ids, built([ids, ids])[0].own_span_BxT[0, : len(ids)])
    assert found == whole[: len(found)] and len(found) < len(whole)


def test_the_turn_of_a_chat_ends_by_the_token_of_its_template():
  ends = "('<s>' if m['role'] == 'assistant' else '</s>')"
  template = '{% for m in messages %}{{ m["content"] + ' + ends + ' }}{% endfor %}'
  chatty = FINE._replace(end_ids=(1, 0), template=template)
  assert reader(teacher=chatty, chat=True)._end == 0
  assert reader(teacher=chatty, chat=False)._end == 1
  assert reader(teacher=chatty._replace(template=chat_template.PLAIN), chat=True)._end == 1


@pytest.mark.parametrize(
  'change, sentence',
  [
    (
      dict(prompt=4),
      'config.objective.distillation.teacher_prompt_tokens=4 is too small: in the tokens of config.objective.teacher '
      'the longest prompt has 6; raise it to that.',
    ),
    (
      dict(teacher=small.byte_fallback(True)),
      "config.objective.teacher: its tokens spell b' the sum is 12\\n12' where the text is b'the sum is 12\\n12', so "
      'that no span of text is shared; name another teacher.',
    ),
  ],
)
def test_bad_input_is_one_sentence(change, sentence):
  if 'prompt' in change:
    change = dict(prompt=max(len(FINE.encode(row.question)) for row in ROWS) - 1)
    sentence = re.sub('=4', f'={change["prompt"]}', sentence)
    sentence = re.sub('has 6', f'has {change["prompt"] + 1}', sentence)
  with pytest.raises(UserError) as caught:
    reader(**change)
  assert str(caught.value) == sentence


def test_a_policy_may_write_a_space_first_but_no_other_text():
  reader(policy=small.byte_fallback(True))
  other = small.byte_level(300, 1)._replace(
    backend=type(FINE.backend).from_str(FINE.backend.to_str())
  )
  other.backend.normalizer = normalizers.Prepend('_')
  with pytest.raises(UserError, match='^config.model: its tokens spell .* name another model.$'):
    reader(policy=other)


def context_error(tmp_path, teacher='teacher', **changes):
  """The message of a run whose teacher is a folder."""
  folder = tmp_path / 'teacher'
  if not folder.exists():
    small.write_model(folder, FINE)
  name = str(folder) if teacher == 'teacher' else teacher
  sizes = dict(teacher_prompt_tokens=24, teacher_completion_tokens=16) | changes
  flags = [
    *(
      'model=scratch',
      'prompts=2',
      'rollouts=1',
      'completion_tokens=8',
      f'objective.teacher={name}',
    ),
    *('objective.advantage.fn=raw', 'objective.zero_variance.fn=keep', 'sft.steps=0'),
    f'objective.distillation.fn={sizes.pop("fn", "on_policy_spans")}',
    *(f'objective.distillation.{k}={v}' for k, v in sizes.items() if v is not None),
  ]
  c = loading.load('tiny', [f'--config.{flag}' for flag in flags])
  with pytest.raises(UserError) as caught:
    setup.build_context(c, sharding.make_mesh(c.mesh, jax.devices()[:1]))
  return str(caught.value)


def test_a_teacher_without_tokenizer_files_or_room_is_refused(tmp_path):
  message = context_error(tmp_path, teacher_completion_tokens=60)
  assert message.startswith(
    'config.objective.distillation.teacher_prompt_tokens=24 and teacher_completion_tokens=60 are 84 together, and '
    'config.objective.teacher='
  )
  assert message.endswith(' reads 64; lower one of them.')
  assert 'teacher_completion_tokens=0 must be at least 1' in context_error(
    tmp_path, teacher_completion_tokens=0
  )
  message = context_error(
    tmp_path, fn='on_policy', teacher_prompt_tokens=None, teacher_completion_tokens=None
  )
  assert message.endswith('or set --config.objective.distillation.fn=on_policy_spans.')
  (tmp_path / 'teacher/tokenizer.json').unlink()
  message = context_error(tmp_path)
  assert message.startswith('config.objective.teacher=') and 'tokenizer.json is missing' in message

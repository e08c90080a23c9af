"""Hundreds of broken model folders and GGUF files: each loads as what it says, or is refused in one sentence.

What cannot be told: a bit of a stored number that is wrong and leaves it finite. Neither format has a checksum.
"""

from __future__ import annotations

import base64
import json
import os
import pathlib
import re
import shutil
import struct
import sys
import tempfile
import types

import gguf
import hypothesis
import jax
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import strategies as st

from jaxrl_llm import models
from jaxrl_llm.models import (
  chat_template,
  decoder,
  families,
  peft,
  tokenizer,
  tokenizer_backend,
  untrusted,
)
from jaxrl_llm.types import UserError

SETTINGS = dict(
  derandomize=True, deadline=None, database=None, print_blob=False,
  suppress_health_check=list(hypothesis.HealthCheck),
)  # fmt: skip
CONFIG = dict(
  model_type='llama', vocab_size=13, hidden_size=8, intermediate_size=12, num_hidden_layers=1,
  num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=32, tie_word_embeddings=True,
)  # fmt: skip
D, F, V = 8, 12, 13


def weights() -> dict[str, np.ndarray]:
  shapes = {
    'model.embed_tokens.weight': (V, D), 'model.norm.weight': (D,),
    **{f'model.layers.0.{n}_layernorm.weight': (D,) for n in ('input', 'post_attention')},
    **{f'model.layers.0.self_attn.{n}_proj.weight': (D, D) for n in 'qo'},
    **{f'model.layers.0.self_attn.{n}_proj.weight': (D // 2, D) for n in 'kv'},
    **{f'model.layers.0.mlp.{n}_proj.weight': (F, D) for n in ('gate', 'up')},
    'model.layers.0.mlp.down_proj.weight': (D, F),
  }  # fmt: skip
  r = np.random.default_rng(0)
  return {name: r.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.fixture(scope='module')
def whole(tmp_path_factory) -> pathlib.Path:
  """A model folder with every file that is read, its weights in one file and an index that says so."""
  folder = tmp_path_factory.mktemp('whole')
  for name, value in dict(
    config=CONFIG, generation_config=dict(eos_token_id=0), tokenizer_config=dict(eos_token='<end>')
  ).items():
    (folder / f'{name}.json').write_text(json.dumps(value))
  index = dict(metadata={}, weight_map=dict.fromkeys(weights(), 'model.safetensors'))
  (folder / 'model.safetensors.index.json').write_text(json.dumps(index))
  safetensors.numpy.save_file(weights(), folder / 'model.safetensors')
  tokenizer.characters('abcdefghi').backend.save(str(folder / 'tokenizer.json'))
  (folder / 'chat_template.jinja').write_text(chat_template.PLAIN)
  return folder


@pytest.fixture(scope='module')
def single(tmp_path_factory) -> pathlib.Path:
  """A GGUF file of the same shape."""
  path = tmp_path_factory.mktemp('single') / 'm.gguf'
  made = gguf.GGUFWriter(str(path), 'llama')
  for add, value in (
    (made.add_block_count, 1), (made.add_context_length, 32), (made.add_embedding_length, D),
    (made.add_feed_forward_length, F), (made.add_head_count, 2), (made.add_head_count_kv, 1),
    (made.add_layer_norm_rms_eps, 1e-5), (made.add_tokenizer_model, 'gpt2'),
    (made.add_tokenizer_pre, 'smollm'), (made.add_token_list, ['<end>', *'abcdefghijk', 'ab']),
    (made.add_token_types, [3] + [1] * 12), (made.add_token_merges, ['a b']),
    (made.add_eos_token_id, 0),
  ):  # fmt: skip
    add(value)
  short = {
    'model.embed_tokens': 'token_embd', 'model.norm': 'output_norm',
    'model.layers.0.input_layernorm': 'blk.0.attn_norm',
    'model.layers.0.post_attention_layernorm': 'blk.0.ffn_norm',
    **{f'model.layers.0.self_attn.{n}_proj': f'blk.0.attn_{n}' for n in 'qkv'},
    'model.layers.0.self_attn.o_proj': 'blk.0.attn_output',
    **{f'model.layers.0.mlp.{n}_proj': f'blk.0.ffn_{n}' for n in ('gate', 'up', 'down')},
  }  # fmt: skip
  for name, value in weights().items():
    made.add_tensor(short[name.removesuffix('.weight')] + '.weight', value)
  made.write_header_to_file()
  made.write_kv_data_to_file()
  made.write_tensors_to_file()
  made.close()
  return path


def outcome(path: str | os.PathLike) -> tuple[models.load, str]:
  """(the model, ''), or (None, the one sentence of a refusal)."""
  try:
    model = models.load(os.fspath(path))
  except UserError as error:
    told = str(error)
    assert '\n' not in told and told.endswith('.') and 'config.model' in told, told
    assert REMEDY.search(told), told
    return None, told
  for leaf in jax.tree.leaves(model.params):
    assert leaf.dtype == np.float32 and np.isfinite(leaf).all()
  assert model.params['embed']['embedding'].shape == (model.config.vocab, model.config.width)
  assert max(model.tokenizer.encode('abc<end>')) < model.config.vocab
  model.tokenizer.chat([dict(role='user', content='abc')])
  return model, ''


REMEDY = re.compile('again|save|use |choose|supported|give|different models|take |set |put|trust')


class Broken:
  """A copy of a folder, to be broken."""

  def __init__(self, whole):
    self.held = tempfile.TemporaryDirectory()
    self.path = pathlib.Path(self.held.name, 'copy')
    shutil.copytree(whole, self.path)

  def __enter__(self):
    return self.path

  def __exit__(self, *_):
    self.held.cleanup()


def test_the_whole_ones_load(whole, single):
  for path in (whole, single):
    model, told = outcome(path)
    assert not told and model.tokenizer.end_ids == (0,)
    assert model.config.vocab == V and model.config.kv_heads == 1


FILES = [
  'config.json', 'generation_config.json', 'tokenizer_config.json', 'model.safetensors.index.json',
  'model.safetensors', 'tokenizer.json',
]  # fmt: skip


@hypothesis.settings(max_examples=60, **SETTINGS)
@hypothesis.given(st.sampled_from(FILES), st.floats(0, 1, exclude_max=True))
def test_a_truncated_file_is_refused(whole, name, share):
  with Broken(whole) as folder:
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[: int(share * len(data))])
    _, told = outcome(folder)
    assert name in told


@hypothesis.settings(max_examples=100, **SETTINGS)
@hypothesis.given(st.sampled_from(FILES), st.floats(0, 1, exclude_max=True), st.integers(1, 255))
def test_flipped_bytes_are_refused_or_leave_a_model(whole, name, share, bits):
  """In tensors themselves they may pass; there and in names they leave a model of the right shapes."""
  with Broken(whole) as folder:
    data = bytearray((folder / name).read_bytes())
    head = min(len(data), 1200)  # of the weights mostly the header
    data[int(share * head)] ^= bits
    (folder / name).write_bytes(data)
    outcome(folder)


NONSENSE = [
  None, True, -1, 0, 1.5, 10**6, 10**12, 2**63, 'x', '', [], [1], {}, {'a': 1}, float('nan'), float('inf'), 1e300, 7
]  # fmt: skip
ROPE = [
  dict(rope_type='yarn'), dict(rope_type='yarn', factor=0), dict(rope_type='llama3', factor=8.0),
  dict(rope_type='linear', factor='x'), dict(rope_type='linear', factor=0.0), dict(rope_type=[1]),
  dict(rope_type='yarn', factor=-1.0), dict(rope_type='linear', factor=float('nan')), [1], 'x',
  dict(rope_type='yarn', factor=4.0, original_max_position_embeddings=-3),
]  # fmt: skip
FIELDS = [
  *CONFIG, 'head_dim', 'rope_theta', 'rms_norm_eps', 'eos_token_id', 'attention_bias', 'mlp_bias',
  'use_sliding_window', 'stray',
]  # fmt: skip


# Of families that say more than CONFIG does. Each is read; of its fields any may be nonsense.
SAID = dict(
  gemma3_text=dict(
    head_dim=4, query_pre_attn_scalar=4, sliding_window=3, sliding_window_pattern=2, layer_types=None,
    final_logit_softcapping=5.0, rope_local_base_freq=1e4, rope_parameters=None, hidden_activation='silu',
  ),
  gemma2=dict(head_dim=4, attn_logit_softcapping=5.0),
  qwen3_moe=dict(
    head_dim=4, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=6, norm_topk_prob=True, mlp_only_layers=[],
    decoder_sparse_step=1,
  ),
  smollm3=dict(no_rope_layers=None, no_rope_layer_interval=2, sliding_window=3, use_sliding_window=True),
  qwen2=dict(max_window_layers=1, sliding_window=3, use_sliding_window=True),
  mistral=dict(sliding_window=3),
)  # fmt: skip


@pytest.mark.parametrize('family', SAID)
@hypothesis.settings(max_examples=60, **SETTINGS)
@hypothesis.given(st.data())
def test_whatever_a_familys_config_says_it_is_a_model_or_one_sentence(family, data):
  raw = CONFIG | dict(model_type=family) | SAID[family]
  assert families.read(raw, 'here').family == family
  field = data.draw(st.sampled_from(sorted(SAID[family])))
  value = data.draw(st.sampled_from([*NONSENSE, ['odd'] * 2, *ROPE]))
  try:
    config = families.read(raw | {field: value}, 'here')
  except UserError as error:
    assert str(error).startswith('here') and field
    return
  hash(config)  # the compiled program is kept by it
  decoder.abstract_params(config)


@hypothesis.settings(max_examples=100, **SETTINGS)
@hypothesis.given(
  st.one_of(
    st.tuples(st.sampled_from(FIELDS), st.sampled_from(NONSENSE)),
    st.tuples(st.just('rope_scaling'), st.sampled_from(ROPE)),
  )
)
@hypothesis.example(('num_hidden_layers', 10**9))
@hypothesis.example(('hidden_size', 10**12))
@hypothesis.example(('num_attention_heads', 0))
@hypothesis.example(('vocab_size', 4))
def test_a_nonsensical_config_allocates_nothing(whole, change):
  field, value = change
  with Broken(whole) as folder:
    (folder / 'config.json').write_text(json.dumps(CONFIG | {field: value}))
    model, told = outcome(folder)
    if field in ('vocab_size', 'hidden_size', 'num_hidden_layers') and value not in (True, 7):
      assert told and ('config.json' in told), (field, value)


def _plus(**more):
  return lambda tensors: tensors.update(more)


Q, N = 'model.layers.0.self_attn.q_proj.weight', 'model.norm.weight'


@pytest.mark.parametrize(
  'change, text',
  [
    (lambda t: t.pop(Q), f'{Q!r} cannot be read'),
    (_plus(**{'model.layers.1.input_layernorm.weight': np.zeros(8, np.float32)}), ''),
    (_plus(**{Q: np.zeros((8, 8, 1), np.float32)}), 'has shape (8, 8, 1) where config.json requires (8, 8)'),
    (_plus(**{Q: np.zeros((0, 8), np.float32)}), 'has shape (0, 8)'),
    (_plus(**{N: np.zeros(8, np.int64)}), 'is of type I64; save the weights as one of F64, F32, F16, BF16'),
    (_plus(**{N: np.zeros(8, bool)}), 'is of type BOOL'),
    (_plus(**{N: np.full(8, np.nan, np.float32)}), 'contains a number that is not finite'),
    (_plus(**{N: np.full(8, np.inf, np.float16)}), 'contains a number that is not finite'),
    (lambda t: t.clear(), 'cannot be read'),
  ],
)  # fmt: skip
def test_other_tensors(whole, change, text):
  with Broken(whole) as folder:
    tensors = weights()
    change(tensors)
    safetensors.numpy.save_file(tensors, folder / 'model.safetensors')
    assert text in outcome(folder)[1]


@pytest.mark.parametrize(
  'name, said', [('model.layers.0.self_attn.q_proj.bias', 'bias'), ('a', "'a'")]
)
def test_a_tensor_too_many_is_refused_and_a_tied_head_is_not(whole, name, said):
  with Broken(whole) as folder:
    (folder / 'model.safetensors.index.json').unlink()
    extra = {name: np.zeros(8, np.float32)}
    safetensors.numpy.save_file(weights() | extra, folder / 'model.safetensors')
    told = outcome(folder)[1]
    assert said in told and 'which config.json does not describe' in told
    tied = {'lm_head.weight': weights()['model.embed_tokens.weight']}
    safetensors.numpy.save_file(weights() | tied, folder / 'model.safetensors')
    assert outcome(folder)[1] == ''


@pytest.mark.parametrize(
  'file',
  ['../other.safetensors', '/etc/passwd', 'sub/x.safetensors', '..', '', 'a\x00b', 3, None, ['x'], {'a': 'b'}],
)  # fmt: skip
def test_an_index_that_leads_out_of_the_folder(whole, file):
  with Broken(whole) as folder:
    shutil.copy(folder / 'model.safetensors', folder.parent / 'other.safetensors')
    index = dict(weight_map=dict.fromkeys(weights(), file))
    (folder / 'model.safetensors.index.json').write_text(json.dumps(index))
    assert outcome(folder)[1]


@pytest.mark.parametrize(
  'name', ['model.safetensors', 'config.json', 'tokenizer.json', 'chat_template.jinja']
)
def test_a_link_out_of_the_folder_is_refused_and_the_hubs_own_are_not(whole, name, tmp_path):
  outside = tmp_path / 'outside'
  shutil.copy(whole / name, outside)
  with Broken(whole) as folder:
    (folder / name).unlink()
    (folder / name).symlink_to(outside)
    assert 'is a link out of the folder' in outcome(folder)[1]
  hub = tmp_path / 'models--a--b'
  shutil.copytree(whole, hub / 'snapshots' / 'abc')
  (hub / 'blobs').mkdir()
  shutil.move(hub / 'snapshots' / 'abc' / name, hub / 'blobs' / '1234')
  (hub / 'snapshots' / 'abc' / name).symlink_to('../../blobs/1234')
  assert outcome(hub / 'snapshots' / 'abc')[1] == ''


@pytest.mark.parametrize('name', ['pytorch_model.bin', 'model.pt', 'model.ckpt', 'model.pkl'])
def test_pickles_are_refused_by_name_and_never_opened(whole, name):
  with Broken(whole) as folder:
    (folder / 'model.safetensors').unlink()
    (folder / 'model.safetensors.index.json').unlink()
    # Whoever unpickles this fails the test.
    (folder / name).write_bytes(b'cbuiltins\nexit\n(I3\ntR.')
    assert 'only pickled weights, which are never loaded' in outcome(folder)[1]
    index = dict(weight_map=dict.fromkeys(weights(), name))
    (folder / 'model.safetensors.index.json').write_text(json.dumps(index))
    assert 'is no safetensors file' in outcome(folder)[1]
    shutil.copy(folder / name, folder / 'model.safetensors')
    (folder / 'model.safetensors.index.json').unlink()
    assert 'truncated or not a safetensors file' in outcome(folder)[1]


@pytest.mark.parametrize(
  'name, value, text',
  [
    ('generation_config.json', dict(eos_token_id=99), 'names the end token 99'),
    ('generation_config.json', dict(eos_token_id='0'), "names the end token '0'"),
    ('generation_config.json', dict(eos_token_id=[0, [1]]), 'names the end token [1]'),
    ('generation_config.json', dict(eos_token_id={}), 'names the end token {}'),
    ('generation_config.json', dict(eos_token_id=True), 'names the end token True'),
    ('tokenizer_config.json', dict(chat_template=3), 'chat_template=3 must be text'),
    ('tokenizer_config.json', dict(chat_template=[1, dict(name='default')]), 'chat_template=None must be'),
    ('tokenizer_config.json', dict(eos_token=3, bos_token=dict(content=[1])), ''),
    ('tokenizer.json', {}, 'tokenizer.json is missing or unreadable'),
    ('tokenizer.json', [], 'tokenizer.json is missing or unreadable'),
  ],
)  # fmt: skip
def test_other_tokenizers(whole, name, value, text):
  with Broken(whole) as folder:
    (folder / 'chat_template.jinja').unlink()
    (folder / name).write_text(json.dumps(value))
    told = outcome(folder)[1]
    assert text in told and bool(text) == bool(told)


def test_a_tokenizer_of_another_vocabulary(whole):
  """One with more tokens than the model is told; one with fewer or with other words for the same is not."""
  with Broken(whole) as folder:
    tokenizer.characters('abcdefghijklmnopq').backend.save(str(folder / 'tokenizer.json'))
    told = outcome(folder)[1]
    assert 'tokenizer.json has a token 18 and config.json a vocab_size=13' in told


@hypothesis.settings(max_examples=150, **SETTINGS)
@hypothesis.given(
  st.floats(0, 1, exclude_max=True),
  st.sampled_from(['cut', 'flip', 'huge', 'text']),
  st.integers(1, 255),
)
def test_a_broken_gguf_file_is_refused_or_leaves_a_model(single, share, how, bits):
  data = bytearray(single.read_bytes())
  head = data.find(b'blk.0.attn_output') + 200  # most of metadata and tensor descriptions
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder, 'm.gguf')
    at = int(share * (len(data) if how == 'cut' else head))
    if how == 'cut':
      data = data[:at]
    elif how == 'flip':
      data[at] ^= bits
    else:
      data[at : at + 8] = struct.pack('<Q', 2**60) if how == 'huge' else b'\xff' * 8
    path.write_bytes(data)
    _, told = outcome(path)
    # The last bytes pad the last tensor.
    assert told or how != 'cut' or at > len(data) - 32


@pytest.mark.parametrize(
  'name', ['tokenizer.ggml.token_type', 'tokenizer.ggml.tokens', 'general.architecture']
)
def test_absurd_lengths_in_a_gguf_file_are_refused_at_once(single, tmp_path, name):
  """The reader of the gguf package would walk over 2**60 items that are not there."""
  data = bytearray(single.read_bytes())
  at = data.find(name.encode()) + len(name)
  kind = struct.unpack_from('<I', data, at)[0]
  where = at + 4 + (4 if kind == 9 else 0)
  data[where : where + 8] = struct.pack('<Q', 2**60)
  (tmp_path / 'm.gguf').write_bytes(data)
  told = outcome(tmp_path / 'm.gguf')[1]
  assert 'not a complete GGUF file' in told and str(2**60) in told


ATTACKS = [
  "{{ ''.__class__.__mro__ }}",
  "{{ ''.__class__.__base__.__subclasses__() }}",
  '{{ messages.__init__.__globals__ }}',
  "{{ cycler.__init__.__globals__.os.system('true') }}",
  "{{ raise_exception.__globals__['json'] }}",
  "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
  "{% include '/etc/passwd' %}",
  "{% import 'os' as os %}{{ os }}",
  "{% extends 'x' %}",
  '{{ messages.append(1) }}',
  "{% set _ = messages[0].update({'content': 'x'}) %}",
  '{{ 1 / 0 }}',
  '{{ undefined.attribute }}',
  '{{ range(10**12)|list }}',
  '{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}',
  "{{ raise_exception('two\nlines') }}",
  '{{ messages|tojson(indent=[]) }}',
  '{{ strftime_now(3) }}',
  "{{ 'x'|nothing }}",
  '{% if %}',
  '{' * 1000,
]
BOMBS = [
  '{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}',
  "{{ 'a' * 10**11 }}",
  "{% set ns = namespace(s='aaaaaaaa') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
  '{{ 10**(10**9) }}',
]


@pytest.mark.parametrize('template', ATTACKS)
def test_templates_reach_nothing_and_fail_in_a_sentence(template):
  made = tokenizer.characters('abc')._replace(template=template)
  messages = [dict(role='user', content='abc')]
  with pytest.raises(UserError) as error:
    made.chat(messages)
  assert '\n' not in str(error.value) and 'chat template of config.model refuses' in str(
    error.value
  )
  assert messages == [dict(role='user', content='abc')]


@pytest.mark.parametrize('template', BOMBS)
def test_templates_without_end_are_found_by_a_trial(whole, template, monkeypatch):
  monkeypatch.setattr(chat_template, '_CPU_S', 1)
  assert ' GiB for a conversation of four lines' in chat_template.find_problem(template)


@pytest.mark.parametrize('text', ['', 'x'])
def test_a_trial_reads_packages_from_where_this_process_does(text, monkeypatch):
  """Of a user's own folder, or of PYTHONPATH, an isolated interpreter would find none."""
  monkeypatch.setattr(
    untrusted.sys, 'executable', shutil.which('python3', path='/usr/bin') or sys.executable
  )
  assert chat_template.find_problem(text + '{{ messages[0].content }}') == ''


@pytest.mark.parametrize(
  'name',
  ['config.json', 'model.safetensors', 'model.safetensors.index.json', 'tokenizer.json', 'tokenizer_config.json',
   'generation_config.json', 'chat_template.jinja'],
)  # fmt: skip
@pytest.mark.parametrize('what', ['a named pipe', 'a folder', 'a device'])
@pytest.mark.parametrize('index', [True, False])
def test_a_file_of_a_model_that_is_none_is_refused_and_not_waited_for(whole, name, what, index):
  with Broken(whole) as folder:
    if not index:
      (folder / 'model.safetensors.index.json').unlink()
    replace_by(folder / name, what)
    told = outcome(folder)[1]
    # A device is a link out of the folder.
    assert name in told and (what in told or what == 'a device')


def replace_by(path: pathlib.Path, what: str) -> None:
  path.unlink(missing_ok=True)
  if what == 'a named pipe':
    os.mkfifo(path)
  elif what == 'a folder':
    path.mkdir()
  else:
    path.symlink_to('/dev/zero')


@pytest.mark.parametrize('name', ['m.gguf', 'm.whl'])
@pytest.mark.parametrize('what', ['a named pipe', 'a device'])
def test_a_model_file_that_is_none_is_refused(tmp_path, name, what):
  replace_by(tmp_path / name, what)
  for path in (tmp_path / name, tmp_path):
    assert f'is {what}, not a file' in outcome(path)[1]


@pytest.mark.parametrize('what', ['a named pipe', 'a folder', 'a device'])
@pytest.mark.parametrize('name', ['adapter_model.safetensors', 'adapter_config.json'])
def test_a_file_of_an_adapter_that_is_none_is_refused(tmp_path, name, what):
  (tmp_path / 'adapter_model.safetensors').write_bytes(b'')
  (tmp_path / 'adapter_config.json').write_text('{"r": 1, "lora_alpha": 1}')
  replace_by(tmp_path / name, what)
  settings = types.SimpleNamespace(rank=1, alpha=1, names=('q',))
  with pytest.raises(UserError, match=f'config.lora.init.*{name}.*(is {what}|is a link)'):
    peft.load(str(tmp_path), families.read(CONFIG, 'here'), settings)


def hostile(**changes) -> dict:
  vocab = {'<end>': 0, '<unk>': 1, 'a': 2}
  model = dict(type='WordLevel', vocab=vocab, unk_token='<unk>')
  token = dict(id=0, content='<end>', special=True)
  token |= dict.fromkeys(('single_word', 'lstrip', 'rstrip', 'normalized'), False)
  nothing = dict.fromkeys(
    ('truncation', 'padding', 'normalizer', 'pre_tokenizer', 'post_processor', 'decoder')
  )
  return dict(version='1.0', added_tokens=[token], model=model) | nothing | changes


def replaced(pattern: dict, content: str, times: int, of: str = 'normalizers') -> dict:
  return {'type': 'Sequence', of: [dict(type='Replace', pattern=pattern, content=content)] * times}


def of_characters(data: bytes) -> dict:
  return dict(type='Precompiled', precompiled_charsmap=base64.b64encode(data).decode())


def splitting(regex: str) -> dict:
  return dict(type='Split', pattern=dict(Regex=regex), behavior='Isolated', invert=False)


HOSTILE = dict(
  endless=dict(normalizer=replaced(dict(String='a'), 'aa', 40)),
  endless_for_any_text=dict(normalizer=replaced(dict(Regex='.'), 'xx', 40)),
  large=dict(normalizer=replaced(dict(String='a'), 'aa', 12)),
  long=dict(normalizer=dict(type='Sequence', normalizers=[dict(type='Prepend', prepend='x' * 10**6)] * 1000)),
  endless_when_decoded=dict(decoder=replaced(dict(Regex='.'), 'xx', 40, 'decoders')),
  large_when_decoded=dict(decoder=replaced(dict(Regex='.'), 'xx', 10, 'decoders')),
  panics=dict(normalizer=of_characters(b'')),
  aborts=dict(normalizer=of_characters(b'\xff\xff\xff\x7f' + bytes(8))),
  panics_when_decoding=dict(decoder=dict(type='Strip', content='a', start=10**18, stop=10**18)),
)  # fmt: skip


@pytest.mark.parametrize('name', HOSTILE)
def test_a_hostile_tokenizer_is_found_by_a_trial(whole, name, monkeypatch):
  monkeypatch.setattr(tokenizer_backend, '_CPU_S', 3)
  with Broken(whole) as folder:
    (folder / 'tokenizer.json').write_text(json.dumps(hostile(**HOSTILE[name])))
    assert 'tokenizer.json cannot be used: it ' in outcome(folder)[1]


@pytest.mark.parametrize(
  'changes',
  [
    dict(model=dict(type='WordLevel', vocab={'<end>': 0, 'abc': 1}, unk_token='<x>')),
    dict(
      model=dict(
        type='WordPiece',
        vocab={'<end>': 0, 'abc': 1},
        unk_token='[UNK]',
        continuing_subword_prefix='##',
        max_input_chars_per_word=100,
      )
    ),
    # More tries than the library allows; it panics.
    dict(pre_tokenizer=splitting('^(q+q+)+$')),
  ],
)
def test_a_tokenizer_that_fails_on_some_texts_is_told_when_it_does(whole, changes):
  with Broken(whole) as folder:
    (folder / 'tokenizer.json').write_text(json.dumps(hostile(**changes)))
    words = outcome(folder)[0].tokenizer
    with pytest.raises(UserError, match="tokenizer of config.model fails on 'q.*another model"):
      words.encode('q' * 60 + '1')


@pytest.mark.parametrize('call', [
  lambda words: words.encode('a'), lambda words: words.encode_plain('a'),
  lambda words: words.decode([2]), lambda words: words.token_texts(),
])  # fmt: skip
def test_a_panic_of_the_library_is_one_sentence(call):
  class PanicException(BaseException):
    """As pyo3 has it: no Exception."""

  class Backend:
    vocab_size = get_vocab_size = lambda self: 1

    def encode(self, *args, **keywords):
      raise PanicException('index out of bounds\nmore')

    decode = decode_batch = encode

  with pytest.raises(UserError, match='fails on .*index out of bounds') as caught:
    call(tokenizer.Tokenizer(Backend(), '', (0,), 0))
  assert '\n' not in str(caught.value)


@pytest.mark.parametrize('error', [KeyboardInterrupt, SystemExit])
def test_what_ends_a_process_is_no_fault_of_a_tokenizer(error, monkeypatch):
  words = tokenizer.characters('abc')._replace(backend=types.SimpleNamespace())
  words.backend.decode = lambda *a, **k: (_ for _ in ()).throw(error)
  with pytest.raises(error):
    words.decode([1])

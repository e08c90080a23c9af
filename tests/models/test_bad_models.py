"""Hundreds of broken model folders and GGUF files: each loads correctly or is refused with one sentence.

A wrong bit that leaves a number finite is not detected: neither format has a checksum.
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
def model_folder(tmp_path_factory) -> pathlib.Path:
  """A model folder with every file that is read, its weights in one file with an index."""
  folder = tmp_path_factory.mktemp('model')
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
def gguf_path(tmp_path_factory) -> pathlib.Path:
  """A GGUF file of the same shape."""
  path = tmp_path_factory.mktemp('gguf') / 'm.gguf'
  writer = gguf.GGUFWriter(str(path), 'llama')
  for add, value in (
    (writer.add_block_count, 1), (writer.add_context_length, 32), (writer.add_embedding_length, D),
    (writer.add_feed_forward_length, F), (writer.add_head_count, 2), (writer.add_head_count_kv, 1),
    (writer.add_layer_norm_rms_eps, 1e-5), (writer.add_tokenizer_model, 'gpt2'),
    (writer.add_tokenizer_pre, 'smollm'), (writer.add_token_list, ['<end>', *'abcdefghijk', 'ab']),
    (writer.add_token_types, [3] + [1] * 12), (writer.add_token_merges, ['a b']),
    (writer.add_eos_token_id, 0),
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
    writer.add_tensor(short[name.removesuffix('.weight')] + '.weight', value)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return path


def outcome(path: str | os.PathLike) -> tuple[models.load, str]:
  """(the model, ''), or (None, the error message)."""
  try:
    model = models.load(os.fspath(path))
  except UserError as error:
    message = str(error)
    assert '\n' not in message and message.endswith('.') and 'config.model' in message, message
    assert REMEDY.search(message), message
    return None, message
  for leaf in jax.tree.leaves(model.params):
    assert leaf.dtype == np.float32 and np.isfinite(leaf).all()
  assert model.params['embed']['embedding'].shape == (model.config.vocab, model.config.width)
  assert max(model.tokenizer.encode('abc<end>')) < model.config.vocab
  model.tokenizer.chat([dict(role='user', content='abc')])
  return model, ''


REMEDY = re.compile('again|save|use |choose|supported|give|different models|take |set |put|trust')


class Broken:
  """A copy of a folder, to be broken."""

  def __init__(self, model_folder):
    self.directory = tempfile.TemporaryDirectory()
    self.path = pathlib.Path(self.directory.name, 'copy')
    shutil.copytree(model_folder, self.path)

  def __enter__(self):
    return self.path

  def __exit__(self, *_):
    self.directory.cleanup()


def test_intact_models_load(model_folder, gguf_path):
  for path in (model_folder, gguf_path):
    model, message = outcome(path)
    assert not message and model.tokenizer.end_ids == (0,)
    assert model.config.vocab == V and model.config.kv_heads == 1


FILES = [
  'config.json', 'generation_config.json', 'tokenizer_config.json', 'model.safetensors.index.json',
  'model.safetensors', 'tokenizer.json',
]  # fmt: skip


@hypothesis.settings(max_examples=60, **SETTINGS)
@hypothesis.given(st.sampled_from(FILES), st.floats(0, 1, exclude_max=True))
def test_a_truncated_file_is_refused(model_folder, name, share):
  with Broken(model_folder) as folder:
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[: int(share * len(data))])
    _, message = outcome(folder)
    assert name in message


@hypothesis.settings(max_examples=100, **SETTINGS)
@hypothesis.given(st.sampled_from(FILES), st.floats(0, 1, exclude_max=True), st.integers(1, 255))
def test_flipped_bytes_are_refused_or_leave_a_model(model_folder, name, share, bits):
  """In the data of tensors and in names they may pass, and leave a model with the right shapes."""
  with Broken(model_folder) as folder:
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


# Further fields of families, each of which is replaced by nonsense.
FAMILY_FIELDS = dict(
  gemma3_text=dict(
    head_dim=4, query_pre_attn_scalar=4, sliding_window=3, sliding_window_pattern=2, layer_types=None,
    final_logit_softcapping=5.0, rope_local_base_freq=1e4, rope_parameters=None, hidden_activation='silu',
  ),
  gemma4_text=dict(
    head_dim=4, global_head_dim=6, num_global_key_value_heads=1, attention_k_eq_v=True, sliding_window=3,
    layer_types=None, rope_parameters=None, hidden_size_per_layer_input=0, num_kv_shared_layers=0, num_experts=4,
    use_double_wide_mlp=True, vocab_size_per_layer_input=13,
    enable_moe_block=True, top_k_experts=2, moe_intermediate_size=6, final_logit_softcapping=5.0, per_layer_config=None,
    use_bidirectional_attention='vision',
  ),
  gemma4=dict(
    num_hidden_layers=4, head_dim=4, global_head_dim=6, sliding_window=3, num_kv_shared_layers=2,
    layer_types=['sliding_attention', 'full_attention'] * 2, hidden_size_per_layer_input=3,
    vocab_size_per_layer_input=13, use_double_wide_mlp=True,
  ),
  gemma2=dict(head_dim=4, attn_logit_softcapping=5.0),
  qwen3_moe=dict(
    head_dim=4, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=6, norm_topk_prob=True, mlp_only_layers=[],
    decoder_sparse_step=1,
  ),
  smollm3=dict(no_rope_layers=None, no_rope_layer_interval=2, sliding_window=3, use_sliding_window=True),
  qwen2=dict(max_window_layers=1, sliding_window=3, use_sliding_window=True),
  mistral=dict(sliding_window=3),
  granite=dict(embedding_multiplier=2.0, attention_multiplier=0.5, residual_multiplier=0.5, logits_scaling=3.0),
  olmo3=dict(sliding_window=3, layer_types=None, rope_parameters=None, rope_scaling=None),
  ministral3=dict(rope_parameters=dict(rope_type='yarn', factor=2.0, original_max_position_embeddings=8,
                                       llama_4_scaling_beta=0.1), head_dim=4),
  phi3=dict(original_max_position_embeddings=8, partial_rotary_factor=0.5, sliding_window=3, rope_scaling=dict(
    rope_type='longrope', short_factor=[1.0], long_factor=[2.0])),
  qwen2_moe=dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=6, shared_expert_intermediate_size=8,
                 mlp_only_layers=[], decoder_sparse_step=1, qkv_bias=True),
  olmoe=dict(num_experts=4, num_experts_per_tok=2, clip_qkv=None),
  granitemoe=dict(num_local_experts=4, num_experts_per_tok=2, residual_multiplier=0.5),
  glm4_moe=dict(n_routed_experts=4, num_experts_per_tok=2, head_dim=4, moe_intermediate_size=6, n_group=2, topk_group=1,
                first_k_dense_replace=0, n_shared_experts=1, routed_scaling_factor=2.0, partial_rotary_factor=0.5),
  deepseek_v3=dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=6, n_group=2, topk_group=1,
                   first_k_dense_replace=0, n_shared_experts=1, routed_scaling_factor=2.0, kv_lora_rank=6,
                   q_lora_rank=5, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=3, rope_interleave=True,
                   rope_scaling=None),
  llama4_text=dict(num_local_experts=4, num_experts_per_tok=2, head_dim=4, intermediate_size_mlp=5, no_rope_layers=None,
                   no_rope_layer_interval=2, moe_layers=None, interleave_moe_layer_step=1, attention_chunk_size=3,
                   use_qk_norm=True, attn_scale=0.1, floor_scale=7, layer_types=None),
  gpt_oss=dict(num_local_experts=4, num_experts_per_tok=2, head_dim=4, swiglu_alpha=1.7, swiglu_limit=7.0,
               sliding_window=3, layer_types=None, rope_scaling=None, rope_parameters=None),
  qwen3_next=dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=6, shared_expert_intermediate_size=8,
                  head_dim=8, decoder_sparse_step=1, layer_types=None, linear_num_key_heads=1),
  qwen3_5_text=dict(head_dim=4, full_attention_interval=2, partial_rotary_factor=0.5, rope_parameters=None,
                    linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=3, linear_value_head_dim=5,
                    linear_conv_kernel_dim=3),
)  # fmt: skip


@pytest.mark.parametrize('family', FAMILY_FIELDS)
@hypothesis.settings(max_examples=60, **SETTINGS)
@hypothesis.given(st.data())
def test_any_family_config_is_a_model_or_one_sentence(family, data):
  raw = CONFIG | dict(model_type=family) | FAMILY_FIELDS[family]
  assert families.read(raw, 'here').family == family
  field = data.draw(st.sampled_from(sorted(FAMILY_FIELDS[family])))
  value = data.draw(st.sampled_from([*NONSENSE, ['odd'] * 2, *ROPE]))
  try:
    config = families.read(raw | {field: value}, 'here')
  except UserError as error:
    assert str(error).startswith('here') and field
    return
  hash(config)  # it is a key of the cache of compiled programs
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
def test_a_nonsensical_config_allocates_nothing(model_folder, change):
  field, value = change
  with Broken(model_folder) as folder:
    (folder / 'config.json').write_text(json.dumps(CONFIG | {field: value}))
    model, message = outcome(folder)
    if field in ('vocab_size', 'hidden_size', 'num_hidden_layers') and value not in (True, 7):
      assert message and ('config.json' in message), (field, value)


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
def test_other_tensors(model_folder, change, text):
  with Broken(model_folder) as folder:
    tensors = weights()
    change(tensors)
    safetensors.numpy.save_file(tensors, folder / 'model.safetensors')
    assert text in outcome(folder)[1]


@pytest.mark.parametrize(
  'name, words', [('model.layers.0.self_attn.q_proj.bias', 'bias'), ('a', "'a'")]
)
def test_an_unexpected_tensor_is_refused_and_a_tied_head_is_not(model_folder, name, words):
  with Broken(model_folder) as folder:
    (folder / 'model.safetensors.index.json').unlink()
    extra = {name: np.zeros(8, np.float32)}
    safetensors.numpy.save_file(weights() | extra, folder / 'model.safetensors')
    message = outcome(folder)[1]
    assert words in message and 'which config.json does not describe' in message
    tied = {'lm_head.weight': weights()['model.embed_tokens.weight']}
    safetensors.numpy.save_file(weights() | tied, folder / 'model.safetensors')
    assert outcome(folder)[1] == ''


@pytest.mark.parametrize(
  'file',
  ['../other.safetensors', '/etc/passwd', 'sub/x.safetensors', '..', '', 'a\x00b', 3, None, ['x'], {'a': 'b'}],
)  # fmt: skip
def test_an_index_that_leads_out_of_the_folder(model_folder, file):
  with Broken(model_folder) as folder:
    shutil.copy(folder / 'model.safetensors', folder.parent / 'other.safetensors')
    index = dict(weight_map=dict.fromkeys(weights(), file))
    (folder / 'model.safetensors.index.json').write_text(json.dumps(index))
    assert outcome(folder)[1]


@pytest.mark.parametrize(
  'name', ['model.safetensors', 'config.json', 'tokenizer.json', 'chat_template.jinja']
)
def test_a_link_out_of_the_folder_is_refused_and_the_hubs_own_are_not(model_folder, name, tmp_path):
  outside = tmp_path / 'outside'
  shutil.copy(model_folder / name, outside)
  with Broken(model_folder) as folder:
    (folder / name).unlink()
    (folder / name).symlink_to(outside)
    assert 'is a link out of the folder' in outcome(folder)[1]
  hub = tmp_path / 'models--a--b'
  shutil.copytree(model_folder, hub / 'snapshots' / 'abc')
  (hub / 'blobs').mkdir()
  shutil.move(hub / 'snapshots' / 'abc' / name, hub / 'blobs' / '1234')
  (hub / 'snapshots' / 'abc' / name).symlink_to('../../blobs/1234')
  assert outcome(hub / 'snapshots' / 'abc')[1] == ''


@pytest.mark.parametrize('name', ['pytorch_model.bin', 'model.pt', 'model.ckpt', 'model.pkl'])
def test_pickles_are_refused_by_name_and_never_opened(model_folder, name):
  with Broken(model_folder) as folder:
    (folder / 'model.safetensors').unlink()
    (folder / 'model.safetensors.index.json').unlink()
    # Unpickling this ends the process, and fails the test.
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
def test_other_tokenizers(model_folder, name, value, text):
  with Broken(model_folder) as folder:
    (folder / 'chat_template.jinja').unlink()
    (folder / name).write_text(json.dumps(value))
    message = outcome(folder)[1]
    assert text in message and bool(text) == bool(message)


def test_a_tokenizer_of_another_vocabulary(model_folder):
  """More tokens than embeddings are refused; fewer tokens or other texts are not."""
  with Broken(model_folder) as folder:
    tokenizer.characters('abcdefghijklmnopq').backend.save(str(folder / 'tokenizer.json'))
    message = outcome(folder)[1]
    assert 'tokenizer.json has a token 18 and config.json a vocab_size=13' in message


@hypothesis.settings(max_examples=150, **SETTINGS)
@hypothesis.given(
  st.floats(0, 1, exclude_max=True),
  st.sampled_from(['cut', 'flip', 'huge', 'text']),
  st.integers(1, 255),
)
def test_a_broken_gguf_file_is_refused_or_leaves_a_model(gguf_path, share, how, bits):
  data = bytearray(gguf_path.read_bytes())
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
    _, message = outcome(path)
    # The last bytes pad the last tensor.
    assert message or how != 'cut' or at > len(data) - 32


@pytest.mark.parametrize(
  'name', ['tokenizer.ggml.token_type', 'tokenizer.ggml.tokens', 'general.architecture']
)
def test_absurd_lengths_in_a_gguf_file_are_refused_at_once(gguf_path, tmp_path, name):
  """The reader of the gguf package would iterate over 2**60 items that do not exist."""
  data = bytearray(gguf_path.read_bytes())
  at = data.find(name.encode()) + len(name)
  kind = struct.unpack_from('<I', data, at)[0]
  where = at + 4 + (4 if kind == 9 else 0)
  data[where : where + 8] = struct.pack('<Q', 2**60)
  (tmp_path / 'm.gguf').write_bytes(data)
  message = outcome(tmp_path / 'm.gguf')[1]
  assert 'not a complete GGUF file' in message and str(2**60) in message


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
def test_templates_access_nothing_and_fail_with_a_sentence(template):
  codec = tokenizer.characters('abc')._replace(template=template)
  messages = [dict(role='user', content='abc')]
  with pytest.raises(UserError) as error:
    codec.chat(messages)
  assert '\n' not in str(error.value) and 'chat template of config.model refuses' in str(
    error.value
  )
  assert messages == [dict(role='user', content='abc')]


@pytest.mark.parametrize('template', BOMBS)
def test_endless_templates_are_found_by_the_probe(model_folder, template, monkeypatch):
  monkeypatch.setattr(chat_template, '_CPU_S', 1)
  assert ' GiB for a conversation of four lines' in chat_template.find_problem(template)


@pytest.mark.parametrize('text', ['', 'x'])
def test_the_probe_imports_packages_from_the_same_paths(text, monkeypatch):
  """An isolated interpreter ignores PYTHONPATH and the user's site-packages."""
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
def test_model_files_that_are_no_files_are_refused_without_blocking(
  model_folder, name, what, index
):
  with Broken(model_folder) as folder:
    if not index:
      (folder / 'model.safetensors.index.json').unlink()
    replace_by(folder / name, what)
    message = outcome(folder)[1]
    # A device is a link out of the folder.
    assert name in message and (what in message or what == 'a device')


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
def test_a_model_path_that_is_no_file_is_refused(tmp_path, name, what):
  replace_by(tmp_path / name, what)
  for path in (tmp_path / name, tmp_path):
    assert f'is {what}, not a file' in outcome(path)[1]


@pytest.mark.parametrize('what', ['a named pipe', 'a folder', 'a device'])
@pytest.mark.parametrize('name', ['adapter_model.safetensors', 'adapter_config.json'])
def test_adapter_files_that_are_no_files_are_refused(tmp_path, name, what):
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
def test_a_hostile_tokenizer_is_found_by_the_probe(model_folder, name, monkeypatch):
  monkeypatch.setattr(tokenizer_backend, '_CPU_S', 3)
  with Broken(model_folder) as folder:
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
    # More backtracking than the library allows: it panics.
    dict(pre_tokenizer=splitting('^(q+q+)+$')),
  ],
)
def test_a_tokenizer_that_fails_on_some_texts_raises_for_these(model_folder, changes):
  with Broken(model_folder) as folder:
    (folder / 'tokenizer.json').write_text(json.dumps(hostile(**changes)))
    codec = outcome(folder)[0].tokenizer
    with pytest.raises(UserError, match="tokenizer of config.model fails on 'q.*another model"):
      codec.encode('q' * 60 + '1')


@pytest.mark.parametrize('call', [
  lambda codec: codec.encode('a'), lambda codec: codec.encode_plain('a'),
  lambda codec: codec.decode([2]), lambda codec: codec.token_texts(),
])  # fmt: skip
def test_a_panic_of_the_library_is_one_sentence(call):
  class PanicException(BaseException):
    """Like pyo3's: derived from BaseException."""

  class Backend:
    vocab_size = get_vocab_size = lambda self: 1

    def encode(self, *args, **keywords):
      raise PanicException('index out of bounds\nmore')

    decode = decode_batch = encode

  with pytest.raises(UserError, match='fails on .*index out of bounds') as caught:
    call(tokenizer.Tokenizer(Backend(), '', (0,), 0))
  assert '\n' not in str(caught.value)


@pytest.mark.parametrize('error', [KeyboardInterrupt, SystemExit])
def test_signals_are_not_reported_as_errors_of_the_tokenizer(error, monkeypatch):
  codec = tokenizer.characters('abc')._replace(backend=types.SimpleNamespace())
  codec.backend.decode = lambda *a, **k: (_ for _ in ()).throw(error)
  with pytest.raises(error):
    codec.decode([1])

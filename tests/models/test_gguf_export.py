"""Models written as GGUF files, loaded by transformers and by this package: the same logits and the same tokens."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
import tokenizers

from jaxrl_llm import models
from jaxrl_llm.commands.export import export_checkpoint
from jaxrl_llm.config import loading
from jaxrl_llm.models import chat_template, decoder, export, gguf_export, gguf_file, tokenizer
from jaxrl_llm.types import Model, ModelConfig, UserError

torch = pytest.importorskip('torch')
transformers = pytest.importorskip('transformers')

from tests.models.test_parity import _texts, padded, their_logits  # noqa: E402

SPLITS = ('smollm', 'qwen2', 'llama-bpe')
BASE = ModelConfig(
  vocab=700, width=64, layers=2, heads=4, kv_heads=2, head_dim=16, mlp=96, max_tokens=128
)
CASES = {
  'llama': dict(family='llama', norm_eps=1e-6, rope_theta=5e4),
  'qwen2': dict(family='qwen2', qkv_bias=True, tied=False),
  'qwen3': dict(
    family='qwen3', qk_norm='head', head_dim=128
  ),  # the only one that transformers knows
  # Sizes that files state and transformers does not read: it takes those of its default config.
  'qwen3_moe': dict(
    family='qwen3_moe', qk_norm='head', head_dim=128, experts=4, experts_per_token=2, mlp=768,
    norm_top_k=True,
  ),
  'qwen2_moe': dict(
    family='qwen2_moe', qkv_bias=True, tied=False, experts=4, experts_per_token=2, mlp=1408,
    shared_mlp=5632, shared_gate=True,
  ),
}  # fmt: skip


def make_tokenizer(split='smollm'):
  """Byte-level BPE that was trained on a few texts, with special tokens of a chat."""
  backend = tokenizers.Tokenizer(tokenizers.models.BPE())
  backend.pre_tokenizer = tokenizer._pre_tokenizer(tokenizer._SPLITS[split])
  backend.decoder = tokenizers.decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=600,
    special_tokens=['<|endoftext|>', '<|im_start|>', '<|im_end|>'],
    initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
  )
  backend.train_from_iterator(_texts(), trainer)
  backend.add_tokens(['<think>'])
  ends = tuple(map(backend.token_to_id, ('<|im_end|>', '<|endoftext|>')))
  return tokenizer.Tokenizer(backend, chat_template.PLAIN, ends, ends[1], '', '<|im_end|>')


def make_model(**fields):
  config = dataclasses.replace(BASE, **fields)
  params = jax.tree.map(lambda x: x * 1.5, decoder.init(config, 0))
  keys = iter(jax.random.split(jax.random.key(1), len(jax.tree.leaves(params))))
  # Biases and norms differ from 0 and 1, so that none can be left out.
  params = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(next(keys), x.shape), params)
  return Model(config, params, make_tokenizer(), 'made')


@pytest.mark.parametrize('case', CASES)
def test_transformers_reads_the_same_model_and_so_do_we(case, tmp_path):
  model = make_model(**CASES[case])
  path = gguf_export.save(str(tmp_path / 'model.gguf'), model, dtype='float32')
  theirs = transformers.AutoModelForCausalLM.from_pretrained(
    tmp_path, gguf_file='model.gguf', dtype=torch.float32, attn_implementation='eager'
  ).eval()
  tokens, mask = padded(left=False)
  forward = jax.jit(lambda p: decoder.forward(model.config, p, tokens, mask))
  ours = np.asarray(forward(model.params))
  assert np.abs(ours - their_logits(theirs, tokens, mask))[mask].max() <= 2e-4
  config, params, _ = gguf_file.load(path)
  eps = float(np.float32(model.config.norm_eps))  # the file holds float32
  assert config == dataclasses.replace(model.config, norm_eps=eps)
  jax.tree.map(np.testing.assert_array_equal, params, model.params)


@pytest.mark.parametrize('dtype, bound', [('bfloat16', 2**-8), ('float16', 2**-11), ('q8_0', 0.01)])
def test_matrices_are_rounded_to_the_type_of_the_file(dtype, bound, tmp_path):
  model = make_model(**CASES['qwen2'])
  path = gguf_export.save(str(tmp_path / 'model.gguf'), model, dtype=dtype)
  for (where, got), want in zip(
    jax.tree_util.tree_leaves_with_path(gguf_file.load(path)[1]),
    jax.tree.leaves(model.params),
    strict=True,
  ):
    # Eight bits have one scale for 32 numbers, the others round each number.
    size = np.abs(want).max() if dtype == 'q8_0' else np.abs(want)
    assert (np.abs(got - want) <= (bound * size + 2**-24 if want.ndim == 2 else 0)).all(), where
    assert want.ndim < 2 or np.abs(got - want).max() > 0


@pytest.mark.parametrize('split', SPLITS)
def test_tokens_and_chat_survive(split, tmp_path):
  made = make_tokenizer(split)
  model = make_model(**CASES['llama'])._replace(tokenizer=made)
  path = gguf_export.save(str(tmp_path / 'model.gguf'), model)
  again = models.load(path).tokenizer
  for text in [*_texts(), '<|im_start|>user\n<think>hm</think><|im_end|>']:
    assert again.encode(text) == made.encode(text)
    assert again.encode_plain(text) == made.encode_plain(text)
  assert set(again.end_ids) == set(made.end_ids) and again.pad_id == made.pad_id
  assert (again.template, again.bos_token, again.eos_token) == (made.template, '', '<|im_end|>')
  fields = tokenizer.to_gguf(made, model.config.vocab)
  assert fields['tokenizer.ggml.pre'] == split and not fields['tokenizer.ggml.add_bos_token']
  assert [fields['tokenizer.ggml.token_type'].count(kind) for kind in (3, 4)] == [3, 1]
  assert fields['tokenizer.ggml.token_type'][made.vocab_size :] == [5] * (700 - made.vocab_size)


def test_transformers_reads_the_same_tokens(tmp_path):
  model = make_model(**CASES['qwen2'])._replace(tokenizer=make_tokenizer('qwen2'))
  gguf_export.save(str(tmp_path / 'model.gguf'), model)
  theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file='model.gguf')
  for text in _texts():
    assert theirs.encode(text, add_special_tokens=False) == model.tokenizer.encode(text)


def refusal(tmp_path, model, **keywords):
  with pytest.raises(UserError) as caught:
    gguf_export.save(str(tmp_path / 'model.gguf'), model, **keywords)
  assert not list(tmp_path.iterdir())
  return str(caught.value)


def test_what_a_file_cannot_hold_is_refused(tmp_path):
  window = make_model(**CASES['qwen2'], window=8, sliding=(True, True))
  assert "has no window=8 for the family 'qwen2'" in refusal(tmp_path, window)
  scaled = make_model(**CASES['llama'], rope_scaling=(('factor', 8.0), ('rope_type', 'linear')))
  assert 'has no rope_scaling' in refusal(tmp_path, scaled)
  gemma = make_model(family='gemma2', norms='both')
  assert "family 'gemma2' cannot be written as a GGUF file" in refusal(tmp_path, gemma)
  characters = make_model(**CASES['llama'])._replace(tokenizer=tokenizer.characters('abc'))
  assert 'needs byte-level BPE with one of the splits smollm' in refusal(tmp_path, characters)
  assert "--dtype='q4' is unknown for a GGUF file" in refusal(tmp_path, make_model(), dtype='q4')


def test_the_export_mode_writes_a_file_where_to_names_one(tmp_path):
  folder, path = str(tmp_path / 'folder'), str(tmp_path / 'model.gguf')
  model = make_model(**CASES['llama'])
  export.save(folder, model, dtype='float32')
  config = loading.load('tiny', [f'--config.model={folder}'])
  run = str(tmp_path / 'run')
  export_checkpoint(config, run, path, 'float32', base=True)
  loaded = models.load(path)
  jax.tree.map(np.testing.assert_array_equal, loaded.params, model.params)
  assert loaded.tokenizer.encode('12 + 3') == model.tokenizer.encode('12 + 3')
  config.lora.rank = 2
  with pytest.raises(UserError, match="--to='.*model.gguf' is a GGUF file; name a folder"):
    export_checkpoint(config, run, path, 'float32', adapter=True, base=True)

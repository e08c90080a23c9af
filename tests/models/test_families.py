"""Families against transformers in float32: logits, cached decoding, the update's forward pass, and exports."""

from __future__ import annotations

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.config import loading as configs
from jaxrl_llm.distributed import sharding
from jaxrl_llm.learner import lora
from jaxrl_llm.learner.spec_from_config import make_spec
from jaxrl_llm.models import (
  attention,
  decoder,
  export,
  families,
  huggingface,
  layer_loops,
  peft,
  positions,
  shared_prompt_forward,
)
from jaxrl_llm.rollout import slot_loop
from jaxrl_llm.types import Model, Prompts, UserError

torch = pytest.importorskip('torch')
transformers = pytest.importorskip('transformers')
import safetensors.torch  # noqa: E402

from tests.models import test_parity, torch_float64  # noqa: E402
from tests.models.test_parity import SIZES, reference, their_logits  # noqa: E402

YARN = dict(rope_type='yarn', factor=4.0, original_max_position_embeddings=16, rope_theta=1e4)
LLAMA3 = dict(
  rope_type='llama3',
  rope_theta=5e5,
  factor=8.0,
  low_freq_factor=1.0,
  high_freq_factor=4.0,
  original_max_position_embeddings=16,
)
PLAIN = dict(rope_type='default', rope_theta=1e3)
ODD = dict(num_attention_heads=3, num_key_value_heads=1, head_dim=10)
# Phi-3 has no head_dim of its own.
ODD_WIDTH = dict(hidden_size=36, num_attention_heads=3, num_key_value_heads=1)
_MULTIPLIERS = dict(
  embedding_multiplier=3.0,
  attention_multiplier=0.3,
  residual_multiplier=0.4,
  logits_scaling=1.7,
)
_LATE = dict(YARN, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.3)
_LONG = dict(
  rope_type='longrope',
  rope_theta=1e4,
  original_max_position_embeddings=64,
  short_factor=[1.0, 1.1, 1.5],
  long_factor=[1.0, 3.0, 7.0],
)
_PHI3 = dict(pad_token_id=None, original_max_position_embeddings=64)

_MIXTURE = dict(num_local_experts=5, num_experts_per_tok=2)
_QWEN = dict(
  num_experts=5,
  num_experts_per_tok=2,
  moe_intermediate_size=24,
  shared_expert_intermediate_size=36,
)

_GLM = dict(n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=24)
_DEEPSEEK = dict(
  _GLM,
  num_key_value_heads=4,
  kv_lora_rank=12,
  q_lora_rank=20,
  qk_rope_head_dim=8,
  qk_nope_head_dim=10,
  v_head_dim=14,
  n_group=3,
  topk_group=2,
  first_k_dense_replace=1,
)
_LLAMA4 = dict(
  _MIXTURE,
  head_dim=12,
  intermediate_size_mlp=40,
  attention_chunk_size=7,
  floor_scale=64,
  attn_scale=0.5,
  pad_token_id=None,
  eos_token_id=None,  # `generate` would replace it by another token
)
_GEMMA4 = dict(
  head_dim=12,
  global_head_dim=20,
  hidden_size_per_layer_input=0,
  sliding_window=5,
  final_logit_softcapping=3.0,
  eos_token_id=None,
)
_GEMMA4_MOE = dict(enable_moe_block=True, num_experts=5, top_k_experts=2, moe_intermediate_size=24)
# As in E2B and E4B: the last layers attend to keys and values of earlier ones, and layers have inputs of their own.
_READERS = dict(
  _GEMMA4,
  hidden_size_per_layer_input=8,
  vocab_size_per_layer_input=104,
  num_kv_shared_layers=2,
  num_hidden_layers=4,
)
_SLIDING, _FULL = 'sliding_attention', 'full_attention'
_ONE_GROUP = dict(n_group=1, topk_group=1)
_SMOLLM3 = dict(pad_token_id=None, attention_bias=True)
_GEMMA = dict(sliding_window=5, query_pre_attn_scalar=24)
# The last of four layers attends.
_DELTA = dict(
  num_hidden_layers=4,
  head_dim=16,
  linear_num_key_heads=2,
  linear_num_value_heads=4,
  linear_key_head_dim=8,
  linear_value_head_dim=12,
)
_ODD_DELTA = dict(
  ODD,
  layer_types=['full_attention', 'linear_attention', 'linear_attention'],
  linear_num_key_heads=3,
  linear_num_value_heads=3,
  linear_key_head_dim=7,
  linear_value_head_dim=5,
  linear_conv_kernel_dim=3,
  attention_bias=True,
)
_TIED_DELTA = dict(
  _DELTA,
  tie_word_embeddings=True,
  rope_parameters=dict(PLAIN, partial_rotary_factor=0.5),
  layer_types=['linear_attention', 'full_attention'] * 2,
)

# Name → class and settings of its config.
CASES = {
  'granite': ('Granite', _MULTIPLIERS),
  'granite-odd': ('Granite', dict(_MULTIPLIERS, **ODD, attention_bias=True, mlp_bias=True)),
  'granite-tied-yarn': (
    'Granite',
    dict(_MULTIPLIERS, tie_word_embeddings=True, rope_parameters=dict(YARN)),
  ),
  'olmo3': (
    'Olmo3',
    dict(
      num_hidden_layers=4,
      sliding_window=5,
      pad_token_id=None,
      rope_parameters=dict(full_attention=dict(YARN), sliding_attention=dict(PLAIN)),
    ),
  ),
  'olmo3-odd': ('Olmo3', dict(ODD, sliding_window=7, pad_token_id=None, tie_word_embeddings=True)),
  'olmo3-full': (
    'Olmo3',
    dict(layer_types=['full_attention'] * 3, pad_token_id=None, attention_bias=True),
  ),
  'ministral3': ('Ministral3', dict(head_dim=16, rope_parameters=_LATE, pad_token_id=None)),
  'ministral3-odd': ('Ministral3', dict(ODD, sliding_window=6, pad_token_id=None)),
  'ministral3-tied': (
    'Ministral3',
    dict(head_dim=24, tie_word_embeddings=True, rope_parameters=_LATE, pad_token_id=None),
  ),
  'phi3': (
    'Phi3',
    dict(_PHI3, rope_parameters=dict(_LONG, partial_rotary_factor=0.5)),
  ),
  'phi3-odd': ('Phi3', dict(_PHI3, **ODD_WIDTH, sliding_window=6, tie_word_embeddings=True)),
  'phi3-rotated': (
    'Phi3',
    dict(
      _PHI3,
      num_attention_heads=3,
      num_key_value_heads=3,
      rope_parameters=dict(PLAIN, partial_rotary_factor=0.75),
    ),
  ),
  'mixtral': ('Mixtral', dict(_MIXTURE)),
  'mixtral-odd': ('Mixtral', dict(_MIXTURE, **ODD, sliding_window=6)),
  'mixtral-tied': (
    'Mixtral',
    dict(_MIXTURE, head_dim=12, tie_word_embeddings=True, rope_parameters=dict(YARN)),
  ),
  'olmoe': ('Olmoe', dict(_MIXTURE, pad_token_id=None)),
  'olmoe-norm': ('Olmoe', dict(_MIXTURE, pad_token_id=None, norm_topk_prob=True, **ODD_WIDTH)),
  'olmoe-tied': (
    'Olmoe',
    dict(_MIXTURE, pad_token_id=None, tie_word_embeddings=True, attention_bias=True),
  ),
  'qwen2_moe': ('Qwen2Moe', dict(_QWEN, mlp_only_layers=[1], num_hidden_layers=4)),
  'qwen2_moe-window': (
    'Qwen2Moe',
    dict(_QWEN, use_sliding_window=True, sliding_window=5, max_window_layers=2, qkv_bias=False),
  ),
  'qwen2_moe-tied': (
    'Qwen2Moe',
    dict(_QWEN, **ODD_WIDTH, tie_word_embeddings=True, norm_topk_prob=True),
  ),
  'qwen3_moe': ('Qwen3Moe', dict(_QWEN, head_dim=16, decoder_sparse_step=2, num_hidden_layers=5)),
  'qwen3_moe-odd': ('Qwen3Moe', dict(_QWEN, **ODD, mlp_only_layers=[0, 1], norm_topk_prob=True)),
  'granitemoe': ('GraniteMoe', dict(_MULTIPLIERS, **_MIXTURE)),
  'granitemoe-odd': ('GraniteMoe', dict(_MULTIPLIERS, **_MIXTURE, **ODD_WIDTH)),
  'granitemoe-tied': ('GraniteMoe', dict(_MULTIPLIERS, **_MIXTURE, tie_word_embeddings=True)),
  'glm4_moe': (
    'Glm4Moe',
    dict(_GLM, head_dim=16, n_group=3, topk_group=2, routed_scaling_factor=1.8, use_qk_norm=True),
  ),
  'glm4_moe-odd': ('Glm4Moe', dict(_GLM, **(ODD | dict(head_dim=12)), attention_bias=True)),
  'glm4_moe-tied': (
    'Glm4Moe',
    dict(
      _GLM,
      head_dim=16,
      tie_word_embeddings=True,
      norm_topk_prob=False,
      first_k_dense_replace=0,
      n_shared_experts=2,
    ),
  ),
  'deepseek_v3': (
    'DeepseekV3',
    dict(_DEEPSEEK, rope_parameters=dict(YARN, mscale=1.0, mscale_all_dim=0.7)),
  ),
  'deepseek_v3-odd': (
    'DeepseekV3',
    dict(
      _DEEPSEEK,
      **_ONE_GROUP,
      q_lora_rank=None,
      num_attention_heads=3,
      num_key_value_heads=3,
      v_head_dim=7,
      rope_interleave=False,
      attention_bias=True,
    ),
  ),
  'deepseek_v3-tied': (
    'DeepseekV3',
    dict(
      _DEEPSEEK,
      tie_word_embeddings=True,
      norm_topk_prob=False,
      first_k_dense_replace=0,
      n_shared_experts=2,
      attention_bias=True,
      rope_parameters=dict(YARN),
    ),
  ),
  'glm4_moe_lite-groups': ('Glm4MoeLite', dict(_DEEPSEEK, rms_norm_eps=1e-3)),
  'glm4_moe_lite-types': (
    'Glm4MoeLite',
    dict(
      _DEEPSEEK,
      **_ONE_GROUP,
      mlp_layer_types=['sparse', 'dense', 'sparse'],
      rope_interleave=False,
      rope_parameters=dict(YARN, mscale=1.0, mscale_all_dim=0.7),
    ),
  ),
  'llama4': (
    'Llama4',
    dict(_LLAMA4, num_hidden_layers=4, interleave_moe_layer_step=2, rope_parameters=dict(LLAMA3)),
  ),
  'llama4-odd': ('Llama4', dict(_LLAMA4, **ODD, no_rope_layer_interval=2, use_qk_norm=False)),
  'llama4-tied': (
    'Llama4',
    dict(
      _LLAMA4,
      tie_word_embeddings=True,
      attention_bias=True,
      moe_layers=[0, 2],
      no_rope_layers=[0, 1, 1],
      attn_temperature_tuning=False,
    ),
  ),
  'gpt_oss': (
    'GptOss',
    dict(_MIXTURE, head_dim=16, sliding_window=5, rope_parameters=dict(YARN, truncate=False)),
  ),
  'gpt_oss-odd': (
    'GptOss',
    dict(_MIXTURE, **ODD, sliding_window=7, rope_parameters=PLAIN, swiglu_limit=1.0),
  ),
  'gpt_oss-tied': (
    'GptOss',
    dict(_MIXTURE, head_dim=24, tie_word_embeddings=True, attention_bias=False),
  ),
}
# Of the families of test_parity.py, which has their first cases.
CASES |= {name: test_parity.CASES[name] for name in ('llama', 'qwen2', 'olmo2', 'gemma2', 'gemma3')}
CASES |= {
  'qwen3': ('Qwen3', dict(ODD)),
  'mistral': ('Mistral', dict(sliding_window=5, rope_parameters=PLAIN)),
  'mistral-odd': ('Mistral', dict(ODD, sliding_window=None)),
  'mistral-tied': ('Mistral', dict(head_dim=14, sliding_window=9, tie_word_embeddings=True)),
  'smollm3': ('SmolLM3', dict(_SMOLLM3, no_rope_layer_interval=2)),
  'smollm3-odd': (
    'SmolLM3',
    dict(_SMOLLM3, **ODD_WIDTH, no_rope_layers=[0, 1, 1], tie_word_embeddings=False),
  ),
  'olmo2-odd': ('Olmo2', dict(ODD_WIDTH, pad_token_id=None, rope_parameters=PLAIN)),
  'olmo2-tied': ('Olmo2', dict(pad_token_id=None, tie_word_embeddings=True, attention_bias=True)),
  'gemma2-odd': ('Gemma2', dict(_GEMMA, **ODD, attn_logit_softcapping=None)),
  'gemma2-full': ('Gemma2', dict(_GEMMA, head_dim=14, layer_types=['full_attention'] * 3)),
  'gemma3-odd': ('Gemma3', dict(_GEMMA, **ODD, num_hidden_layers=4, attention_bias=True)),
  'gemma3-full': ('Gemma3', dict(_GEMMA, head_dim=14, layer_types=['full_attention'] * 3)),
  'glm4_moe_lite': ('Glm4MoeLite', dict(_DEEPSEEK, tie_word_embeddings=True, n_shared_experts=2)),
}
CASES |= {
  'qwen3_next': ('Qwen3Next', dict(_DELTA, **_QWEN, mlp_only_layers=[1])),
  'qwen3_next-odd': ('Qwen3Next', dict(_ODD_DELTA, **_QWEN, norm_topk_prob=False)),
  'qwen3_next-tied': ('Qwen3Next', dict(_TIED_DELTA, **_QWEN, decoder_sparse_step=2)),
  'qwen3_5': ('Qwen3_5', dict(_DELTA)),
  'qwen3_5-odd': ('Qwen3_5', dict(_ODD_DELTA)),
  'qwen3_5-tied': ('Qwen3_5', dict(_TIED_DELTA)),
  'qwen3_5_moe': ('Qwen3_5Moe', dict(_DELTA, **_QWEN)),
  'qwen3_5_moe-odd': ('Qwen3_5Moe', dict(_ODD_DELTA, **_QWEN)),
  'qwen3_5_moe-tied': ('Qwen3_5Moe', dict(_TIED_DELTA, **_QWEN)),
}
CASES |= {
  'gemma4': (
    'Gemma4',
    dict(_GEMMA4, num_hidden_layers=7, attention_k_eq_v=True, num_global_key_value_heads=1),
  ),
  'gemma4-odd': (
    'Gemma4',
    dict(
      _GEMMA4,
      **(ODD | dict(num_attention_heads=6, num_key_value_heads=3)),
      attention_k_eq_v=True,
      num_global_key_value_heads=2,
      tie_word_embeddings=False,
      attention_bias=True,
      layer_types=['full_attention', 'sliding_attention', 'full_attention'],
    ),
  ),
  'gemma4_moe': (
    'Gemma4',
    dict(_GEMMA4, **_GEMMA4_MOE, attention_k_eq_v=True, num_global_key_value_heads=1),
  ),
  'gemma4_moe-odd': (
    'Gemma4',
    dict(
      _GEMMA4,
      **_GEMMA4_MOE,
      num_attention_heads=3,
      num_key_value_heads=3,
      layer_types=['full_attention'] * 3,
    ),
  ),
  'gemma4-full': (
    'Gemma4',
    dict(
      _GEMMA4,
      layer_types=['sliding_attention', 'sliding_attention', 'full_attention'],
      final_logit_softcapping=None,
      rope_parameters=dict(
        full_attention=dict(PLAIN), sliding_attention=dict(PLAIN, rope_theta=50.0)
      ),
    ),
  ),
}
CASES |= {
  'gemma4_readers': (
    'Gemma4',
    _READERS
    | dict(
      num_hidden_layers=7,
      num_kv_shared_layers=3,
      layer_types=[_SLIDING, _SLIDING, _FULL, _SLIDING, _SLIDING, _FULL, _FULL],
      use_double_wide_mlp=True,
    ),
  ),
  'gemma4_readers-odd': (
    'Gemma4',
    _READERS
    | ODD
    | dict(
      global_head_dim=14,
      hidden_size_per_layer_input=7,
      layer_types=[_FULL, _SLIDING, _SLIDING, _FULL],
      tie_word_embeddings=False,
      attention_bias=True,
      attention_k_eq_v=True,
      sliding_window=7,
    ),
  ),
  'gemma4_readers-moe': (
    'Gemma4',
    _READERS
    | _GEMMA4_MOE
    | dict(
      num_attention_heads=3,
      num_key_value_heads=3,
      layer_types=[_SLIDING, _FULL] * 2,
      use_double_wide_mlp=True,
    ),
  ),
  # All layers have equal sizes, and share loops.
  'gemma4_readers-equal': (
    'Gemma4',
    _READERS | dict(global_head_dim=12, num_hidden_layers=8, layer_types=[_SLIDING, _FULL] * 4),
  ),
  'gemma4-inputs': ('Gemma4', _READERS | dict(num_kv_shared_layers=0, num_hidden_layers=3)),
}
# One case of a family goes through everything.
WHOLE = tuple(case for case in CASES if '-' not in case)


@functools.partial(jax.jit, static_argnums=0)
def forward(config, params, tokens, mask):
  return decoder.forward(config, params, tokens, mask)


def rows(count, tokens, left, seed=0):
  """Tokens and mask of `count` sequences of different lengths up to `tokens`, padded on one side."""
  r = np.random.default_rng(seed)
  length = np.linspace(tokens, 1, count).astype(int)
  column = np.arange(tokens)
  mask = column >= tokens - length[:, None] if left else column < length[:, None]
  return np.where(mask, r.integers(0, 97, (count, tokens)), 5).astype(np.int32), mask


def loaded(folder, tokens):
  config, _ = huggingface.read_config(str(folder))
  return positions.for_context(config, tokens), huggingface.load_params(str(folder), config)


def assert_close(ours, theirs, mask=..., share=1e-5):
  gap, top = np.abs(np.asarray(ours) - theirs)[mask].max(), np.abs(theirs[mask]).max()
  assert gap <= 10 * share and gap <= share * top, (gap, top)


@pytest.mark.parametrize('case', CASES)
def test_logits_equal_those_of_transformers(case, tmp_path):
  """Rows up to 40 tokens padded on each side, and rows up to 300 tokens."""
  model = reference(*CASES[case])
  model.save_pretrained(tmp_path, max_shard_size='60KB')
  for count, tokens, left in ((4, 40, True), (4, 40, False), (2, 300, False)):
    config, params = loaded(tmp_path, tokens)
    tokens_BxS, mask = rows(count, tokens, left)
    ours = forward(config, params, tokens_BxS, mask)
    assert_close(ours, their_logits(model, tokens_BxS, mask), mask)


@pytest.mark.parametrize('case', WHOLE)
def test_greedy_decoding_the_update_and_an_export_agree_with_transformers(case, tmp_path):
  """Cached decoding of 5 prompts = generate, by tokens and logits; the update's scan over layers = decoding.

  40 tokens: recurrent states sum over all tokens of a row, so that an error would grow with it.
  """
  theirs = reference(*CASES[case])
  theirs.save_pretrained(tmp_path / 'theirs')
  config, params = loaded(tmp_path / 'theirs', 60)
  params = jax.tree.map(lambda x: x * np.float32(0.875), params)  # a mere copy of files would fail
  to = export.save(
    str(tmp_path / 'ours'),
    Model(config, params, None, str(tmp_path / 'theirs')),
    dtype='float32',
    shard_bytes=60_000,
  )
  theirs = transformers.AutoModelForCausalLM.from_pretrained(
    to, dtype=torch.float32, attn_implementation='eager'
  ).eval()
  torch_float64.rounded_once(theirs)
  T, left, right = 40, rows(5, 20, True), rows(5, 20, False)
  # Equal texts, padded on the side that each implementation expects.
  texts = [row[mask] for row, mask in zip(*left, strict=True)]
  for row, text in zip(right[0], texts, strict=True):
    row[: len(text)] = text
  theirs.generation_config.eos_token_id = None  # an end would stop a row, or be forbidden
  out = theirs.generate(
    torch.tensor(left[0], dtype=torch.long),
    attention_mask=torch.tensor(left[1], dtype=torch.long),
    max_new_tokens=T, do_sample=False, output_logits=True, return_dict_in_generate=True, pad_token_id=5,
  )  # fmt: skip
  logits_TxBxV = np.stack([x.numpy() for x in out.logits])
  ours_TxBxV, token_BxT = greedy(config, params, right[0], right[1].sum(1), T)
  np.testing.assert_array_equal(token_BxT, out.sequences[:, 20:].numpy())
  assert_close(ours_TxBxV, logits_TxBxV)
  update_TxBxV = update_logits(config, params, texts, token_BxT)
  assert_close(update_TxBxV, ours_TxBxV)


@pytest.mark.parametrize('text', ['Mistral', 'Ministral3'])
def test_the_text_decoder_of_a_multimodal_mistral_is_read_and_exported(text, tmp_path):
  sizes = SIZES | dict(head_dim=12, pad_token_id=None)
  vision = dict(
    model_type='pixtral', hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
    image_size=28, patch_size=14,
  )  # fmt: skip
  decoder_config = getattr(transformers, f'{text}Config')(**sizes)
  config = transformers.Mistral3Config(text_config=decoder_config.to_dict(), vision_config=vision)
  theirs = transformers.Mistral3ForConditionalGeneration(config).eval()
  theirs.save_pretrained(tmp_path / 'theirs')
  config, params = loaded(tmp_path / 'theirs', 40)
  assert config.family == text.lower() and config.tied
  tokens, mask = rows(4, 40, False)
  assert_close(forward(config, params, tokens, mask), their_logits(theirs, tokens, mask), mask)
  model = Model(config, params, None, str(tmp_path / 'theirs'))
  to = export.save(str(tmp_path / 'ours'), model, dtype='float32')
  again = transformers.AutoModelForCausalLM.from_pretrained(to, dtype=torch.float32).eval()
  assert type(again).__name__ == f'{text}ForCausalLM'
  assert_close(forward(config, params, tokens, mask), their_logits(again, tokens, mask), mask)


def test_the_text_decoder_of_a_multimodal_gemma4_is_read_and_exported(tmp_path):
  sizes = SIZES | CASES['gemma4_moe'][1]
  vision = dict(
    hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=8,
    position_embedding_size=8, patch_size=2,
  )  # fmt: skip
  text = transformers.Gemma4TextConfig(**sizes).to_dict()
  theirs = transformers.Gemma4ForConditionalGeneration(
    transformers.Gemma4Config(text_config=text, vision_config=vision)
  ).eval()
  theirs.save_pretrained(tmp_path / 'theirs')
  config, params = loaded(tmp_path / 'theirs', 40)
  tokens, mask = rows(4, 40, False)
  model = Model(config, params, None, str(tmp_path / 'theirs'))
  to = export.save(str(tmp_path / 'ours'), model, dtype='float32')
  again = transformers.AutoModelForCausalLM.from_pretrained(to, dtype=torch.float32).eval()
  assert type(again).__name__ == 'Gemma4ForCausalLM'
  ours = forward(config, params, tokens, mask)
  assert_close(ours, their_logits(again, tokens, mask), mask)
  in_text = {
    name.replace('model.language_model.', 'model.'): x for name, x in theirs.named_parameters()
  }
  for name, x in again.named_parameters():
    np.testing.assert_array_equal(x.detach().numpy(), in_text[name].detach().numpy())


@pytest.mark.parametrize(
  'changes, text',
  [
    (dict(hidden_size_per_layer_input=8, vocab_size_per_layer_input=96), 'input=96 must be at least vocab_size=97'),
    (dict(num_kv_shared_layers=7), 'num_kv_shared_layers=7 of 7 layers attend to keys .* there is none for some'),
    (dict(num_kv_shared_layers=2), 'num_kv_shared_layers=2 of 7 layers attend to keys .* there is none for some'),
    (dict(use_bidirectional_attention='all'), "use_bidirectional_attention='all' is not supported"),
    (dict(per_layer_config={'2': dict(head_dim=20), '5': dict(head_dim=24)}), 'per_layer_config=.* is not supp'),
    (dict(global_head_dim=21), 'full_attention: head_dim=21 must be even'),
    (dict(num_global_key_value_heads=3), 'full_attention: 4 heads cannot share 3 key-value heads'),
  ],
)  # fmt: skip
def test_other_variants_of_gemma4_are_refused(changes, text):
  raw = SIZES | CASES['gemma4'][1] | dict(model_type='gemma4_text') | changes
  with pytest.raises(UserError, match=text):
    families.read(raw, 'here')


def their_gradients(model, tokens, mask, weight_BxSxV):
  model.zero_grad()
  positions = np.maximum(mask.cumsum(1) - 1, 0)
  out = model(
    torch.tensor(tokens, dtype=torch.long),
    attention_mask=torch.tensor(mask, dtype=torch.long),
    position_ids=torch.tensor(positions),
  )
  (out.logits * torch.tensor(weight_BxSxV)).sum().backward()
  return {name: x.grad.numpy() for name, x in model.named_parameters()}


@pytest.mark.parametrize(
  ('case', 'remat'),
  [('gemma4_readers', False), ('gemma4_readers', True), ('gemma4_readers-equal', True)],
)
def test_gradients_of_readers_equal_those_of_torch(case, remat, tmp_path):
  """Keys and values get gradients from all layers that attend to them, also from those of other loops."""
  theirs = reference(*CASES[case])
  theirs.save_pretrained(tmp_path)
  config, params = loaded(tmp_path, 24)
  tokens, mask = rows(3, 24, False)
  tokens = np.maximum(tokens, 1)  # torch leaves out the gradient of token 0, as padding
  weight = np.random.default_rng(1).normal(size=(3, 24, 97)) * mask[..., None]
  weight = weight.astype(np.float32)
  positions = np.maximum(mask.cumsum(1) - 1, 0)

  @jax.jit
  @jax.grad
  def gradient(params):
    hidden, *_ = decoder.apply(config, params, tokens, positions, decoder.causal(mask), remat=remat)
    return (decoder.head(config, params, hidden) * weight).sum()

  ours = dict(export.named_tensors(Model(config, gradient(params), None, '')))
  expected = their_gradients(theirs, tokens, mask, weight)
  assert_gradients_close(theirs, ours, expected)


def assert_gradients_close(theirs, ours, expected):
  """In each tensor, up to a share of its largest number; experts of all layers are stored apart."""
  compared = 0
  for name, want in expected.items():
    if (got := ours.get(name)) is None:
      continue
    compared += 1
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-4 * np.abs(want).max(), err_msg=name)
  assert compared > 0.9 * len(expected)


def test_a_shared_prompt_gets_the_gradient_of_readers(tmp_path):
  """Completions behind one copy of their prompt: hidden states and gradients are those of whole rows."""
  theirs = reference(*CASES['gemma4_readers'])
  theirs.save_pretrained(tmp_path)
  config, params = loaded(tmp_path, 24)
  r = np.random.default_rng(0)
  length_P, (P, L, G, T) = np.array([9, 4], np.int32), (2, 9, 2, 8)
  prompt_PxL = r.integers(0, 97, (P, L)).astype(np.int32)
  tokens_BxT = r.integers(0, 97, (P * G, T)).astype(np.int32)
  prompts = Prompts(prompt_PxL, length_P, *[np.arange(P, dtype=np.int32)] * 3)
  weight = r.normal(size=(P * G, T, config.width)).astype(np.float32)
  start_B = np.repeat(length_P, G)
  rows_BxS, mask = np.full((P * G, L + T), 5, np.int32), np.zeros((P * G, L + T), bool)
  for b, start in enumerate(start_B):
    rows_BxS[b, : start + T] = [*prompt_PxL[b // G, :start], *tokens_BxT[b]]
    mask[b, : start + T] = True

  def shared(params, remat):
    return shared_prompt_forward.hidden(config, params, prompts, tokens_BxT, remat=remat)

  def whole(params, remat):
    del remat
    positions = np.broadcast_to(np.arange(L + T), (P * G, L + T))
    hidden, *_ = decoder.apply(config, params, rows_BxS, positions, decoder.causal(mask))
    at = start_B[:, None] - 1 + np.arange(T)
    return jnp.take_along_axis(hidden, at[..., None], axis=1)

  @functools.partial(jax.jit, static_argnums=(0, 2))
  def run(fn, params, remat):
    loss = lambda p: (fn(p, remat) * weight).sum()  # noqa: E731
    return fn(params, remat), jax.grad(loss)(params)

  want, want_slope = run(whole, params, False)
  for remat in (False, True):
    got, slope = run(shared, params, remat)
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())
    for (path, x), y in zip(
      jax.tree_util.tree_leaves_with_path(slope), jax.tree.leaves(want_slope), strict=True
    ):
      np.testing.assert_allclose(x, y, atol=2e-4 * np.abs(y).max() + 1e-6, err_msg=str(path))


def test_released_files_may_hold_keys_and_values_of_readers(tmp_path):
  """transformers has no such parameters, and the released files have them; neither reads them."""
  theirs = reference(*CASES['gemma4_readers'])
  theirs.save_pretrained(tmp_path)
  config, params = loaded(tmp_path, 40)
  file = str(tmp_path / 'model.safetensors')
  tensors = safetensors.torch.load_file(file)
  stray = {f'model.layers.5.self_attn.{n}.weight' for n in ('k_proj', 'v_proj', 'k_norm')}
  assert not stray & tensors.keys()
  safetensors.torch.save_file(tensors | {name: torch.zeros(3) for name in stray}, file)
  jax.tree.map(np.testing.assert_array_equal, loaded(tmp_path, 40)[1], params)
  own = 'model.layers.2.self_attn.k_other.weight'
  safetensors.torch.save_file(tensors | {own: torch.zeros(3)}, file)
  with pytest.raises(UserError, match='k_other'):
    loaded(tmp_path, 40)


def test_kimi_k2_is_read_and_exported_as_deepseek_v3_with_other_numbers(tmp_path):
  """Its config.json: an older form of rope_scaling, one group of experts, and code for transformers."""
  yarn = dict(beta_fast=1.0, beta_slow=1.0, factor=32.0, mscale=1.0, mscale_all_dim=1.0)
  yarn |= dict(original_max_position_embeddings=16)
  routing = dict(_ONE_GROUP, routed_scaling_factor=2.827)
  shape = dict(_DEEPSEEK, **routing)
  theirs = reference(
    'DeepseekV3', shape | dict(rope_parameters=dict(yarn, rope_type='yarn', rope_theta=5e4))
  )
  theirs.save_pretrained(tmp_path / 'theirs')
  file = tmp_path / 'theirs' / 'config.json'
  raw = json.loads(file.read_text())
  del raw['rope_parameters']
  code = dict(AutoConfig='configuration_deepseek.DeepseekV3Config')
  released = dict(
    model_type='kimi_k2', auto_map=code, rope_theta=5e4, rope_scaling=dict(yarn, type='yarn'),
    scoring_func='sigmoid', topk_method='noaux_tc', moe_layer_freq=1, num_nextn_predict_layers=0,
  )  # fmt: skip
  file.write_text(json.dumps(raw | released))
  config, params = loaded(tmp_path / 'theirs', 40)
  assert (config.family, config.weight_scale, config.expert_groups) == ('kimi_k2', 2.827, 1)
  tokens, mask = rows(4, 40, False)
  ours = forward(config, params, tokens, mask)
  assert_close(ours, their_logits(theirs, tokens, mask), mask)
  to = export.save(
    str(tmp_path / 'ours'),
    Model(config, params, None, str(tmp_path / 'theirs')),
    dtype='float32',
  )
  written = json.loads((tmp_path / 'ours' / 'config.json').read_text())
  assert written['model_type'] == 'kimi_k2' and 'auto_map' not in written
  # transformers does not know that name.
  file = tmp_path / 'ours' / 'config.json'
  file.write_text(json.dumps(written | dict(model_type='deepseek_v3')))
  again = transformers.AutoModelForCausalLM.from_pretrained(
    to, dtype=torch.float32, attn_implementation='eager'
  ).eval()
  assert_close(ours, their_logits(again, tokens, mask), mask)
  for field, value in dict(scoring_func='softmax', topk_method='greedy', moe_layer_freq=2).items():
    with pytest.raises(UserError, match=f'{field}={value!r} is not supported'):
      families.read(raw | released | {field: value}, 'here')


def test_released_files_of_qwen3_5_hold_more_than_the_text_decoder(tmp_path):
  """Names with a prefix, stacked experts, a part of vision, and layers that predict several tokens."""
  theirs = reference(*CASES['qwen3_5_moe'])
  theirs.save_pretrained(tmp_path / 'text')
  raw = json.loads((tmp_path / 'text' / 'config.json').read_text())
  stored = safetensors.torch.load_file(str(tmp_path / 'text' / 'model.safetensors'))
  config, params = loaded(tmp_path / 'text', 40)
  released = dict(model_type='qwen3_5_moe', text_config=raw, tie_word_embeddings=False)
  tensors = {'mtp.fc.weight': torch.zeros(3), 'model.visual.blocks.0.weight': torch.zeros(3)}
  prefix = lambda name: name.replace('model.', 'model.language_model.', 1)  # noqa: E731
  tensors |= {prefix(name): x for name, x in stored.items() if '.experts.' not in name}
  for i, layer in enumerate(theirs.model.layers):
    for name in ('gate_up_proj', 'down_proj'):
      stack = getattr(layer.mlp.experts, name).detach().clone()
      tensors[f'model.language_model.layers.{i}.mlp.experts.{name}'] = stack
  (tmp_path / 'released').mkdir()
  (tmp_path / 'released' / 'config.json').write_text(json.dumps(released))
  safetensors.torch.save_file(tensors, str(tmp_path / 'released' / 'model.safetensors'))
  again, same = loaded(tmp_path / 'released', 40)
  assert dataclasses.replace(again, family=config.family) == config
  jax.tree.map(np.testing.assert_array_equal, same, params)


def test_mxfp4_blocks_are_read_as_transformers_unpacks_them(tmp_path):
  """The released layout of gpt-oss: 4-bit blocks and scales in place of the experts' matrices."""
  from transformers.integrations import mxfp4

  shape = dict(_MIXTURE, hidden_size=64, intermediate_size=32, head_dim=16, num_hidden_layers=2)
  theirs = reference('GptOss', shape)
  theirs.save_pretrained(tmp_path / 'theirs')
  file = str(tmp_path / 'theirs' / 'model.safetensors')
  tensors, r = safetensors.torch.load_file(file), np.random.default_rng(0)
  for i, layer in enumerate(theirs.model.layers):
    for name, (a, b) in dict(gate_up_proj=(64, 64), down_proj=(32, 64)).items():
      blocks = torch.tensor(r.integers(0, 256, (5, b, a // 32, 16)), dtype=torch.uint8)
      scales = torch.tensor(r.integers(120, 126, (5, b, a // 32)), dtype=torch.uint8)
      full = f'model.layers.{i}.mlp.experts.{name}'
      del tensors[full]
      tensors |= {f'{full}_blocks': blocks, f'{full}_scales': scales}
      unpacked = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
      getattr(layer.mlp.experts, name).data = unpacked
  safetensors.torch.save_file(tensors, file)
  raw = json.loads((tmp_path / 'theirs' / 'config.json').read_text())
  raw['quantization_config'] = dict(quant_method='mxfp4', modules_to_not_convert=[])
  (tmp_path / 'theirs' / 'config.json').write_text(json.dumps(raw))
  config, params = loaded(tmp_path / 'theirs', 40)
  tokens, mask = rows(4, 40, False)
  assert_close(forward(config, params, tokens, mask), their_logits(theirs, tokens, mask), mask)
  model = Model(config, params, None, str(tmp_path / 'theirs'))
  to = export.save(str(tmp_path / 'ours'), model, dtype='float32')
  again = transformers.AutoModelForCausalLM.from_pretrained(
    to, dtype=torch.float32, attn_implementation='eager'
  ).eval()
  assert_close(forward(config, params, tokens, mask), their_logits(again, tokens, mask), mask)


def test_fp8_blocks_are_read_as_transformers_unpacks_them(tmp_path):
  """The released layout of DeepSeek-V3: matrices in float8, and a scale for each block of them."""
  theirs = reference(
    'DeepseekV3', dict(_DEEPSEEK, q_lora_rank=16, qk_nope_head_dim=8, v_head_dim=8)
  )
  theirs.save_pretrained(tmp_path)
  file, (A, B) = str(tmp_path / 'model.safetensors'), (8, 4)
  tensors = safetensors.torch.load_file(file)
  for name, x in [*tensors.items()]:
    if '_proj' in name and name.endswith('.weight') and not (x.shape[0] % A or x.shape[1] % B):
      blocks = x.reshape(x.shape[0] // A, A, -1, B)
      scale = blocks.abs().amax((1, 3)) / 448
      tensors[name] = (blocks / scale[:, None, :, None]).reshape(x.shape).to(torch.float8_e4m3fn)
      tensors[f'{name}_scale_inv'] = scale
  assert sum(name.endswith('_scale_inv') for name in tensors) > 40
  safetensors.torch.save_file(tensors, file, metadata=dict(format='pt'))
  raw = json.loads((tmp_path / 'config.json').read_text())
  raw['quantization_config'] = dict(
    quant_method='fp8', fmt='e4m3', activation_scheme='dynamic', weight_block_size=[A, B]
  )
  (tmp_path / 'config.json').write_text(json.dumps(raw))
  unpacked = transformers.AutoModelForCausalLM.from_pretrained(
    tmp_path, dtype=torch.float32, attn_implementation='eager'
  ).eval()
  config, params = loaded(tmp_path, 40)
  tokens, mask = rows(4, 40, False)
  ours = forward(config, params, tokens, mask)
  assert_close(ours, their_logits(unpacked, tokens, mask), mask)
  assert np.abs(ours - their_logits(theirs, tokens, mask))[mask].max() > 1e-3, 'rounded to float8'
  raw['quantization_config']['weight_block_size'] = [A]
  (tmp_path / 'config.json').write_text(json.dumps(raw))
  with pytest.raises(UserError, match=r'weight_block_size=\[8\] must be two whole numbers'):
    loaded(tmp_path, 40)


@pytest.mark.parametrize(
  'dense, loops',
  [
    ('0000', [['0123']]),
    ('1000', [['0'], ['123']]),
    ('101010', [['024', '135']]),
    ('00100', [['01'], ['2'], ['34']]),
  ],
)
def test_layers_of_equal_structure_share_a_loop(dense, loops):
  got = layer_loops.periods(tuple(map(bool, map(int, dense))))
  assert [[''.join(map(str, numbers)) for numbers in period] for period in got] == loops


def test_loops_over_alternating_layers_return_what_single_layers_return():
  """Keys and values of all layers and experts of mixtures, in the order of the layers; given experts are used."""
  raw = SIZES | _QWEN | dict(model_type='qwen3_moe', decoder_sparse_step=2, num_hidden_layers=5)
  config = families.read(raw, 'here')
  params, (tokens, mask) = decoder.init(config, 0), rows(2, 9, False)
  positions = np.broadcast_to(np.arange(9), (2, 9))
  fixed = np.random.default_rng(0).permuted(np.tile(np.arange(5), (2, 9, 2, 1)), axis=-1)[..., :2]

  @functools.partial(jax.jit, static_argnums=0)
  def run(remat, expert=None):
    return decoder.apply(
      config, params, tokens, positions, decoder.causal(mask), remat=remat, expert_BxQxNxk=expert
    )

  for expert in (None, fixed):
    hidden, (k, v), chosen = run(True, expert)
    hidden1, kv1, chosen1 = run(False, expert)
    np.testing.assert_allclose(hidden, hidden1, atol=1e-5)
    for stacked, single in ((k, [k for k, _ in kv1]), (v, [v for _, v in kv1])):
      np.testing.assert_allclose(stacked, np.stack(single), atol=1e-5)
    np.testing.assert_array_equal(chosen, chosen1)
    if expert is not None:
      np.testing.assert_array_equal(chosen, expert)


def test_a_head_that_differs_from_a_tied_embedding_is_refused(tmp_path):
  theirs = reference('Llama', {})
  theirs.save_pretrained(tmp_path)
  raw = json.loads((tmp_path / 'config.json').read_text()) | dict(tie_word_embeddings=True)
  (tmp_path / 'config.json').write_text(json.dumps(raw))
  with pytest.raises(UserError, match="'lm_head.weight' differs .* set that to false, or delete"):
    loaded(tmp_path, 40)


@pytest.mark.parametrize('name', ['q', 'up'])
def test_an_adapter_of_a_fused_matrix_is_refused(name, tmp_path):
  config = families.read(SIZES | dict(model_type='phi3'), 'here')
  settings = lora.LoraSettings(2, 4.0, (name,))
  with pytest.raises(UserError, match=f'adapter of {name!r}, which files of phi3 hold in one'):
    peft.save(str(tmp_path / 'to'), Model(config, {}, None, ''), settings)


def test_a_run_with_rows_beyond_the_original_context_takes_longropes_long_factors():
  raw = transformers.Phi3Config(**(SIZES | CASES['phi3'][1])).to_dict()
  model, c = families.read(raw, 'here'), configs.default()
  specs = []
  for c.completion_tokens in (4, 5):
    c.prompts, c.rollouts, c.prompt_tokens = 4, 4, 60
    mesh = sharding.make_mesh(c.mesh, jax.devices()[:1])
    specs.append(make_spec(c, model, (3,), mesh).model.config)
  assert model.max_tokens == 64 and specs[0] == model and specs[1].max_tokens == 256
  short, long = (positions.frequencies(spec)[0] for spec in specs)
  np.testing.assert_allclose(short / long, np.array([1, 3 / 1.1, 7 / 1.5]), rtol=1e-6)


def greedy(config, params, tokens_BxL, length_B, T):
  """Logits [T, B, V] and tokens [B, T]: right-padded prompts are prefilled once, then decoded with a cache."""
  B, L = tokens_BxL.shape
  start = length_B.astype(np.int32)
  prompts = Prompts(tokens_BxL, start, *[np.arange(B, dtype=np.int32)] * 3)
  prompt_cache, last = jax.jit(
    lambda params: shared_prompt_forward.prefill(config, params, prompts, 'float32')
  )(params)
  own = slot_loop.empty_cache(config, B, [T] * config.layers, 'float32')
  own = attention.start_rows(own, prompt_cache, np.arange(B), 1, np.ones(B, bool))

  @jax.jit
  def step(params, token, t, own):
    hidden, own, _ = decoder.apply(
      config, params, token, (start + t)[:, None], jnp.broadcast_to(jnp.arange(T) <= t, (B, 1, T)),
      shared=(prompt_cache, np.arange(L)[None] < start[:, None]), cache=own, at=t,
      key_positions_BxS=start[:, None] + np.arange(T),
    )  # fmt: skip
    return decoder.head(config, params, hidden[:, 0]), own

  steps = [decoder.head(config, params, last)]
  for t in range(T - 1):
    logits, own = step(params, steps[-1].argmax(-1)[:, None], t, own)
    steps.append(logits)
  logits_TxBxV = np.stack(steps)
  return logits_TxBxV, logits_TxBxV.argmax(-1).T


def update_logits(config, params, texts, token_BxT):
  """Logits [T, B, V] of the tokens after each text, in one pass with the scan over layers that the update runs."""
  B, T = token_BxT.shape
  S = max(map(len, texts)) + T
  tokens, mask = np.full((B, S), 5, np.int32), np.zeros((B, S), bool)
  for b, text in enumerate(texts):
    tokens[b, : len(text) + T] = [*text, *token_BxT[b]]
    mask[b, : len(text) + T] = True
  positions = np.broadcast_to(np.arange(S), (B, S))

  @jax.jit
  def run(params):
    hidden, *_ = decoder.apply(
      config, params, tokens, positions, decoder.causal(mask), dtype='float32', remat=True
    )
    return decoder.head(config, params, hidden)

  logits = np.asarray(run(params))
  at = np.array([len(text) for text in texts])[:, None] - 1 + np.arange(T)
  return np.take_along_axis(logits, at[..., None], axis=1).swapaxes(0, 1)

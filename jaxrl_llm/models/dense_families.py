"""Families whose feed-forward layers are dense, by Hugging Face's model_type."""

from __future__ import annotations

import math

from jaxrl_llm.models.family import (
  Family,
  Raw,
  all_sliding,
  sliding_layers,
  sliding_rope_theta,
  windowed,
)
from jaxrl_llm.types import UserError


def _last_sliding(raw: Raw, layers: int) -> Raw:
  """Qwen 2 and 3: layers from max_window_layers on have a sliding window, unless layer_types says otherwise."""
  first = raw.get('max_window_layers', layers)
  return windowed(raw, sliding_layers(raw) or tuple(i >= first for i in range(layers)))


def _smollm3(raw: Raw, layers: int) -> Raw:
  interval = raw.get('no_rope_layer_interval', 4)
  rotated = raw.get('no_rope_layers') or [(i + 1) % interval != 0 for i in range(layers)]
  plain = tuple(not r for r in rotated)
  return dict(unrotated=plain if any(plain) else ()) | windowed(raw, sliding_layers(raw) or plain)


def _gemma(raw: Raw, pattern: int) -> Raw:
  layers = raw['num_hidden_layers']
  sliding = sliding_layers(raw) or tuple(bool((i + 1) % pattern) for i in range(layers))
  return windowed(raw, sliding) | dict(
    embed_scale=math.sqrt(raw['hidden_size']),
    query_scale=raw['query_pre_attn_scalar'] ** -0.5,
    logit_cap=raw.get('final_logit_softcapping') or 0.0,
  )


def _gemma2(raw: Raw, layers: int) -> Raw:
  return _gemma(raw, 2) | dict(attention_cap=raw.get('attn_logit_softcapping') or 0.0)


def _gemma3(raw: Raw, layers: int) -> Raw:
  theta = sliding_rope_theta(raw, raw.get('rope_local_base_freq') or 10000.0)
  return _gemma(raw, raw.get('sliding_window_pattern', 6)) | dict(sliding_rope_theta=theta)


def granite(raw: Raw, layers: int) -> Raw:
  """Granite's four multipliers. attention_multiplier replaces 1 / √d."""
  return dict(
    embed_scale=raw['embedding_multiplier'],
    query_scale=raw['attention_multiplier'],
    residual_scale=raw['residual_multiplier'],
    logit_scale=1 / raw['logits_scaling'],
  )


def _granite(raw: Raw, layers: int) -> Raw:
  return granite(raw, layers) | dict(mlp_bias=bool(raw.get('mlp_bias', False)))


def _olmo3(raw: Raw, layers: int) -> Raw:
  """Three layers of four slide; the scaling of rotary frequencies is that of full layers alone."""
  sliding = sliding_layers(raw) or tuple(bool((i + 1) % 4) for i in range(layers))
  window = windowed(raw, sliding)
  return window | dict(
    sliding_rope_theta=sliding_rope_theta(raw, raw['rope_theta']) if window else 0
  )


def _ministral3(raw: Raw, layers: int) -> Raw:
  """The queries of late positions are stretched: `position_scale` times the log of whole contexts before them."""
  rope = raw.get('rope_parameters') or raw['rope_scaling']
  scale = rope.get('llama_4_scaling_beta') or 0.0
  return all_sliding(raw, layers) | dict(
    position_scale=scale,
    position_span=rope['original_max_position_embeddings'] if scale else 0,
  )


def _phi3(raw: Raw, layers: int) -> Raw:
  """A part of each head is rotated; long rows have frequencies of their own (longrope)."""
  rope = raw.get('rope_scaling') or raw.get('rope_parameters') or {}
  share = rope.get('partial_rotary_factor') or raw.get('partial_rotary_factor') or 1.0
  head_dim = raw['hidden_size'] // raw['num_attention_heads']
  fields = all_sliding(raw, layers) | dict(rotary_dim=int(head_dim * share) if share != 1 else 0)
  kind = rope.get('rope_type', rope.get('type', 'default'))
  if kind == 'default':
    return fields
  if kind not in ('longrope', 'su', 'yarn'):  # the first files of Phi-3 called it su and yarn
    raise UserError(f'rope_scaling type {kind!r} is unknown; supported: longrope.')
  span = rope.get('original_max_position_embeddings') or raw['original_max_position_embeddings']
  scaling = dict(
    rope_type='longrope',
    original_max_position_embeddings=span,
    factor=rope.get('factor') or raw['max_position_embeddings'] / span,
    attention_factor=rope.get('attention_factor'),
    long_tokens=raw['max_position_embeddings'],
    **{name: tuple(map(float, rope[name])) for name in ('long_factor', 'short_factor')},
  )
  return fields | dict(rope_scaling=tuple(sorted(scaling.items())), max_tokens=span)


_GEMMA = dict(
  hidden_activation='gelu_pytorch_tanh',
  num_attention_heads=8,
  num_key_value_heads=4,
  head_dim=256,
  rms_norm_eps=1e-6,
  tie_word_embeddings=True,
  query_pre_attn_scalar=256,
  sliding_window=4096,
)
_GEMMA3 = Family(
  'Gemma3ForCausalLM',
  dict(norms='both', qk_norm='head'),
  _gemma3,
  _GEMMA | dict(vocab_size=262208, max_position_embeddings=131072, rope_theta=1e6),
)
_MISTRAL = Family('MistralForCausalLM', {}, all_sliding, biases=())
GRANITE = dict.fromkeys(
  ('embedding_multiplier', 'attention_multiplier', 'residual_multiplier', 'logits_scaling'), 1.0
)
FAMILIES = {
  'llama': Family('LlamaForCausalLM'),
  'mistral': _MISTRAL,
  'mistral3': _MISTRAL,  # multimodal; its decoder may be ministral3 instead
  'qwen2': Family(
    'Qwen2ForCausalLM',
    dict(qkv_bias=True),
    _last_sliding,
    dict(use_sliding_window=False),
    biases=(),
  ),
  'qwen3': Family(
    'Qwen3ForCausalLM', dict(qk_norm='head'), _last_sliding, dict(use_sliding_window=False)
  ),
  'smollm3': Family(
    'SmolLM3ForCausalLM',
    {},
    _smollm3,
    dict(use_sliding_window=False, tie_word_embeddings=True, rope_theta=2e6),
  ),
  'olmo2': Family(
    'Olmo2ForCausalLM', dict(qk_norm='all', norms='after'), defaults=dict(rms_norm_eps=1e-5)
  ),
  'olmo3': Family(
    'Olmo3ForCausalLM',
    dict(qk_norm='all', norms='after'),
    _olmo3,
    dict(sliding_window=4096, rope_theta=5e5, rms_norm_eps=1e-5),
  ),
  'granite': Family('GraniteForCausalLM', {}, _granite, GRANITE),
  'ministral3': Family(
    'Ministral3ForCausalLM',
    {},
    _ministral3,
    dict(head_dim=128, rms_norm_eps=1e-5),
    biases=(),
  ),
  'phi3': Family(
    'Phi3ForCausalLM',
    {},
    _phi3,
    dict(rms_norm_eps=1e-5, original_max_position_embeddings=4096),
    biases=(),
    names={f'{name}/kernel': 'self_attn.qkv_proj.weight' for name in 'qkv'}
    | {f'{name}/kernel': 'mlp.gate_up_proj.weight' for name in ('gate', 'up')},
  ),
  'gemma2': Family(
    'Gemma2ForCausalLM',
    dict(norms='both'),
    _gemma2,
    _GEMMA | dict(final_logit_softcapping=30.0),
  ),
  'gemma3_text': _GEMMA3,
  # Multimodal: only the text decoder is read.
  'gemma3': _GEMMA3,
}

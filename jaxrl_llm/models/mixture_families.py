"""Families with a mixture of experts, by Hugging Face's model_type."""

from __future__ import annotations

import math

from jaxrl_llm.models.dense_families import GRANITE, granite
from jaxrl_llm.models.family import Family, Raw, all_sliding, refuse, sliding_layers, windowed


def _experts(raw: Raw, layers: int) -> Raw:
  return dict(
    experts=raw.get('num_experts', raw.get('num_local_experts')),
    experts_per_token=raw.get('num_experts_per_tok'),
    norm_top_k=bool(raw.get('norm_topk_prob')),
  )


def qwen_moe(raw: Raw, layers: int) -> Raw:
  """Layers in mlp_only_layers, and all but every decoder_sparse_step-th, have a dense MLP."""
  step, dense = raw.get('decoder_sparse_step', 1), raw.get('mlp_only_layers') or []
  dense_layers = tuple(i in dense or (i + 1) % step != 0 for i in range(layers))
  fields = _experts(raw, layers) | dict(mlp=raw['moe_intermediate_size'])
  if any(dense_layers):
    fields |= dict(dense_layers=dense_layers, dense_mlp=raw['intermediate_size'])
  return fields


def _qwen2_moe(raw: Raw, layers: int) -> Raw:
  """Every other layer below max_window_layers slides, unless layer_types says otherwise."""
  last = raw.get('max_window_layers', layers)
  sliding = sliding_layers(raw) or tuple(i % 2 == 0 and i < last for i in range(layers))
  shared = dict(qkv_bias=bool(raw['qkv_bias']), shared_mlp=raw['shared_expert_intermediate_size'])
  return windowed(raw, sliding) | qwen_moe(raw, layers) | shared


def _qwen3_moe(raw: Raw, layers: int) -> Raw:
  return all_sliding(raw, layers) | qwen_moe(raw, layers)


def _mixtral(raw: Raw, layers: int) -> Raw:
  return all_sliding(raw, layers) | _experts(raw, layers)


def _olmoe(raw: Raw, layers: int) -> Raw:
  refuse(raw, clip_qkv=None)
  return _experts(raw, layers)


def _granitemoe(raw: Raw, layers: int) -> Raw:
  return granite(raw, layers) | _experts(raw, layers)


def _grouped_experts(raw: Raw, layers: int) -> Raw:
  """The first layers are dense; tokens share experts that are as one wider expert; routed ones are in groups."""
  kinds = raw.get('mlp_layer_types') or []
  dense = tuple(kind == 'dense' for kind in kinds)
  dense = dense or tuple(i < raw['first_k_dense_replace'] for i in range(layers))
  width = raw['moe_intermediate_size']
  return _experts(raw, layers) | dict(
    experts=raw.get('n_routed_experts', raw.get('num_local_experts')),
    mlp=width,
    dense_layers=dense if any(dense) else (),
    dense_mlp=raw['intermediate_size'] if any(dense) else 0,
    shared_mlp=width * raw['n_shared_experts'],
    expert_groups=raw['n_group'],
    chosen_groups=raw['topk_group'],
    weight_scale=raw['routed_scaling_factor'],
  )


def _glm4_moe(raw: Raw, layers: int) -> Raw:
  rope = raw.get('rope_parameters') or {}
  share = rope.get('partial_rotary_factor') or raw['partial_rotary_factor']
  head_dim = raw.get('head_dim') or raw['hidden_size'] // raw['num_attention_heads']
  return _grouped_experts(raw, layers) | dict(
    qk_norm='head' if raw.get('use_qk_norm') else '',
    rotary_dim=int(head_dim * share) if share != 1 else 0,
  )


def _deepseek_v3(raw: Raw, layers: int) -> Raw:
  """Attention with a latent; yarn's mscale_all_dim is a factor on scores, too."""
  refuse(raw, scoring_func='sigmoid', topk_method='noaux_tc', moe_layer_freq=1)
  rope = raw.get('rope_parameters') or raw.get('rope_scaling') or {}
  refuse(rope, partial_rotary_factor=1.0)
  head_dim = raw['qk_nope_head_dim'] + raw['qk_rope_head_dim']
  sharpness = 1.0
  if rope.get('rope_type', rope.get('type', 'default')) != 'default' and rope['factor'] > 1:
    sharpness += 0.1 * (rope.get('mscale_all_dim') or 0) * math.log(rope['factor'])
  return _grouped_experts(raw, layers) | dict(
    head_dim=head_dim,
    rotary_dim=raw['qk_rope_head_dim'],
    rotary_pairs=bool(raw.get('rope_interleave', True)),
    query_scale=head_dim**-0.5 * sharpness**2,
    latent=raw['kv_lora_rank'],
    query_latent=raw.get('q_lora_rank', 0),
    value_dim=raw['v_head_dim'],
  )


def _llama4(raw: Raw, layers: int) -> Raw:
  """Rotated layers attend within chunks; the others attend to all, with queries that late positions stretch."""
  interval, step = raw['no_rope_layer_interval'], raw['interleave_moe_layer_step']
  rotated = raw.get('no_rope_layers') or [(i + 1) % interval != 0 for i in range(layers)]
  kinds = raw.get('layer_types') or ['chunked_attention' if x else '' for x in rotated]
  sparse = raw.get('moe_layers')
  sparse = range(step - 1, layers, step) if sparse is None else sparse
  dense = tuple(i not in sparse for i in range(layers))
  chunked = tuple(kind == 'chunked_attention' for kind in kinds)
  fields = windowed(dict(sliding_window=raw.get('attention_chunk_size')), chunked)
  plain = tuple(not x for x in rotated)
  is_scaled = bool(raw['attn_temperature_tuning']) and any(plain)
  return (
    fields
    | _experts(raw, layers)
    | dict(
      chunked=bool(fields),
      unrotated=plain if any(plain) else (),
      qk_norm='rotated' if raw['use_qk_norm'] else '',
      position_scale=raw['attn_scale'] if is_scaled else 0.0,
      position_span=raw['floor_scale'] if is_scaled else 0,
      dense_layers=dense if any(dense) else (),
      dense_mlp=raw['intermediate_size_mlp'] if any(dense) else 0,
      shared_mlp=raw['intermediate_size'],
    )
  )


def _gpt_oss(raw: Raw, layers: int) -> Raw:
  """Every other layer slides, from the first on."""
  sliding = sliding_layers(raw) or tuple(i % 2 == 0 for i in range(layers))
  clamped = dict(
    gate_gain=raw['swiglu_alpha'], gate_limit=raw['swiglu_limit'], activation='clamped_swiglu'
  )
  return windowed(raw, sliding) | _experts(raw, layers) | clamped


QWEN_SHARED = {
  f'shared_{n}/kernel': f'mlp.shared_expert.{n}_proj.weight' for n in ('gate', 'up', 'down')
} | {'shared_router/kernel': 'mlp.shared_expert_gate.weight'}
_MIXTRAL = {
  'experts/router/kernel': 'block_sparse_moe.gate.weight',
  'experts/gate/kernel': 'block_sparse_moe.experts.{}.w1.weight',
  'experts/up/kernel': 'block_sparse_moe.experts.{}.w3.weight',
  'experts/down/kernel': 'block_sparse_moe.experts.{}.w2.weight',
}
_GRANITE = {
  'experts/router/kernel': 'block_sparse_moe.router.layer.weight',
  'experts/gate/kernel': 'block_sparse_moe.input_linear.weight',
  'experts/up/kernel': 'block_sparse_moe.input_linear.weight',
  'experts/down/kernel': 'block_sparse_moe.output_linear.weight',
}
_GLM = {
  'experts/choice_bias': 'mlp.gate.e_score_correction_bias',
  **{f'shared_{n}/kernel': f'mlp.shared_experts.{n}_proj.weight' for n in ('gate', 'up', 'down')},
}
_SIGMOID = dict(router_score='sigmoid', choice_bias=True)
_LLAMA4_NAMES = {
  'experts/router/kernel': 'feed_forward.router.weight',
  'experts/gate/kernel': 'feed_forward.experts.gate_up_proj',
  'experts/up/kernel': 'feed_forward.experts.gate_up_proj',
  'experts/down/kernel': 'feed_forward.experts.down_proj',
  **{f'{n}/kernel': f'feed_forward.{n}_proj.weight' for n in ('gate', 'up', 'down')},
  **{
    f'shared_{n}/kernel': f'feed_forward.shared_expert.{n}_proj.weight'
    for n in ('gate', 'up', 'down')
  },
}
_GPT_OSS = {
  'sinks/score': 'self_attn.sinks',
  'experts/router/kernel': 'mlp.router.weight',
  'experts/router/bias': 'mlp.router.bias',
  'experts/gate/kernel': 'mlp.experts.gate_up_proj',
  'experts/up/kernel': 'mlp.experts.gate_up_proj',
  'experts/down/kernel': 'mlp.experts.down_proj',
  'experts/gate/bias': 'mlp.experts.gate_up_proj_bias',
  'experts/up/bias': 'mlp.experts.gate_up_proj_bias',
  'experts/down/bias': 'mlp.experts.down_proj_bias',
}
_YARN = dict(
  rope_type='yarn', factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False, original_max_position_embeddings=4096
)  # fmt: skip
_LLAMA4 = Family(
  'Llama4ForCausalLM',
  dict(router_score='sigmoid', weighted_inputs=True, rotary_pairs=True, unrotated_scale=True),
  _llama4,
  dict(
    head_dim=128,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    num_experts_per_tok=1,
    intermediate_size_mlp=16384,
    interleave_moe_layer_step=1,
    no_rope_layer_interval=4,
    attention_chunk_size=8192,
    use_qk_norm=True,
    attn_temperature_tuning=True,
    attn_scale=0.1,
    floor_scale=8192,
  ),
  names=_LLAMA4_NAMES,
)
_DEEPSEEK_V3 = Family(
  'DeepseekV3ForCausalLM',
  _SIGMOID,
  _deepseek_v3,
  dict(
    first_k_dense_replace=3,
    n_shared_experts=1,
    n_group=8,
    topk_group=4,
    norm_topk_prob=True,
    num_experts_per_tok=8,
    routed_scaling_factor=2.5,
  ),
  names=_GLM,
  has_prediction_layer=True,
)
FAMILIES = {
  'qwen3_moe': Family(
    'Qwen3MoeForCausalLM', dict(qk_norm='head'), _qwen3_moe, dict(use_sliding_window=False)
  ),
  'qwen2_moe': Family(
    'Qwen2MoeForCausalLM',
    dict(shared_gate=True),
    _qwen2_moe,
    dict(use_sliding_window=False, qkv_bias=True, shared_expert_intermediate_size=5632),
    biases=(),
    names=QWEN_SHARED,
  ),
  'mixtral': Family(
    'MixtralForCausalLM',
    {},
    _mixtral,
    dict(norm_topk_prob=True, rms_norm_eps=1e-5, rope_theta=1e6),
    biases=(),
    names=_MIXTRAL,
  ),
  'olmoe': Family('OlmoeForCausalLM', dict(qk_norm='all'), _olmoe, dict(rms_norm_eps=1e-5)),
  'granitemoe': Family(
    'GraniteMoeForCausalLM', {}, _granitemoe, GRANITE | dict(norm_topk_prob=True), names=_GRANITE
  ),
  'glm4_moe': Family(
    'Glm4MoeForCausalLM',
    _SIGMOID,
    _glm4_moe,
    dict(
      partial_rotary_factor=0.5,
      first_k_dense_replace=1,
      n_shared_experts=1,
      n_group=1,
      topk_group=1,
      norm_topk_prob=True,
      rms_norm_eps=1e-5,
      routed_scaling_factor=1.0,
    ),
    biases=('qkv_bias',),
    names=_GLM,
    has_prediction_layer=True,
  ),
  'deepseek_v3': _DEEPSEEK_V3,
  'kimi_k2': _DEEPSEEK_V3,  # other numbers; its files name code for transformers, which is not read
  'glm4_moe_lite': _DEEPSEEK_V3._replace(
    architecture='Glm4MoeLiteForCausalLM',
    defaults=_DEEPSEEK_V3.defaults
    | dict(
      first_k_dense_replace=1,
      n_group=1,
      topk_group=1,
      num_experts_per_tok=4,
      rms_norm_eps=1e-5,
      routed_scaling_factor=1.8,
    ),
  ),
  'llama4_text': _LLAMA4,
  'llama4': _LLAMA4,  # multimodal: only the text decoder is read
  'gpt_oss': Family(
    'GptOssForCausalLM',
    dict(sinks=True, router_bias=True, expert_bias=True),
    _gpt_oss,
    dict(
      attention_bias=True,
      head_dim=64,
      norm_topk_prob=True,
      rms_norm_eps=1e-5,
      rope_theta=150000.0,
      rope_scaling=_YARN,
      sliding_window=128,
      swiglu_alpha=1.702,
      swiglu_limit=7.0,
    ),
    names=_GPT_OSS,
    blocks={f'mlp.experts.gate_up_proj{suffix}': 'mlp' for suffix in ('', '_bias')},
  ),
}

"""Gemma 4, by Hugging Face's model_type: layers that do not slide have heads of their own sizes.

In E2B and E4B, the last layers attend to keys and values of earlier ones, and each layer has an input of its own.
"""

from __future__ import annotations

import math

from jaxrl_llm.models.family import Family, Raw, sliding_layers, sliding_rope_theta
from jaxrl_llm.types import GlobalSizes, UserError

_SIZES = ('head_dim', 'num_key_value_heads')


def _gemma4(raw: Raw, layers: int) -> Raw:
  if raw.get('use_bidirectional_attention') == 'all':
    raise UserError(
      "use_bidirectional_attention='all' is not supported: tokens attend to later ones; choose another model."
    )
  sliding = sliding_layers(raw) or tuple(bool((i + 1) % 6) for i in range(layers))
  sliding = (*sliding[:-1], False)
  fields = dict(
    embed_scale=math.sqrt(raw['hidden_size']),
    logit_cap=raw.get('final_logit_softcapping') or 0.0,
    sliding_rope_theta=sliding_rope_theta(raw, 10000.0),
  )
  if raw.get('enable_moe_block'):
    fields |= dict(
      experts=raw['num_experts'],
      experts_per_token=raw['top_k_experts'],
      mlp=raw['moe_intermediate_size'],
      shared_mlp=raw['intermediate_size'],  # a dense MLP beside the experts
      norm_top_k=True,
      expert_norms=True,
    )
  if raw['num_kv_shared_layers']:
    fields |= dict(
      kv_readers=raw['num_kv_shared_layers'],
      kv_reader_mlp=2 if raw['use_double_wide_mlp'] else 1,
    )
  if raw['hidden_size_per_layer_input']:
    fields |= dict(
      layer_input=raw['hidden_size_per_layer_input'],
      layer_input_vocab=raw['vocab_size_per_layer_input'],
    )
  sizes = _global_sizes(raw, sliding)
  if not any(sliding):
    return fields | sizes._asdict()
  fields |= dict(window=raw['sliding_window'], sliding=sliding)
  own = GlobalSizes(raw['head_dim'], raw['num_key_value_heads'], False)
  return fields if sizes == own else fields | dict(global_sizes=sizes)


def _global_sizes(raw: Raw, sliding: tuple[bool, ...]) -> GlobalSizes:
  """Of layers that do not slide. transformers writes changes by layer, and released files the changed values."""
  key_values = bool(raw['attention_k_eq_v'])
  own = {name: raw[name] for name in _SIZES}
  if (by_layer := raw.get('per_layer_config')) is None:
    changes = dict(head_dim=raw['global_head_dim'])
    if key_values and (heads := raw.get('num_global_key_value_heads')) is not None:
      changes['num_key_value_heads'] = heads
  else:
    changes_L = [by_layer.get(str(i)) or {} for i in range(len(sliding))]
    changes = changes_L[-1]
    expected_L = [{} if slides else changes for slides in sliding]
    if not changes.keys() <= own.keys() or changes_L != expected_L:
      raise UserError(
        f'per_layer_config={by_layer!r} is not supported; supported: one head_dim and one num_key_value_heads of all '
        'full_attention layers; choose another model.'
      )
  sizes = own | changes
  return GlobalSizes(*(sizes[name] for name in _SIZES), key_values)


_NAMES = {
  'input_gate/kernel': 'per_layer_input_gate.weight',
  'input_down/kernel': 'per_layer_projection.weight',
  'input_norm/scale': 'post_per_layer_input_norm.weight',
  'experts/router/kernel': 'router.proj.weight',
  'experts/router_norm/scale': 'router.scale',
  'experts/gain': 'router.per_expert_scale',
  'experts/norm/scale': 'pre_feedforward_layernorm_2.weight',
  'experts/post_norm/scale': 'post_feedforward_layernorm_2.weight',
  'shared_post_norm/scale': 'post_feedforward_layernorm_1.weight',
  'experts/gate/kernel': 'experts.gate_up_proj',
  'experts/up/kernel': 'experts.gate_up_proj',
  'experts/down/kernel': 'experts.down_proj',
  **{f'shared_{n}/kernel': f'mlp.{n}_proj.weight' for n in ('gate', 'up', 'down')},
}
_GEMMA4 = Family(
  'Gemma4ForCausalLM',
  dict(norms='both', qk_norm='qkv', layer_scales=True, query_scale=1.0),
  _gemma4,
  dict(
    vocab_size=262144,
    hidden_activation='gelu_pytorch_tanh',
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=256,
    global_head_dim=512,
    rms_norm_eps=1e-6,
    tie_word_embeddings=True,
    max_position_embeddings=131072,
    sliding_window=512,
    hidden_size_per_layer_input=256,
    vocab_size_per_layer_input=262144,
    num_kv_shared_layers=0,
    use_double_wide_mlp=False,
    attention_k_eq_v=False,
    rope_parameters=dict(
      sliding_attention=dict(rope_type='default', rope_theta=1e4),
      full_attention=dict(rope_type='proportional', partial_rotary_factor=0.25, rope_theta=1e6),
    ),
  ),
  names=_NAMES,
  transposed=('experts.gate_up_proj', 'experts.down_proj'),
)
FAMILIES = {
  'gemma4_text': _GEMMA4,
  # Multimodal: only the text decoder is read.
  'gemma4': _GEMMA4,
}

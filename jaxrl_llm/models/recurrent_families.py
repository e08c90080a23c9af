"""Families that alternate attention with recurrent layers, by Hugging Face's model_type."""

from __future__ import annotations

from jaxrl_llm.models.family import Family, Raw
from jaxrl_llm.models.mixture_families import QWEN_SHARED, qwen_moe
from jaxrl_llm.types import UserError

_KINDS = {'linear_attention': True, 'full_attention': False}


def _qwen3_5(raw: Raw, layers: int) -> Raw:
  """The last layer of every few attends, and a part of each head is rotated."""
  interval = raw['full_attention_interval']
  kinds = raw.get('layer_types')
  kinds = kinds or [
    'linear_attention' if (i + 1) % interval else 'full_attention' for i in range(layers)
  ]
  if unknown := set(kinds) - {*_KINDS}:
    raise UserError(
      f'layer_types holds {min(map(str, unknown))!r}; supported: {", ".join(_KINDS)}; choose another model.'
    )
  rope = raw.get('rope_parameters') or raw.get('rope_scaling') or {}
  share = rope.get('partial_rotary_factor') or raw['partial_rotary_factor']
  recurrent = tuple(_KINDS[kind] for kind in kinds)
  return dict(
    rotary_dim=int(raw['head_dim'] * share) if share != 1 else 0,
    recurrent_layers=recurrent if any(recurrent) else (),
    delta_key_heads=raw['linear_num_key_heads'],
    delta_value_heads=raw['linear_num_value_heads'],
    delta_key_dim=raw['linear_key_head_dim'],
    delta_value_dim=raw['linear_value_head_dim'],
    delta_window=raw['linear_conv_kernel_dim'],
  )


def _mixture(raw: Raw, layers: int) -> Raw:
  fields = _qwen3_5(raw, layers)
  if not raw['num_experts']:
    return fields
  return fields | qwen_moe(raw, layers) | dict(shared_mlp=raw['shared_expert_intermediate_size'])


_SETTINGS = dict(qk_norm='head', output_gate=True)
_DEFAULTS = dict(
  head_dim=256,
  full_attention_interval=4,
  partial_rotary_factor=0.25,
  linear_num_key_heads=16,
  linear_num_value_heads=32,
  linear_key_head_dim=128,
  linear_value_head_dim=128,
  linear_conv_kernel_dim=4,
)
_ATTENTION = {
  f'{name}/{part}': f'self_attn.q_proj.{stored}'
  for part, stored in (('kernel', 'weight'), ('bias', 'bias'))
  for name in ('q', 'q_gate')
}
_BY_HEAD = {f'self_attn.q_proj.{part}': 'heads' for part in ('weight', 'bias')}
_NAMES = _ATTENTION | {
  **{f'delta_{n}/kernel': 'linear_attn.in_proj_qkv.weight' for n in 'qkv'},
  'delta_gate/kernel': 'linear_attn.in_proj_z.weight',
  'delta_step/kernel': 'linear_attn.in_proj_b.weight',
  'delta_decay/kernel': 'linear_attn.in_proj_a.weight',
}
_FUSED = {
  'linear_attn.in_proj_qkvz.weight': 'delta_key_heads',
  'linear_attn.in_proj_ba.weight': 'delta_key_heads',
}
_QWEN3_5 = Family(
  'Qwen3_5ForCausalLM',
  _SETTINGS,
  _qwen3_5,
  _DEFAULTS,
  names=_NAMES,
  has_prediction_layer=True,
  blocks=_BY_HEAD,
)
_QWEN3_5_MOE = _QWEN3_5._replace(
  architecture='Qwen3_5MoeForCausalLM',
  settings=_SETTINGS | dict(shared_gate=True),
  read=_mixture,
  defaults=_DEFAULTS
  | dict(
    intermediate_size=1,  # no layer is dense
    num_experts=256,
    num_experts_per_tok=8,
    norm_topk_prob=True,
    moe_intermediate_size=512,
    shared_expert_intermediate_size=512,
  ),
  names=_NAMES | QWEN_SHARED,
)
FAMILIES = {
  'qwen3_next': _QWEN3_5_MOE._replace(
    architecture='Qwen3NextForCausalLM',
    defaults=_QWEN3_5_MOE.defaults
    | dict(intermediate_size=5632, num_experts=512, num_experts_per_tok=10),
    names=_ATTENTION
    | QWEN_SHARED
    | {f'delta_{n}/kernel': 'linear_attn.in_proj_qkvz.weight' for n in ('q', 'k', 'v', 'gate')}
    | {f'delta_{n}/kernel': 'linear_attn.in_proj_ba.weight' for n in ('step', 'decay')},
    blocks=_BY_HEAD | _FUSED,
  ),
  'qwen3_5_text': _QWEN3_5,
  'qwen3_5': _QWEN3_5,  # multimodal: only the text decoder is read
  'qwen3_5_moe_text': _QWEN3_5_MOE,
  'qwen3_5_moe': _QWEN3_5_MOE,
}

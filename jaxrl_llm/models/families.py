"""Model families: a Hugging Face config.json as a ModelConfig."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from jaxrl_llm.models import size_limits
from jaxrl_llm.types import JsonObject, ModelConfig, UserError

Raw = JsonObject


class Family(NamedTuple):
  """Fields of ModelConfig that are fixed in a family, those read from its config.json, and the file's defaults."""

  settings: Raw = {}
  read: Callable[[Raw, int], Raw] = (
    lambda raw, layers: {}
  )  # from config.json and the number of layers
  defaults: Raw = {}  # values of fields that config.json omits
  biases: tuple[str, ...] = ('qkv_bias', 'out_bias')  # fields of ModelConfig set by attention_bias


def _all_sliding(raw: Raw, layers: int) -> Raw:
  """Mistral, Qwen's mixtures: all layers have a sliding window or none."""
  return _windowed(raw, (True,) * layers)


def _last_sliding(raw: Raw, layers: int) -> Raw:
  """Qwen 2 and 3: layers from max_window_layers on have a sliding window, unless layer_types says otherwise."""
  first = raw.get('max_window_layers', layers)
  return _windowed(raw, _types(raw) or tuple(i >= first for i in range(layers)))


def _windowed(raw: Raw, sliding: tuple[bool, ...]) -> Raw:
  window = raw.get('sliding_window')
  if not window or not raw.get('use_sliding_window', True) or not any(sliding):
    return {}
  return dict(window=window, sliding=sliding)


def _types(raw: Raw) -> tuple[bool, ...]:
  known = {'sliding_attention': True, 'full_attention': False}
  try:
    return tuple(known[kind] for kind in raw.get('layer_types') or ())
  except KeyError as error:
    raise UserError(
      f'layer_types holds {error}; supported: {", ".join(known)}; choose another model.'
    ) from error


def _smollm3(raw: Raw, layers: int) -> Raw:
  interval = raw.get('no_rope_layer_interval', 4)
  rotated = raw.get('no_rope_layers') or [(i + 1) % interval != 0 for i in range(layers)]
  plain = tuple(not r for r in rotated)
  return dict(unrotated=plain if any(plain) else ()) | _windowed(raw, _types(raw) or plain)


def _mixture(raw: Raw, layers: int) -> Raw:
  if raw.get('mlp_only_layers') or raw.get('decoder_sparse_step', 1) != 1:
    raise UserError(
      f'mlp_only_layers={raw.get("mlp_only_layers")} and decoder_sparse_step={raw.get("decoder_sparse_step")} leave '
      'some layers without experts, which is not supported; choose a model with experts in all of them.'
    )
  return _all_sliding(raw, layers) | dict(
    mlp=raw.get('moe_intermediate_size'),
    experts=raw.get('num_experts', raw.get('num_local_experts')),
    experts_per_token=raw.get('num_experts_per_tok'),
    norm_top_k=bool(raw.get('norm_topk_prob')),
  )


def _gemma(raw: Raw, pattern: int) -> Raw:
  layers = raw['num_hidden_layers']
  sliding = _types(raw) or tuple(bool((i + 1) % pattern) for i in range(layers))
  return _windowed(raw, sliding) | dict(
    embed_scale=math.sqrt(raw['hidden_size']),
    query_scale=raw['query_pre_attn_scalar'] ** -0.5,
    logit_cap=raw.get('final_logit_softcapping') or 0.0,
  )


def _gemma2(raw: Raw, layers: int) -> Raw:
  return _gemma(raw, 2) | dict(attention_cap=raw.get('attn_logit_softcapping') or 0.0)


def _gemma3(raw: Raw, layers: int) -> Raw:
  rope = (raw.get('rope_parameters') or {}).get('sliding_attention') or {}
  theta = rope.get('rope_theta') or raw.get('rope_local_base_freq') or 10000.0
  return _gemma(raw, raw.get('sliding_window_pattern', 6)) | dict(sliding_rope_theta=theta)


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
  dict(norms='both', qk_norm='head'),
  _gemma3,
  _GEMMA | dict(vocab_size=262208, max_position_embeddings=131072, rope_theta=1e6),
)
FAMILIES = {
  'llama': Family(),
  'mistral': Family({}, _all_sliding, biases=()),
  'qwen2': Family(dict(qkv_bias=True), _last_sliding, dict(use_sliding_window=False), biases=()),
  'qwen3': Family(dict(qk_norm='head'), _last_sliding, dict(use_sliding_window=False)),
  'qwen3_moe': Family(dict(qk_norm='head'), _mixture, dict(use_sliding_window=False)),
  'smollm3': Family(
    {},
    _smollm3,
    dict(use_sliding_window=False, tie_word_embeddings=True, rope_theta=2e6),
  ),
  'olmo2': Family(dict(qk_norm='all', norms='after')),
  'gemma2': Family(dict(norms='both'), _gemma2, _GEMMA | dict(final_logit_softcapping=30.0)),
  'gemma3_text': _GEMMA3,
  'gemma3': _GEMMA3,  # multimodal: only its text decoder is read
}
_ACTIVATIONS = {'silu': 'silu', 'gelu_pytorch_tanh': 'gelu_tanh'}


def read(raw: Raw, where: str) -> ModelConfig:
  """The ModelConfig of a parsed config.json. Raises UserError that begins with `where` for unsupported models."""
  kind = raw.get('model_type')
  if not isinstance(kind, str) or kind not in FAMILIES:
    raise UserError(
      f'{where}: model_type {kind!r} is not supported; supported: {", ".join(FAMILIES)}.'
    )
  if isinstance(raw.get('text_config'), dict):
    raw = {k: raw[k] for k in ('tie_word_embeddings',) if k in raw} | raw['text_config']
  family = FAMILIES[kind]
  raw = family.defaults | {k: v for k, v in raw.items() if v is not None}
  return _model_config(raw, kind, family, f'{where}: config.json')


def _model_config(raw: Raw, kind: str, family: Family, where: str) -> ModelConfig:
  def size(name: str, default: int | None = None) -> int:
    value = raw.get(name)
    if value is None and default is None:
      raise UserError(f'{where} lacks {name!r}; copy it again.')
    return size_limits.positive_int(default if value is None else value, f'{where}: {name}')

  heads, width, layers = (
    size(n) for n in ('num_attention_heads', 'hidden_size', 'num_hidden_layers')
  )
  base = dict(
    vocab=size('vocab_size'),
    width=width,
    layers=layers,
    heads=heads,
    kv_heads=size('num_key_value_heads', heads),
    head_dim=size('head_dim', max(1, width // heads)),
    mlp=size('intermediate_size'),
    max_tokens=size('max_position_embeddings'),
    norm_eps=size_limits.positive_float(raw.get('rms_norm_eps', 1e-6), f'{where}: rms_norm_eps'),
    mlp_bias=kind in ('llama', 'smollm3') and bool(raw.get('mlp_bias', False)),
    tied=bool(raw.get('tie_word_embeddings', False)),
    family=kind,
    activation=_activation(raw, where),
    **_rotation(raw, where),
    **dict.fromkeys(family.biases, bool(raw.get('attention_bias', False))),
  )
  try:
    family_fields = family.read(raw, layers)
  except UserError as error:
    raise UserError(f'{where}: {error}') from error
  except (AttributeError, KeyError, TypeError, ValueError, ArithmeticError) as error:
    raise UserError(
      f'{where} lacks or misstates a setting of {kind} ({type(error).__name__}: {error}); copy it again.'
    ) from error
  return size_limits.validated(ModelConfig(**(base | family.settings | family_fields)), where)


def _activation(raw: Raw, where: str) -> str:
  # Gemma's files also hold hidden_act, an obsolete field that transformers ignores.
  name = raw.get('hidden_activation') or raw.get('hidden_act') or 'silu'
  if not isinstance(name, str) or name not in _ACTIVATIONS:
    raise UserError(
      f'{where}: hidden_act={name!r} is not supported; supported: {", ".join(_ACTIVATIONS)}.'
    )
  return _ACTIVATIONS[name]


def _rotation(raw: Raw, where: str) -> Raw:
  """Fields of the rotary embedding.

  transformers 5 writes rope_parameters, per kind of layer for Gemma 3; older versions rope_theta and rope_scaling.
  """
  rope = raw.get('rope_parameters') or raw.get('rope_scaling') or {}
  if isinstance(rope, dict) and isinstance(rope.get('full_attention'), dict):
    rope = rope['full_attention']
  if not isinstance(rope, dict):
    raise UserError(f'{where}: rope_scaling={rope!r} must be an object; copy it again.')
  theta = rope.get('rope_theta') or raw.get('rope_theta') or 10000.0
  plain = {k: v for k, v in rope.items() if not isinstance(v, dict | list) and k != 'rope_theta'}
  return dict(
    rope_theta=size_limits.positive_float(theta, f'{where}: rope_theta'),
    rope_scaling=tuple(sorted(plain.items())),
  )


def norm_offset(config: ModelConfig) -> float:
  """The constant that Gemma's files omit from the scale of every norm: x̂·(1 + w). arXiv:2403.08295."""
  return 1.0 if config.family.startswith('gemma') else 0.0

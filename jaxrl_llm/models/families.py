"""Model families: a Hugging Face config.json as a ModelConfig."""

from __future__ import annotations

from jaxrl_llm.models import (
  dense_families,
  gemma4_families,
  mixture_families,
  recurrent_families,
  size_limits,
)
from jaxrl_llm.models.family import Family
from jaxrl_llm.types import JsonObject, ModelConfig, UserError

Raw = JsonObject
FAMILIES = {
  **dense_families.FAMILIES,
  **gemma4_families.FAMILIES,
  **mixture_families.FAMILIES,
  **recurrent_families.FAMILIES,
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
    raw, kind = _text_config(raw, kind)
  family = FAMILIES[kind]
  raw = family.defaults | {k: v for k, v in raw.items() if v is not None}
  return _model_config(raw, kind, family, f'{where}: config.json')


def _text_config(raw: Raw, kind: str) -> tuple[Raw, str]:
  """config.json and family of a multimodal model's text decoder."""
  text = raw['text_config']
  # The head is tied if either level states it; transformers writes both.
  stated = {k: raw[k] for k in ('tie_word_embeddings',) if k in raw}
  tied = {k: v for k, v in stated.items() if v is True}
  if kind == 'mistral3' and text.get('model_type') in ('mistral', 'ministral3'):
    kind = text['model_type']
  return stated | text | tied, kind


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
  """The constant that some files omit from the scale of a norm: x̂·(1 + w). arXiv:2403.08295 (Gemma)."""
  is_centered = config.family.startswith(('gemma2', 'gemma3', 'qwen3_next', 'qwen3_5'))
  return 1.0 if is_centered else 0.0

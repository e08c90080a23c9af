"""GGUF files: metadata to a ModelConfig and a tokenizer, quantised tensors to float32."""

from __future__ import annotations

from typing import Any

import gguf
import jax
import numpy as np

from jaxrl_llm.models import decoder, tokenizer
from jaxrl_llm.types import ModelConfig, UserError

ARCHITECTURES = ('llama', 'qwen2', 'qwen3')

_LAYER = {
  'attn_norm': 'attn_norm',
  'mlp_norm': 'ffn_norm',
  'q_norm': 'attn_q_norm',
  'k_norm': 'attn_k_norm',
  'q': 'attn_q',
  'k': 'attn_k',
  'v': 'attn_v',
  'o': 'attn_output',
  'gate': 'ffn_gate',
  'up': 'ffn_up',
  'down': 'ffn_down',
}
_OUTSIDE = {'embed': 'token_embd', 'norm': 'output_norm', 'head': 'output'}


def load(path: str) -> tuple[ModelConfig, Any, tokenizer.Tokenizer]:
  """Model config, float32 parameters and tokenizer of a GGUF file. Source: none.

  Raises UserError for a broken file, an unsupported architecture, and missing tensors.
  """
  config, fields, tensors = _open(path)
  architecture = fields['general.architecture']

  def read(where, wanted):
    return _read(path, tensors, [str(k.key) for k in where], wanted, architecture, config)

  params = jax.tree_util.tree_map_with_path(read, decoder.abstract_params(config))
  return config, params, tokenizer.from_gguf(fields)


def read_config(path: str) -> ModelConfig:
  """The model config of a GGUF file; no tensor is read. Raises UserError as `load` does. Source: none."""
  return _open(path)[0]


def _open(path: str) -> tuple[ModelConfig, dict[str, Any], dict[str, Any]]:
  """Config, metadata, and tensors by name, still in the file."""
  try:
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
  except Exception as error:  # the reader raises whatever the bytes lead it to
    raise UserError(
      f'config.model={path!r} is no whole GGUF file ({error}); fetch it again.'
    ) from error
  tensors = {t.name: t for t in reader.tensors}
  architecture = fields.get('general.architecture')
  if architecture not in ARCHITECTURES:
    raise UserError(
      f'config.model={path!r}: architecture {architecture!r} is not supported; supported: '
      f'{", ".join(ARCHITECTURES)}.'
    )
  return _config(fields, architecture, tensors), fields, tensors


def _config(fields: dict[str, Any], architecture: str, tensors: dict[str, Any]) -> ModelConfig:
  get = lambda name, default=None: fields.get(f'{architecture}.{name}', default)  # noqa: E731
  heads, width = get('attention.head_count'), get('embedding_length')
  scaling = ()
  if get('rope.scaling.type', 'none') != 'none':
    raise UserError('a GGUF file with scaled rotary embedding is not supported; use a folder.')
  return ModelConfig(
    vocab=len(fields['tokenizer.ggml.tokens']),
    width=width,
    layers=get('block_count'),
    heads=heads,
    kv_heads=get('attention.head_count_kv', heads),
    head_dim=get('attention.key_length', width // heads),
    mlp=get('feed_forward_length'),
    max_tokens=get('context_length'),
    rope_theta=float(get('rope.freq_base', 10000.0)),
    rope_scaling=scaling,
    norm_eps=float(get('attention.layer_norm_rms_epsilon')),
    qkv_bias='blk.0.attn_q.bias' in tensors,
    qk_norm='blk.0.attn_q_norm.weight' in tensors,
    tied='output.weight' not in tensors,
  )


def _read(path, tensors, where, wanted, architecture, config: ModelConfig) -> np.ndarray:
  if where[0] == 'layers':
    name, part = f'blk.{where[1]}.{_LAYER[where[2]]}', where[2]
  else:
    name, part = _OUTSIDE[where[0]], where[0]
  name += '.bias' if where[-1] == 'bias' else '.weight'
  if name not in tensors:
    raise UserError(f'config.model={path!r}: tensor {name!r} is missing; fetch the file again.')
  tensor = tensors[name]
  value = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
  value = value.reshape(tuple(int(n) for n in reversed(tensor.shape)))
  if architecture == 'llama' and part in ('q', 'k'):
    value = _halves(value, config.heads if part == 'q' else config.kv_heads)
  value = value.T if where[-1] == 'kernel' else value
  if value.shape != wanted.shape:
    raise UserError(
      f'config.model={path!r}: tensor {name!r} has shape {value.shape}, not {wanted.shape}; '
      'its metadata and its weights disagree.'
    )
  return np.ascontiguousarray(value)


def _halves(value: np.ndarray, heads: int) -> np.ndarray:
  """Rows of a head from interleaved pairs (GGUF's rotary order) to two halves (ours)."""
  rest = value.shape[1:]
  return value.reshape(heads, -1, 2, *rest).swapaxes(1, 2).reshape(value.shape)

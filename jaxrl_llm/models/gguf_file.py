"""GGUF files: metadata to a ModelConfig and a tokenizer, quantized tensors to float32."""

from __future__ import annotations

import mmap
import struct
from typing import Any

import gguf
import jax
import numpy as np

from jaxrl_llm.checkpointing import safe_files
from jaxrl_llm.models import decoder, size_limits, tokenizer
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

  Raises UserError for a broken file, an unsupported architecture, and tensors that are missing, too many, of another
  shape or not finite. A finite number that is wrong cannot be told: the format has no checksum.
  """
  config, fields, tensors = _open(path)
  size_limits.check_memory(config, f'config.model={path!r}')
  architecture = fields['general.architecture']
  read: set[str] = set()

  def load(where, wanted):
    name = _their_name([str(k.key) for k in where])
    read.add(name)
    return _read(path, tensors, name, wanted, architecture, config)

  params = jax.tree_util.tree_map_with_path(load, decoder.abstract_params(config))
  extra = sorted(tensors.keys() - read)
  if extra:
    raise UserError(
      f'config.model={path!r}: the file holds {extra[0]!r} ({len(extra)} such), which a plain {architecture} decoder '
      'does not have; use a Hugging Face folder of the model instead.'
    )
  return config, params, tokenizer.from_gguf(fields, f'config.model={path!r}')


def read_config(path: str) -> ModelConfig:
  """The model config of a GGUF file; no tensor is read. Raises UserError as `load` does. Source: none."""
  return _open(path)[0]


def _open(path: str) -> tuple[ModelConfig, dict[str, Any], dict[str, Any]]:
  """Config, metadata, and tensors by name, still in the file."""
  try:
    with safe_files.open_regular(path, 'rb') as file:
      _check_lengths(file)
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
  return _config(fields, architecture, tensors, f'config.model={path!r}'), fields, tensors


# Bytes of each type of metadata but text (8) and lists (9).
_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_TEXT, _LIST = 8, 9
_MOST_ITEMS = 2**23  # of all lists together; a vocabulary with its merges has some 2**19


def _check_lengths(file: Any) -> None:
  """Walks over the metadata and raises ValueError where a length leads out of the file, or is absurd.

  The reader believes every count, and would go through 2**60 items that are not there.
  """
  with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
    items = 0

    def take(at: int, form: str) -> tuple[Any, int]:
      end = at + struct.calcsize(form)
      if end > len(data):
        raise ValueError(f'it ends at byte {len(data)}, within its metadata')
      return struct.unpack_from(form, data, at)[0], end

    def over_text(at: int) -> int:
      length, at = take(at, '<Q')
      if length > len(data) - at:
        raise ValueError(f'a text of {length} bytes at byte {at} is longer than the file')
      return at + length

    def over_value(at: int, kind: int, within: bool = False) -> int:
      nonlocal items
      if kind == _TEXT:
        return over_text(at)
      if kind != _LIST or within:
        return take(at, f'<{_BYTES[kind]}s')[1]
      kind, at = take(at, '<I')
      count, at = take(at, '<Q')
      items += count
      if count > len(data) - at or items > _MOST_ITEMS:
        raise ValueError(f'a list of {count} items at byte {at} cannot be')
      for _ in range(count):
        at = over_value(at, kind, within=True)
      return at

    magic, at = take(0, '<4s')
    version, at = take(at, '<I')
    if magic != b'GGUF' or version not in (2, 3):
      raise ValueError(f'it begins with {magic!r} and version {version}')
    tensors, at = take(at, '<Q')
    fields, at = take(at, '<Q')
    for _ in range(min(fields, len(data))):
      kind, at = take(over_text(at), '<I')
      if kind not in _BYTES and kind not in (_TEXT, _LIST):
        raise ValueError(f'a field at byte {at} is of the unknown type {kind}')
      at = over_value(at, kind)
    for _ in range(min(tensors, len(data))):
      dimensions, at = take(over_text(at), '<I')
      if dimensions > 4:
        raise ValueError(f'a tensor at byte {at} has {dimensions} dimensions')
      at = take(at, f'<{8 * dimensions + 12}s')[1]


def _config(
  fields: dict[str, Any], architecture: str, tensors: dict[str, Any], where: str
) -> ModelConfig:
  get = lambda name, default=None: fields.get(f'{architecture}.{name}', default)  # noqa: E731
  size = lambda name, default=None: size_limits.positive_int(  # noqa: E731
    get(name, default), f'{where}: {architecture}.{name}'
  )
  rate = lambda name, default=None: size_limits.positive_float(  # noqa: E731
    get(name, default), f'{where}: {architecture}.{name}'
  )
  if get('rope.scaling.type', 'none') != 'none':
    raise UserError(
      f'{where}: a GGUF file with scaled rotary embedding is not supported; use a folder.'
    )
  tokens = fields.get('tokenizer.ggml.tokens')
  if not isinstance(tokens, list):
    raise UserError(f'{where}: tokenizer.ggml.tokens is no list; fetch the file again.')
  heads, width = size('attention.head_count'), size('embedding_length')
  config = ModelConfig(
    vocab=len(tokens),
    width=width,
    layers=size('block_count'),
    heads=heads,
    kv_heads=size('attention.head_count_kv', heads),
    head_dim=size('attention.key_length', width // heads),
    mlp=size('feed_forward_length'),
    max_tokens=size('context_length'),
    rope_theta=rate('rope.freq_base', 10000.0),
    norm_eps=rate('attention.layer_norm_rms_epsilon'),
    qkv_bias='blk.0.attn_q.bias' in tensors,
    qk_norm='head' if 'blk.0.attn_q_norm.weight' in tensors else '',
    family=architecture,
    tied='output.weight' not in tensors,
  )
  return size_limits.validated(config, where)


def _their_name(where: list[str]) -> str:
  """['layers', '3', 'q', 'kernel'] → 'blk.3.attn_q.weight'."""
  end = 'bias' if where[-1] == 'bias' else 'weight'
  if where[0] == 'layers':
    return f'blk.{where[1]}.{_LAYER[where[2]]}.{end}'
  return f'{_OUTSIDE[where[0]]}.{end}'


def _read(path, tensors, name, wanted, architecture, config: ModelConfig) -> np.ndarray:
  if name not in tensors:
    raise UserError(f'config.model={path!r}: tensor {name!r} is missing; fetch the file again.')
  tensor, kernel = tensors[name], len(wanted.shape) == 2 and name != 'token_embd.weight'
  shape = tuple(int(n) for n in reversed(tensor.shape))
  if shape != (wanted.shape[::-1] if kernel else wanted.shape):
    raise UserError(
      f'config.model={path!r}: tensor {name!r} has shape {shape}, where the metadata ask for {wanted.shape}; its '
      'metadata and its weights disagree; fetch the file again.'
    )
  try:
    value = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
    value = value.reshape(shape)
  except Exception as error:  # types that it does not know, blocks that do not divide
    raise UserError(
      f'config.model={path!r}: tensor {name!r} of type {tensor.tensor_type.name} cannot be unpacked ({error}); take '
      'another quantization.'
    ) from error
  if not np.isfinite(value).all():
    raise UserError(
      f'config.model={path!r}: tensor {name!r} holds what is no finite number; fetch the file again.'
    )
  part = name.split('.')[-2]
  if architecture == 'llama' and part in ('attn_q', 'attn_k'):
    value = _halves(value, config.heads if part == 'attn_q' else config.kv_heads)
  return np.ascontiguousarray(value.T if kernel else value)


def _halves(value: np.ndarray, heads: int) -> np.ndarray:
  """Rows of a head from interleaved pairs (GGUF's rotary order) to two halves (ours)."""
  rest = value.shape[1:]
  return value.reshape(heads, -1, 2, *rest).swapaxes(1, 2).reshape(value.shape)

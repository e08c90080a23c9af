"""GGUF files: metadata to a ModelConfig and a tokenizer, quantized tensors to float32."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Collection
from typing import Any, BinaryIO, NamedTuple

import gguf
import jax
import numpy as np

from jaxrl_llm.checkpointing import safe_files
from jaxrl_llm.models import decoder, size_limits, tokenizer
from jaxrl_llm.types import JsonObject, ModelConfig, Params, UserError

# Name in files → family.
ARCHITECTURES = dict(
  llama='llama', qwen2='qwen2', qwen3='qwen3', qwen2moe='qwen2_moe', qwen3moe='qwen3_moe'
)

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
  'experts/router': 'ffn_gate_inp',
  'shared_router': 'ffn_gate_inp_shexp',
  **{f'experts/{n}': f'ffn_{n}_exps' for n in ('gate', 'up', 'down')},
  **{f'shared_{n}': f'ffn_{n}_shexp' for n in ('gate', 'up', 'down')},
}
_OUTSIDE_LAYERS = {'embed': 'token_embd', 'norm': 'output_norm', 'head': 'output'}

Fields = JsonObject  # metadata by name


class _File(NamedTuple):
  """A GGUF file whose tensors are still on disk."""

  path: str
  config: ModelConfig
  fields: Fields
  tensors: dict[str, gguf.ReaderTensor]


def load(path: str) -> tuple[ModelConfig, Params, tokenizer.Tokenizer]:
  """Model config, float32 parameters and tokenizer of a GGUF file.

  Raises UserError for a broken file, an unsupported architecture, and tensors that are missing, unexpected, of
  another shape or not finite. Wrong finite numbers are not detected: the format has no checksum.
  """
  file = _open(path)
  size_limits.check_memory(file.config, f'config.model={path!r}')
  read: set[str] = set()

  def load_tensor(tree_path, expected):
    path = [str(k.key) for k in tree_path]
    name = tensor_name(path)
    read.add(name)
    return _read(file, name, expected.shape, is_kernel=path[-1] == 'kernel')

  params = jax.tree_util.tree_map_with_path(load_tensor, decoder.abstract_params(file.config))
  extra = sorted(file.tensors.keys() - read)
  if extra:
    raise UserError(
      f'config.model={path!r}: the file holds {extra[0]!r} ({len(extra)} such), which a plain {file.config.family} '
      'decoder does not have; use a Hugging Face folder of the model instead.'
    )
  return file.config, params, tokenizer.from_gguf(file.fields, f'config.model={path!r}')


def read_config(path: str) -> ModelConfig:
  """The model config of a GGUF file; no tensor is read. Raises UserError as `load` does."""
  return _open(path).config


def _open(path: str) -> _File:
  try:
    with safe_files.open_regular(path, 'rb') as file:
      _check_lengths(file)
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
  except Exception as error:  # the reader may raise anything on malformed bytes
    raise UserError(
      f'config.model={path!r} is not a complete GGUF file ({error}); fetch it again.'
    ) from error
  tensors = {t.name: t for t in reader.tensors}
  architecture = fields.get('general.architecture')
  if architecture not in ARCHITECTURES:
    raise UserError(
      f'config.model={path!r}: architecture {architecture!r} is not supported; supported: '
      f'{", ".join(ARCHITECTURES)}.'
    )
  config = config_of(fields, architecture, tensors.keys(), f'config.model={path!r}')
  return _File(path, config, fields, tensors)


def _check_lengths(file: BinaryIO) -> None:
  """Raise ValueError for a length in the metadata that leads out of the file, or is absurd.

  gguf's reader trusts every count, and would iterate over 2**60 items that do not exist.
  """
  with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
    _MetadataWalk(data).run()


class _MetadataWalk:
  """Walks over the metadata and tensor descriptions of a GGUF file, with bounds checks."""

  # Bytes of each type of value except text and lists.
  _BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
  _TEXT, _LIST = 8, 9
  _MAX_ITEMS = 2**23  # of all lists together; a vocabulary with its merges has about 2**19

  def __init__(self, data: mmap.mmap):
    self._data, self._at, self._items = data, 0, 0

  def run(self) -> None:
    magic, version = self._read('<4s'), self._read('<I')
    if magic != b'GGUF' or version not in (2, 3):
      raise ValueError(f'it begins with {magic!r} and version {version}')
    tensors, fields = self._read('<Q'), self._read('<Q')
    for _ in range(min(fields, len(self._data))):
      self._skip_text()
      kind = self._read('<I')
      if kind not in self._BYTES and kind not in (self._TEXT, self._LIST):
        raise ValueError(f'a field at byte {self._at} is of the unknown type {kind}')
      self._skip_value(kind)
    for _ in range(min(tensors, len(self._data))):
      self._skip_text()
      dimensions = self._read('<I')
      if dimensions > 4:
        raise ValueError(f'a tensor at byte {self._at} has {dimensions} dimensions')
      self._read(f'<{8 * dimensions + 12}s')

  def _read(self, form: str) -> Any:
    end = self._at + struct.calcsize(form)
    if end > len(self._data):
      raise ValueError(f'it ends at byte {len(self._data)}, within its metadata')
    (value,) = struct.unpack_from(form, self._data, self._at)
    self._at = end
    return value

  def _skip_text(self) -> None:
    length = self._read('<Q')
    if length > len(self._data) - self._at:
      raise ValueError(f'a text of {length} bytes at byte {self._at} is longer than the file')
    self._at += length

  def _skip_value(self, kind: int, in_list: bool = False) -> None:
    if kind == self._TEXT:
      self._skip_text()
    elif kind != self._LIST or in_list:
      self._read(f'<{self._BYTES[kind]}s')
    else:
      kind, count = self._read('<I'), self._read('<Q')
      self._items += count
      if count > len(self._data) - self._at or self._items > self._MAX_ITEMS:
        raise ValueError(f'a list of {count} items at byte {self._at} is too long')
      for _ in range(count):
        self._skip_value(kind, in_list=True)


def config_of(
  fields: Fields, architecture: str, tensors: Collection[str], where: str
) -> ModelConfig:
  """The model that metadata and names of tensors describe. Raises UserError that begins with `where`."""
  get = lambda name, default=None: fields.get(f'{architecture}.{name}', default)  # noqa: E731
  size = lambda name, default=None: size_limits.positive_int(  # noqa: E731
    get(name, default), f'{where}: {architecture}.{name}'
  )
  number = lambda name, default=None: size_limits.positive_float(  # noqa: E731
    get(name, default), f'{where}: {architecture}.{name}'
  )
  if get('rope.scaling.type', 'none') != 'none':
    raise UserError(
      f'{where}: a GGUF file with scaled rotary embedding is not supported; use a folder.'
    )
  tokens = fields.get('tokenizer.ggml.tokens')
  if not isinstance(tokens, list):
    raise UserError(f'{where}: tokenizer.ggml.tokens is not a list; fetch the file again.')
  heads, width = size('attention.head_count'), size('embedding_length')
  is_mixture = architecture.endswith('moe')
  config = ModelConfig(
    vocab=len(tokens),
    width=width,
    layers=size('block_count'),
    heads=heads,
    kv_heads=size('attention.head_count_kv', heads),
    head_dim=size('attention.key_length', width // heads),
    mlp=size('expert_feed_forward_length' if is_mixture else 'feed_forward_length'),
    max_tokens=size('context_length'),
    rope_theta=number('rope.freq_base', 10000.0),
    norm_eps=number('attention.layer_norm_rms_epsilon'),
    qkv_bias='blk.0.attn_q.bias' in tensors,
    qk_norm='head' if 'blk.0.attn_q_norm.weight' in tensors else '',
    family=ARCHITECTURES[architecture],
    **_mixture(architecture, size),
    tied='output.weight' not in tensors,
  )
  return size_limits.validated(config, where)


def _mixture(architecture: str, size: Callable[[str], int]) -> JsonObject:
  """Fields of a mixture; what files do not state is fixed in llama.cpp."""
  if not architecture.endswith('moe'):
    return {}
  counts = dict(experts=size('expert_count'), experts_per_token=size('expert_used_count'))
  if architecture == 'qwen3moe':
    return counts | dict(norm_top_k=True)
  return counts | dict(shared_mlp=size('expert_shared_feed_forward_length'), shared_gate=True)


def tensor_name(path: list[str]) -> str:
  """['layers', '3', 'q', 'kernel'] → 'blk.3.attn_q.weight'."""
  suffix = 'bias' if path[-1] == 'bias' else 'weight'
  if path[0] == 'layers':
    return f'blk.{path[1]}.{_LAYER["/".join(path[2:-1])]}.{suffix}'
  return f'{_OUTSIDE_LAYERS[path[0]]}.{suffix}'


def _read(file: _File, name: str, expected: tuple[int, ...], is_kernel: bool) -> np.ndarray:
  """One tensor in float32, kernels as [in, out]."""
  where, config = f'config.model={file.path!r}: tensor {name!r}', file.config
  shape_in_file = file_order(np.empty(expected, np.bool_)).shape if is_kernel else expected
  if name not in file.tensors:
    raise UserError(f'{where} is missing; fetch the file again.')
  tensor = file.tensors[name]
  shape = tuple(int(n) for n in reversed(tensor.shape))
  if shape != shape_in_file:
    raise UserError(
      f'{where} has shape {shape}, where the metadata require {expected}; its metadata and its weights disagree; '
      'fetch the file again.'
    )
  try:
    value = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
    value = value.reshape(shape)
  except Exception as error:  # unknown types, or blocks that do not divide the shape
    raise UserError(
      f'{where} of type {tensor.tensor_type.name} cannot be unpacked ({error}); take another quantization.'
    ) from error
  if not np.isfinite(value).all():
    raise UserError(f'{where} contains a number that is not finite; fetch the file again.')
  value = rotary_order(value, name, config, read=True)
  return np.ascontiguousarray(
    value.swapaxes(-1, -2) if is_kernel and value.ndim > 1 else value
  ).reshape(expected)


def file_order(kernel: np.ndarray) -> np.ndarray:
  """A kernel [..., in, out] as files hold it: [..., out, in], and a vector where out = 1."""
  return kernel[..., 0] if kernel.shape[-1] == 1 else kernel.swapaxes(-1, -2)


def rotary_order(value: np.ndarray, name: str, config: ModelConfig, read: bool) -> np.ndarray:
  """Rows of a tensor [out, …] in our order (`read`) or in the file's.

  For llama, files hold the rotary pairs of queries and keys interleaved, and we hold them as two halves of each head.
  """
  part, rest = name.split('.')[-2], value.shape[1:]
  if config.family != 'llama' or part not in ('attn_q', 'attn_k'):
    return value
  heads = config.heads if part == 'attn_q' else config.kv_heads
  pairs = (heads, -1, 2) if read else (heads, 2, value.shape[0] // heads // 2)
  return value.reshape(*pairs, *rest).swapaxes(1, 2).reshape(value.shape)

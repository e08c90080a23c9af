"""Matrices in float8 with a scale for each block of rows and columns: the released layout of DeepSeek-V3.

arXiv:2412.19437.
"""

from __future__ import annotations

import json

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.checkpointing import safe_files
from jaxrl_llm.types import JsonObject, UserError

Block = tuple[int, int]  # rows and columns of a matrix [out, in] that share a scale
_BLOCK = 128, 128


def block_size(raw: JsonObject, where: str) -> Block:
  """The block of a config.json. Raises UserError, which begins with `where`, for one that cannot be."""
  settings = raw.get('quantization_config')
  size = settings.get('weight_block_size', _BLOCK) if isinstance(settings, dict) else _BLOCK
  is_pair = isinstance(size, list | tuple) and len(size) == 2
  if not is_pair or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in size):
    raise UserError(
      f'{where}: weight_block_size={size!r} must be two whole numbers above 0, such as [128, 128]; copy it again.'
    )
  rows, columns = size
  return rows, columns


def scale_shape(shape: tuple[int, ...], block: Block) -> tuple[int, ...]:
  """The shape of the scales of a matrix; blocks at its ends may be smaller."""
  return tuple(-(-n // size) for n, size in zip(shape, block, strict=True))


def read(file: str, name: str, shape: tuple[int, ...]) -> np.ndarray:
  """The float8 numbers of a tensor, from a safetensors file that the library has opened and so checked."""
  with safe_files.retry(open, file, 'rb') as stream:
    header_size = int.from_bytes(stream.read(8), 'little')
    first, end = json.loads(stream.read(header_size))[name]['data_offsets']
    stream.seek(8 + header_size + first)
    data = stream.read(end - first)
  return np.frombuffer(data, np.dtype(jnp.float8_e4m3fn)).reshape(shape)


def unpack(numbers_AxB: np.ndarray, scales: np.ndarray, block: Block) -> np.ndarray:
  """number · scale of its block, in float32."""
  A, B = numbers_AxB.shape
  scale_AxB = scales.astype(np.float32).repeat(block[0], 0)[:A].repeat(block[1], 1)[:, :B]
  return numbers_AxB.astype(np.float32) * scale_AxB

"""MXFP4: blocks of 4-bit floating-point numbers that share a power of two, by the Open Compute Project's MX format."""

from __future__ import annotations

import numpy as np

BLOCK = 32  # numbers with one scale
# Of the 4 bits e2m1: 8 magnitudes, then the same with a minus sign.
_MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
_NUMBERS = np.array(_MAGNITUDES + [-x for x in _MAGNITUDES], np.float32)
_BIAS = 127  # of the exponent in a scale


def unpack(block_bytes: np.ndarray, scale_bytes: np.ndarray) -> np.ndarray:
  """Bytes [..., n, 16] of two numbers each, the first in the low bits, and scales [..., n] → float32 [..., 32 n]."""
  numbers = np.empty((*block_bytes.shape[:-1], BLOCK), np.float32)
  numbers[..., 0::2] = _NUMBERS[block_bytes & 15]
  numbers[..., 1::2] = _NUMBERS[block_bytes >> 4]
  with np.errstate(over='ignore'):  # the caller looks for infinite numbers
    numbers = np.ldexp(numbers, scale_bytes.astype(np.int32)[..., None] - _BIAS)
  return numbers.reshape(*scale_bytes.shape[:-1], -1)

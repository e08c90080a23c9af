"""Makes blockwise_golden.json: a kernel quantized by the CPU functions of bitsandbytes, to NF4 and to int8.

python tests/models/make_blockwise_golden.py        (needs bitsandbytes and torch; nothing of jaxrl_llm)
Its kernels are [out, in]. Indices of int8 are into a linear code, k / 127 for k from -127 to 127 and another 0.
"""

from __future__ import annotations

import json
import pathlib

import bitsandbytes
import numpy as np
import torch
from bitsandbytes import functional

D, F, BLOCK = 128, 3, 64
FILE = pathlib.Path(__file__).with_name('blockwise_golden.json')


def kernel() -> np.ndarray:
  """[D, F] with long tails, as kernels have them, and a block of zeros."""
  x_DxF = np.random.default_rng(0).standard_t(4, size=(D, F)).astype(np.float32) * np.float32(0.05)
  x_DxF[64:, 1] = 0
  return x_DxF


def main() -> None:
  x_DxF = kernel()
  x_FxD = torch.tensor(x_DxF.T.copy())
  packed, nf4 = functional.quantize_4bit(
    x_FxD, blocksize=BLOCK, quant_type='nf4', compress_statistics=False
  )
  linear = functional.create_linear_map(signed=True)
  index_FxD, int8 = functional.quantize_blockwise(x_FxD, code=linear, blocksize=BLOCK)
  golden = dict(
    source=f'github.com/bitsandbytes-foundation/bitsandbytes {bitsandbytes.__version__}, on a CPU',
    command='python tests/models/make_blockwise_golden.py',
    torch=torch.__version__,
    kernel_DxF=x_DxF.tolist(),
    absmax=nf4.absmax.tolist(),
    code=nf4.code.tolist(),
    packed=packed.flatten().tolist(),
    nf4_DxF=functional.dequantize_4bit(packed, nf4).numpy().T.tolist(),
    int8_absmax=int8.absmax.tolist(),
    int8_code=linear.tolist(),
    int8_index_FxD=index_FxD.tolist(),
    int8_DxF=functional.dequantize_blockwise(index_FxD, int8).numpy().T.tolist(),
  )
  lines = (f'{json.dumps(name)}: {json.dumps(value)}' for name, value in golden.items())
  FILE.write_text('{\n' + ',\n'.join(lines) + '\n}\n')


if __name__ == '__main__':
  main()

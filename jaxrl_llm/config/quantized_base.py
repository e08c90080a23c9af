"""Settings that do not go with a quantized frozen base: rows of `compatibility.ROWS`."""

from __future__ import annotations

from jaxrl_llm.config.conditions import Condition, Row

_BASE = Condition('lora.base_dtype', 'in', ('int8', 'nf4'))
_ONLY = 'only kernels of attention and dense feed-forward layers are quantized'
_KEEP = 'set --config.lora.base_dtype=auto'
ROWS = (
  Row(
    _BASE,
    Condition('lora.rank', 'below', 1),
    'quantized kernels are frozen, and without an adapter nothing would be trained',
    'set --config.lora.rank=16, or --config.lora.base_dtype=auto',
  ),
  Row(
    _BASE,
    Condition('rollout.weights_dtype', 'not in', ('auto',)),
    'sampling reads the quantized base as it is',
    'set --config.rollout.weights_dtype=auto',
  ),
  Row(_BASE, Condition('model.experts', label='a mixture of experts'), _ONLY, _KEEP),
  Row(_BASE, Condition('model.latent', label='a model with latent attention'), _ONLY, _KEEP),
  Row(_BASE, Condition('model.recurrent', label='a model with recurrent layers'), _ONLY, _KEEP),
)

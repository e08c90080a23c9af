"""Decoders, their files and tokenizers: `load` reads a model, `forward` computes its logits."""

from jaxrl_llm.models.decoder import forward
from jaxrl_llm.models.load import load, read_config
from jaxrl_llm.models.planning import read_shape

__all__ = ['forward', 'load', 'read_config', 'read_shape']

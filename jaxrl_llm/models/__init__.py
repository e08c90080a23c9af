"""Decoders, their files and tokenizers: `load` reads a model, `forward` computes its logits."""

from jaxrl_llm.models.decoder import forward
from jaxrl_llm.models.load import load, read_config

__all__ = ['forward', 'load', 'read_config']

"""Generation: prefill, slots, sampling; everything here may run inside the compiled step."""

from jaxrl_llm.generate.sample import sample, stream

__all__ = ['sample', 'stream']

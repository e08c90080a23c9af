"""Generation: prefill, slots, sampling; everything here may run inside the compiled step."""

from jaxrl_llm.rollout.text_generation import CompletionStreamer, sample, stream

__all__ = ['CompletionStreamer', 'sample', 'stream']

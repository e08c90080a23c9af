"""Rollouts: decode loops with slots, sampling, drafts, trees, pruning, early exits, length schedules."""

from jaxrl_llm.rollout.text_generation import CompletionStreamer, sample, stream

__all__ = ['CompletionStreamer', 'sample', 'stream']

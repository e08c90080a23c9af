"""Reinforcement learning with verifiable rewards for language models, natively in JAX."""

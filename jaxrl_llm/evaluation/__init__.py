"""Evaluation on held-out prompts: estimates with intervals, tables, paired comparison. These modules import no jax."""

from __future__ import annotations

from jaxrl_llm.evaluation import compare, estimate, tally

__all__ = ['compare', 'estimate', 'tally']

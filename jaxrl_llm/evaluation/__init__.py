"""What an evaluation's answers say: estimates with intervals, tables, and how two of them compare. No jax in here."""

from __future__ import annotations

from jaxrl_llm.evaluation import compare, estimate, tally

__all__ = ['compare', 'estimate', 'tally']

"""Objectives as coefficients. A method whose result is a gradient lives here."""

from jaxrl_llm.objective.compose import Method, Targets, coefficients, method, mixed, targets

__all__ = ['Method', 'Targets', 'coefficients', 'method', 'mixed', 'targets']

"""Objectives as coefficients. A method whose result is a gradient lives here."""

from jaxrl_llm.objective.compose import (
  SUMS,
  Method,
  Targets,
  behaviour,
  coefficients,
  method,
  mixed,
  scale,
  targets,
)

__all__ = [
  'SUMS',
  'Method',
  'Targets',
  'behaviour',
  'coefficients',
  'method',
  'mixed',
  'scale',
  'targets',
]

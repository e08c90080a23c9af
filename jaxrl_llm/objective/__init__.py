"""Objectives as coefficients. A method whose result is a gradient lives here."""

from jaxrl_llm.objective.demonstration_terms import (
  Lesson,
  lesson_coefficients,
  plan_lesson,
  recorded_or,
)
from jaxrl_llm.objective.grouping import Groups, groups
from jaxrl_llm.objective.policy_gradient import (
  SUMS,
  Method,
  Targets,
  coefficients,
  distilled,
  method,
  mixed,
  scale,
  targets,
)
from jaxrl_llm.objective.replayed_log_probs import behavior, rescored
from jaxrl_llm.objective.token_inputs import TOP, said
from jaxrl_llm.objective.turn_masks import of_turn

__all__ = [
  'SUMS',
  'Groups',
  'TOP',
  'Lesson',
  'Method',
  'Targets',
  'behavior',
  'coefficients',
  'distilled',
  'groups',
  'lesson_coefficients',
  'method',
  'mixed',
  'of_turn',
  'plan_lesson',
  'recorded_or',
  'rescored',
  'said',
  'scale',
  'targets',
]

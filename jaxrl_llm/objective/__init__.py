"""Objectives as coefficients of log-probs: stages, their composition, and what the update needs of them."""

from jaxrl_llm.objective.demonstration_terms import (
  DemonstrationTerms,
  demonstration_coefficients,
  fill_behavior,
  plan_demonstrations,
)
from jaxrl_llm.objective.method_spec import Method, method
from jaxrl_llm.objective.policy_gradient import (
  SUMS,
  Groups,
  OtherPolicies,
  Targets,
  coefficients,
  distill,
  group_rows,
  learning_rate_scale,
  mean_reward_penalty,
  mixed_group_mask,
  targets,
)
from jaxrl_llm.objective.replayed_log_probs import behavior_log_probs, fill_replayed_log_probs
from jaxrl_llm.objective.token_inputs import CONFIDENCE_TOP_K, sampled_mask
from jaxrl_llm.objective.turn_masks import turn_targets

__all__ = [
  'CONFIDENCE_TOP_K',
  'SUMS',
  'DemonstrationTerms',
  'Groups',
  'Method',
  'OtherPolicies',
  'Targets',
  'behavior_log_probs',
  'coefficients',
  'demonstration_coefficients',
  'distill',
  'fill_behavior',
  'fill_replayed_log_probs',
  'group_rows',
  'learning_rate_scale',
  'mean_reward_penalty',
  'method',
  'mixed_group_mask',
  'plan_demonstrations',
  'sampled_mask',
  'targets',
  'turn_targets',
]

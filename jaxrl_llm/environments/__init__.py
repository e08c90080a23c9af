"""Environments that answer a model's turns: tools, games, and the user's own. Nothing in here imports jax."""

from __future__ import annotations

from jaxrl_llm.environments.protocol import Environment, Result, ends_episode
from jaxrl_llm.environments.resolve import resolve
from jaxrl_llm.environments.turn_template import TurnTemplate, build_turn_template
from jaxrl_llm.environments.worker_pool import TurnRequest, TurnResult, WorkerPool

__all__ = [
  'TurnRequest',
  'Environment',
  'TurnResult',
  'Result',
  'TurnTemplate',
  'WorkerPool',
  'ends_episode',
  'resolve',
  'build_turn_template',
]

"""Environments for multi-turn episodes: tools, games, and users' own. Nothing in this package imports jax."""

from __future__ import annotations

from jaxrl_llm.environments import batching
from jaxrl_llm.environments.live import EpisodeKey, TurnRequest, TurnResult
from jaxrl_llm.environments.protocol import Environment, Result, ends_episode, turn_rewards
from jaxrl_llm.environments.resolve import list_tools, resolve, with_call_format
from jaxrl_llm.environments.turn_template import TurnTemplate, build_turn_template
from jaxrl_llm.environments.worker_pool import LOST, WorkerPool

__all__ = [
  'LOST',
  'Environment',
  'EpisodeKey',
  'Result',
  'TurnRequest',
  'TurnResult',
  'TurnTemplate',
  'WorkerPool',
  'batching',
  'build_turn_template',
  'ends_episode',
  'list_tools',
  'resolve',
  'turn_rewards',
  'with_call_format',
]

"""Environments that answer a model's turns: tools, games, and the user's own. Nothing in here imports jax."""

from __future__ import annotations

from jaxrl_llm.environments.protocol import Environment, Result, over
from jaxrl_llm.environments.resolve import resolve
from jaxrl_llm.environments.turn_template import Seam, seam
from jaxrl_llm.environments.worker_pool import Asked, Heard, Stage

__all__ = [
  'Asked',
  'Environment',
  'Heard',
  'Result',
  'Seam',
  'Stage',
  'over',
  'resolve',
  'seam',
]

"""Rollouts that are used after their step. Numpy on the host, without jax."""

from jaxrl_llm.replay import dynamic_sampling, group_batches, reuse, rollout_buffer
from jaxrl_llm.replay.drafts import Drafts
from jaxrl_llm.replay.dynamic_sampling import Collector
from jaxrl_llm.replay.known_answers import KnownAnswers
from jaxrl_llm.replay.partial_rollouts import PartialRollouts, blank
from jaxrl_llm.replay.shared_rollouts import SharedRollouts
from jaxrl_llm.replay.waiting_slots import WaitingSlots

__all__ = [
  'KnownAnswers',
  'Collector',
  'Drafts',
  'PartialRollouts',
  'SharedRollouts',
  'WaitingSlots',
  'blank',
  'dynamic_sampling',
  'group_batches',
  'reuse',
  'rollout_buffer',
]

"""Replay: rollouts that outlive their step. Numpy on the host; nothing here imports jax."""

from jaxrl_llm.replay import dynamic_sampling, successes
from jaxrl_llm.replay.drafts import Drafts
from jaxrl_llm.replay.dynamic_sampling import Collector
from jaxrl_llm.replay.known_answers import Answers
from jaxrl_llm.replay.partial_rollouts import Unfinished, blank
from jaxrl_llm.replay.successes import Successes

__all__ = [
  'Answers',
  'Collector',
  'Drafts',
  'Successes',
  'Unfinished',
  'blank',
  'dynamic_sampling',
  'successes',
]

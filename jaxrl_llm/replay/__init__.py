"""Replay: rollouts that outlive their step. Numpy on the host; nothing here imports jax."""

from jaxrl_llm.replay import collect, successes
from jaxrl_llm.replay.answers import Answers
from jaxrl_llm.replay.collect import Collector
from jaxrl_llm.replay.drafts import Drafts
from jaxrl_llm.replay.successes import Successes
from jaxrl_llm.replay.unfinished import Unfinished, blank

__all__ = [
  'Answers',
  'Collector',
  'Drafts',
  'Successes',
  'Unfinished',
  'blank',
  'collect',
  'successes',
]

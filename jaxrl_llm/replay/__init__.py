"""Replay: rollouts that outlive their step. Numpy on the host; nothing here imports jax."""

from jaxrl_llm.replay import successes
from jaxrl_llm.replay.drafts import Drafts
from jaxrl_llm.replay.successes import Successes
from jaxrl_llm.replay.unfinished import Unfinished, blank

__all__ = ['Drafts', 'Successes', 'Unfinished', 'blank', 'successes']

"""Replay: rollouts that outlive their step. Numpy on the host; nothing here imports jax."""

from jaxrl_llm.replay.drafts import Drafts
from jaxrl_llm.replay.unfinished import Unfinished, blank

__all__ = ['Drafts', 'Unfinished', 'blank']

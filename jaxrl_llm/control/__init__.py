"""Control: decisions about what to run. Numpy on the host; nothing here imports jax."""

from jaxrl_llm.control.curriculum import Curriculum, Proposal

__all__ = ['Curriculum', 'Proposal']

"""Control: decisions about what to run. Numpy on the host; nothing here imports jax."""

from jaxrl_llm.control.curriculum import Curriculum, Proposal
from jaxrl_llm.control.length import LengthEstimate

__all__ = ['Curriculum', 'LengthEstimate', 'Proposal']

"""Control: decisions about what to run. Numpy on the host; nothing here imports jax."""

from jaxrl_llm.control import allocate, hint
from jaxrl_llm.control.curriculum import Curriculum, Proposal
from jaxrl_llm.control.hint import Hints
from jaxrl_llm.control.length import LengthEstimate

__all__ = ['Curriculum', 'Hints', 'LengthEstimate', 'Proposal', 'allocate', 'hint']

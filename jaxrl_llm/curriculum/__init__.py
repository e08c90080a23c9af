"""The curriculum: which prompts to sample, how often, and with which hints. Numpy on the host, without jax."""

from jaxrl_llm.curriculum import allocation, hint_rules, labels
from jaxrl_llm.curriculum.curriculum import Curriculum, HintedPosteriors, Proposal
from jaxrl_llm.curriculum.evidence import Evidence, LengthEstimate, gather_evidence
from jaxrl_llm.curriculum.hint_scheduler import HintScheduler
from jaxrl_llm.curriculum.labels import LabelRefiner

__all__ = [
  'HintedPosteriors',
  'Curriculum',
  'Evidence',
  'HintScheduler',
  'LabelRefiner',
  'LengthEstimate',
  'Proposal',
  'allocation',
  'gather_evidence',
  'hint_rules',
  'labels',
]

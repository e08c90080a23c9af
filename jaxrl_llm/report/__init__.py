"""What a run has done, for a reader: report.html, and the curriculum's tables in a terminal."""

from jaxrl_llm.report.curriculum import Report, bars, make, plain, read, tell, visits
from jaxrl_llm.report.device import FLOOR
from jaxrl_llm.report.live import Live
from jaxrl_llm.report.rollouts import Rollouts
from jaxrl_llm.report.write import run

__all__ = [
  'FLOOR',
  'Live',
  'Report',
  'Rollouts',
  'bars',
  'make',
  'plain',
  'read',
  'run',
  'tell',
  'visits',
]

"""What a run has done, for a reader: report.html, and the curriculum's tables in a terminal."""

from jaxrl_llm.report.curriculum import Report, bars, make, plain, read, tell, visits
from jaxrl_llm.report.device import ROOFLINE_FILE
from jaxrl_llm.report.live import LiveReport
from jaxrl_llm.report.rollouts import Rollouts
from jaxrl_llm.report.write import write_report

__all__ = [
  'ROOFLINE_FILE',
  'LiveReport',
  'Report',
  'Rollouts',
  'bars',
  'make',
  'plain',
  'read',
  'write_report',
  'tell',
  'visits',
]

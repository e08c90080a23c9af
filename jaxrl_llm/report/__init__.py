"""Reports on a run: report.html, and the curriculum's tables in a terminal."""

from jaxrl_llm.report.command import write_report
from jaxrl_llm.report.curriculum import (
  CurriculumReport,
  load_json,
  print_tables,
  sparkline,
  success_of_visits,
  summarize,
  to_json,
)
from jaxrl_llm.report.device import ROOFLINE_FILE
from jaxrl_llm.report.live import LiveReport
from jaxrl_llm.report.rollouts import Rollouts

__all__ = [
  'ROOFLINE_FILE',
  'CurriculumReport',
  'LiveReport',
  'Rollouts',
  'load_json',
  'print_tables',
  'sparkline',
  'success_of_visits',
  'summarize',
  'to_json',
  'write_report',
]

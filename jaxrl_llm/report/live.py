"""Writes report.html and curriculum.json while a run goes on."""

from __future__ import annotations

import json
import os
import time

from absl import logging

from jaxrl_llm.checkpointing import safe_files
from jaxrl_llm.curriculum import Curriculum
from jaxrl_llm.report import curriculum as curriculum_report
from jaxrl_llm.report import page
from jaxrl_llm.report.rollouts import Rollouts
from jaxrl_llm.types import Row, UserError

# Pause after a write, in multiples of the time it took: reports take at most 2 % of a run.
_PAUSE_FACTOR = 50


class LiveReport:
  """The report of a run in progress. An error while writing is logged once and never stops the run."""

  def __init__(
    self, folder: str, every_s: float, curriculum: Curriculum, rows: tuple[Row, ...], writes: bool
  ):
    """Writes at most every `every_s` seconds; 0 = only when `write` is called.

    `writes` is true on one process of a run; on the others the methods do nothing.
    """
    self._folder, self._every_s, self._writes = folder, every_s, writes
    self._curriculum, self._rows = curriculum, rows
    self._rollouts, self._next_s, self._warned = Rollouts(folder), 0.0, False

  def write_if_due(self) -> None:
    """Writes the report if the interval has passed. Call it after every step."""
    if self._every_s and time.monotonic() >= self._next_s:
      self.write()

  def write(self) -> None:
    """Writes the report now."""
    if not self._writes:
      return
    start_s = time.monotonic()
    try:
      self._write_files()
    except Exception as error:  # a display error must not end a run
      if not self._warned:
        logging.warning('report.html was not written: %s: %s', type(error).__name__, error)
      self._warned = True
    end_s = time.monotonic()
    self._next_s = end_s + max(self._every_s, _PAUSE_FACTOR * (end_s - start_s))

  def _write_files(self) -> None:
    self._rollouts.refresh()
    try:
      report = curriculum_report.summarize(
        self._folder, self._curriculum, self._rows, self._rollouts
      )
    except UserError:  # no rollouts yet
      report = None
    if report is not None:
      text = json.dumps(curriculum_report.to_json(report), ensure_ascii=False, indent=1)
      safe_files.write(os.path.join(self._folder, 'curriculum.json'), text)
    page.write(os.path.join(self._folder, 'report.html'), [self._folder], [self._rollouts])

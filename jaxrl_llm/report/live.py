"""report.html and curriculum.json of a run that goes on, at most so often, and never at its expense."""

from __future__ import annotations

import json
import os
import time
from typing import Any

from absl import logging

from jaxrl_llm.checkpointing import safe_files
from jaxrl_llm.curriculum import Curriculum
from jaxrl_llm.report import curriculum as told
from jaxrl_llm.report import page
from jaxrl_llm.report.rollouts import Rollouts
from jaxrl_llm.types import Row, UserError

# A page that took a second to write is not written again for so many.
_REST = 50


class LiveReport:
  """`step` after every landed step, `finish` at the end. What goes wrong here is a warning, and once."""

  def __init__(
    self, folder: str, every_s: float, curriculum: Curriculum, rows: tuple[Row, ...], first: bool
  ):
    """Of several processes only the `first` one writes; every_s = 0: `finish` alone does."""
    self._folder, self._every_s, self._first = folder, every_s, first
    self._curriculum, self._rows = curriculum, rows
    self._rollouts, self._next, self._warned = Rollouts(folder), 0.0, False

  def write_if_due(self) -> None:
    """Writes if it is time to."""
    if self._every_s and time.monotonic() >= self._next:
      self.write()

  def write(self) -> None:
    """Writes."""
    if not self._first:
      return
    began = time.monotonic()
    try:
      self._write()
    except Exception as error:  # a run is worth more than its picture
      if not self._warned:
        logging.warning('report.html was not written: %s: %s', type(error).__name__, error)
      self._warned = True
    now = time.monotonic()
    self._next = now + max(self._every_s, _REST * (now - began))

  def _write(self) -> None:
    self._rollouts.refresh()
    try:
      made = told.make(self._folder, self._curriculum, self._rows, self._rollouts)
    except UserError:  # no rollouts yet
      made = None
    if made is not None:
      _whole(os.path.join(self._folder, 'curriculum.json'), told.plain(made))
    page.write(os.path.join(self._folder, 'report.html'), [self._folder], [self._rollouts])


def _whole(path: str, value: Any) -> None:
  safe_files.write(path, json.dumps(value, ensure_ascii=False, indent=1))

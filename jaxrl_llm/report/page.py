"""report.html: one self-contained file for one or several runs; runs.html: a list of runs to compare.

The data of a run is stored in the page as deflated bytes in base64 and is unpacked by the browser when it is displayed.
Scripts insert it as text, never as markup.
"""

from __future__ import annotations

import base64
import html
import importlib.resources
import json
import os
import zlib
from collections.abc import Iterator, Sequence

from jaxrl_llm.checkpointing import safe_files
from jaxrl_llm.report import runs
from jaxrl_llm.report.rollouts import JsonObject, Rollouts
from jaxrl_llm.report.run_reader import read_run, rollout_index

# In the order in which they are concatenated.
_SCRIPTS = (
  'base',
  'charts',
  'intervals',
  'result',
  'sections',
  'curriculum',
  'device',
  'tokens',
  'detail',
  'browser',
  'start',
)
_RUNS_SCRIPTS = ('base', 'charts', 'intervals', 'runs')


def write(path: str, folders: list[str], rollouts: list[Rollouts] | None = None) -> str:
  """Writes the page of these runs atomically and returns `path`. Raises UserError where a folder holds no run."""
  safe_files.write(path, render(folders, rollouts))
  return path


def render(folders: list[str], rollouts: list[Rollouts] | None = None) -> str:
  """Returns the page as text. It depends on the content of the folders alone, not on the time."""
  rollouts = rollouts or [Rollouts(folder).refresh() for folder in folders]
  read = [read_run(folder, each) for folder, each in zip(folders, rollouts, strict=True)]
  _make_names_distinct(read, folders)
  blocks = [
    _data_element(name, data)
    for number, (run, run_rollouts) in enumerate(zip(read, rollouts, strict=True))
    for name, data in _data_blocks(number, run, run_rollouts)
  ]
  return _fill_template(
    _asset('page.html'),
    TITLE=html.escape(', '.join(run['name'] for run in read)),
    STYLE=_asset('page.css'),
    BLOCKS='\n'.join(blocks),
    SCRIPT=f"'use strict';\n(() => {{\nconst RUNS = {len(read)};\n{scripts()}\n}})();",
  )


def write_runs(path: str, folders: list[str]) -> str:
  """Writes the page that lists these runs atomically and returns `path`."""
  safe_files.write(path, render_runs(folders, path))
  return path


def render_runs(folders: list[str], path: str) -> str:
  """Returns the page of runs as text; its links are relative to `path`."""
  return _fill_template(
    _asset('runs.html'),
    STYLE=_asset('page.css'),
    BLOCKS=_data_element('runs-data', _deflated_json(dict(runs=runs.read_all(folders, path)))),
    SCRIPT=f"'use strict';\n(() => {{\n{scripts(_RUNS_SCRIPTS)}\n}})();",
  )


def scripts(names: Sequence[str] = _SCRIPTS) -> str:
  """Returns the JavaScript of a page."""
  return '\n'.join(_asset(f'{name}.js') for name in names)


def _data_blocks(number: int, run: JsonObject, rollouts: Rollouts) -> Iterator[tuple[str, bytes]]:
  """Yields (element id, deflated data) for one run."""
  yield f'run{number}', _deflated_json(run)
  yield f'index{number}', _deflated_json(rollout_index(rollouts))
  yield f'prompts{number}', _deflated_json(rollouts.prompts())
  for position, file in enumerate(rollouts.files):
    if file.text:
      yield f'file{number}-{position}', file.text


def _fill_template(page: str, **fields: str) -> str:
  """Replaces `<!--NAME-->` by each field, in the order of the page.

  The page is cut at the marks before anything is inserted, because a field may contain such a mark as data.
  """
  parts = []
  for name, text in fields.items():
    head, _, page = page.partition(f'<!--{name}-->')
    parts += [head, text]
  return ''.join(parts) + page


def _asset(name: str) -> str:
  return (importlib.resources.files(__package__) / 'assets' / name).read_text('utf-8')


def _make_names_distinct(runs: list[JsonObject], folders: list[str]) -> None:
  """Adds the parent folder to the names of runs whose folders have the same name."""
  names = [run['name'] for run in runs]
  for run, folder in zip(runs, folders, strict=True):
    if names.count(run['name']) > 1:
      run['name'] = '/'.join(os.path.abspath(folder).split(os.sep)[-2:])


def _deflated_json(value: dict) -> bytes:
  return zlib.compress(json.dumps(value, ensure_ascii=False).encode('utf-8', 'replace'), 6)


def _data_element(name: str, data: bytes) -> str:
  text = base64.b64encode(data).decode('ascii')
  return f'<script type="application/octet-stream" id="{name}">{text}</script>'

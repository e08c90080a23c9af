"""One self-contained HTML file of one or several runs: everything inside, nothing fetched.

What a run said lies in the page as deflated bytes in base64 and is only unpacked when it is looked at; scripts put it
on the screen as text and never as markup.
"""

from __future__ import annotations

import base64
import html
import importlib.resources
import json
import os
import zlib
from typing import Any

from jaxrl_llm.checkpointing import safe_files
from jaxrl_llm.report.rollouts import Rollouts
from jaxrl_llm.report.run_reader import gather, index

_PARTS = (
  'base',
  'charts',
  'sections',
  'curriculum',
  'device',
  'tokens',
  'detail',
  'browser',
  'start',
)


def write(path: str, folders: list[str], read: list[Rollouts] | None = None) -> str:
  """Writes the page of these runs whole or not at all; returns `path`. UserError for no run folder. Source: none."""
  text = make(folders, read)
  safe_files.write(path, text)
  return path


def make(folders: list[str], read: list[Rollouts] | None = None) -> str:
  """The page as text: the same for the same folders, whenever it is made. Source: none."""
  read = read or [Rollouts(folder).refresh() for folder in folders]
  runs = [gather(folder, own) for folder, own in zip(folders, read, strict=True)]
  _name_apart(runs, folders)
  blocks = []
  for number, (run, own) in enumerate(zip(runs, read, strict=True)):
    blocks += [(f'run{number}', _packed(run)), (f'index{number}', _packed(index(own)))]
    blocks.append((f'prompts{number}', _packed(own.prompts())))
    texts = [(f'file{number}-{at}', file.text) for at, file in enumerate(own.files) if file.text]
    blocks += texts
  fill = dict(
    TITLE=html.escape(', '.join(run['name'] for run in runs)),
    STYLE=_asset('page.css'),
    BLOCKS='\n'.join(_element(name, data) for name, data in blocks),
    SCRIPT=f"'use strict';\n(() => {{\nconst RUNS = {len(runs)};\n{scripts()}\n}})();",
  )
  page = _asset('page.html')
  # Cut at the marks first: what is filled in may hold anything, marks too.
  for name, text in fill.items():
    head, _, tail = page.partition(f'<!--{name}-->')
    fill[name] = (head, text)
    page = tail
  return ''.join(head + text for head, text in fill.values()) + page


def scripts() -> str:
  """What draws the page. Source: none."""
  return '\n'.join(_asset(f'{name}.js') for name in _PARTS)


def _asset(name: str) -> str:
  return (importlib.resources.files(__package__) / 'assets' / name).read_text('utf-8')


def _name_apart(runs: list[dict[str, Any]], folders: list[str]) -> None:
  """Folders of the same name are told with the one above."""
  names = [run['name'] for run in runs]
  for run, folder in zip(runs, folders, strict=True):
    if names.count(run['name']) > 1:
      run['name'] = '/'.join(os.path.abspath(folder).split(os.sep)[-2:])


def _packed(told: Any) -> bytes:
  return zlib.compress(json.dumps(told, ensure_ascii=False).encode('utf-8', 'replace'), 6)


def _element(name: str, data: bytes) -> str:
  text = base64.b64encode(data).decode('ascii')
  return f'<script type="application/octet-stream" id="{name}">{text}</script>'

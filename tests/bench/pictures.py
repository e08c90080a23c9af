"""The README's pictures, from the run directory of a finished run: its last screen, and parts of its report.

python -m tests.bench.pictures runs/tiny [--out tests/bench/pictures] [--chromium chromium] [--smoke]
The screen is drawn by the class that runs use, from the rows of metrics.jsonl with their timings. The report is
rendered again, and headless Chromium takes screenshots of some of its sections.
"""

from __future__ import annotations

import argparse
import glob
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import types

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import run_folder
from rich.console import Console as Rich
from rich.console import Group
from rich.terminal_theme import MONOKAI

from jaxrl_llm.checkpointing import metrics_log
from jaxrl_llm.monitoring import console
from jaxrl_llm.report import page
from tests.bench.lib import smoke

WIDTH = 100  # of the terminal, in characters
# Picture → the sections of the report in it, and its height in pixels.
PICTURES = {
  'report': (('learning',), 1100),
  'report_device': (('time', 'device'), 1620),
}


class Still:
  """Replaces the live table: prints only the last one."""

  def __init__(self, screen: console.Console, out: Rich):
    self._screen, self._out = screen, out

  def refresh(self) -> None:
    pass

  def stop(self) -> None:
    self._out.print(Group(*self._screen._lines()))


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('run', nargs='?')
  parser.add_argument('--out', default=os.path.join(os.path.dirname(__file__), 'pictures'))
  parser.add_argument('--chromium', default=shutil.which('chromium') or 'chromium')
  flags = smoke.parse(parser)
  if flags.smoke:
    flags.run = run_folder.make(os.path.join(flags.out, 'run'), steps=3)
  elif not flags.run:
    parser.error('name the run directory of a finished run')
  os.makedirs(flags.out, exist_ok=True)
  last_screen(flags.run, os.path.join(flags.out, 'console.svg'))
  if flags.smoke and not shutil.which(flags.chromium):
    print('chromium is not installed: no screenshots of the report were taken')
    return
  for name, (sections, height) in PICTURES.items():
    screenshot(flags.run, sections, height, os.path.join(flags.out, f'{name}.png'), flags.chromium)


def last_screen(run: str, path: str) -> None:
  """The terminal at the end of the run, as SVG."""
  rows = list(metrics_log.read(os.path.join(run, 'metrics.jsonl')))
  evaluations = [_json(name) for name in sorted(glob.glob(os.path.join(run, 'eval', '*.json')))]
  config, start = _json(f'{run}/config.json'), _json(f'{run}/environment.json')[-1]
  found = _json(f'{run}/curriculum.json')
  out = Rich(
    record=True, width=WIDTH, height=50, file=io.StringIO(), force_terminal=True, color_system='truecolor'
  )  # fmt: skip
  now = [0.0]
  console.time = types.SimpleNamespace(monotonic=lambda: now[0])
  screen = console.Console(config['steps'], out)
  screen._live = Still(screen, out)
  screen.banner(
    model=config['model'],
    devices=f'{len(start["devices"])} ({start["devices"][0]})',
    steps=f'{config["steps"]} of {config["prompts"]} prompts with {config["rollouts"]} rollouts each, '
    f'of at most {config["completion_tokens"]} tokens',
    run_folder=os.path.join('runs', os.path.basename(os.path.normpath(run))),
  )
  for row in rows:
    step = row[metrics_log.STEP]
    for record in evaluations:
      if record['step'] == step:
        screen.evaluation(step, record['metrics'])
    now[0] += row['timing_s/step']
    screen.step(row, lambda: found['difficulty_WxD'][-1])
  screen.evaluation(evaluations[-1]['step'], evaluations[-1]['metrics'])
  screen.finish(os.path.join('runs', os.path.basename(os.path.normpath(run))))
  text = out.export_svg(title='python -m jaxrl_llm.main', theme=MONOKAI, unique_id='screen')
  text = re.sub(
    r'@font-face \{.*?\}\s*', '', text, flags=re.DOTALL
  )  # web fonts: the picture must load nothing
  text = re.sub(r'<!--.*?-->\s*', '', text).replace('Fira Code, ', '')
  with open(path, 'w', encoding='utf-8') as file:
    file.write(text)


def screenshot(run: str, sections: tuple[str, ...], height: int, path: str, chromium: str) -> None:
  """Sections of report.html, as PNG."""
  hidden = ''.join(f':not(#{name})' for name in sections)
  text = page.render([run]).replace(
    '</style>', f'main > section{hidden}, nav {{ display: none }}</style>'
  )
  with tempfile.TemporaryDirectory() as folder:
    name = os.path.join(folder, 'page.html')
    with open(name, 'w', encoding='utf-8', errors='backslashreplace') as file:
      file.write(text)
    command = [chromium, '--headless', '--no-sandbox', '--disable-gpu', '--hide-scrollbars']
    command += ['--disable-background-networking', '--force-color-profile=srgb']
    command += [f'--user-data-dir={folder}/profile', '--virtual-time-budget=20000']
    command += [f'--window-size=1200,{height}', f'--screenshot={path}', f'file://{name}']
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL, timeout=300)


def _json(path: str):
  with open(path, encoding='utf-8') as file:
    return json.load(file)


if __name__ == '__main__':
  main()

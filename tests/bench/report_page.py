"""report.html with 100,000 artificial rollouts, and a page of 40 runs, in a browser: times and accessibility findings.

    apt-get install chromium; npm install --prefix DIR puppeteer-core axe-core
    python -m tests.bench.report_page --out pictures --node DIR/node_modules [--rollouts 100000] [--runs 1] [--smoke]

Prints one JSON object: milliseconds of each opening, the results of the interactions, axe's findings, console
errors, and requests (there must be none). Writes screenshots into --out.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import run_folder  # noqa: E402

from jaxrl_llm.report import page, runs  # noqa: E402
from tests.bench.lib import smoke  # noqa: E402

_LISTED_RUNS = 40


def main() -> None:
  """Exit status 1 for an error, a request or a serious finding."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--out')
  parser.add_argument('--node', help='a node_modules with puppeteer-core and axe-core')
  parser.add_argument('--chromium', default=shutil.which('chromium') or 'chromium')
  parser.add_argument('--rollouts', type=int, default=100_000)
  parser.add_argument('--runs', type=int, default=1)
  parser.add_argument(
    '--page', default='', help='an existing report.html, which is opened without interactions'
  )
  flags = smoke.parse(parser, rollouts=1024)
  if not flags.smoke and not (flags.out and flags.node):
    parser.error('--out and --node are needed')
  os.makedirs(flags.out, exist_ok=True)
  with tempfile.TemporaryDirectory() as folder:
    written = {} if flags.page else _write_page(folder, flags)
    if flags.smoke and not flags.node:
      print(
        json.dumps(written), '--node is missing: the page was written, and not opened in a browser'
      )
      return
    result = _drive(flags.page or os.path.join(folder, 'report.html'), flags)
    if not flags.page:
      flags.out = os.path.join(flags.out, 'runs')
      result['runs'] = _drive(_write_runs(folder), flags, 'runs')
  result |= written
  print(json.dumps(result, indent=1, ensure_ascii=False))
  pages = [result, *([result['runs']] if 'runs' in result else [])]
  serious = [
    v
    for each in pages
    for found in each['axe'].values()
    for v in found
    if v['impact'] in ('serious', 'critical')
  ]
  sys.exit(1 if serious or any(each['errors'] or each['requests'] for each in pages) else 0)


def _write_page(folder: str, flags: argparse.Namespace) -> dict:
  steps = max(flags.rollouts // 512, 1)
  runs = [
    run_folder.make(os.path.join(folder, f'run{i}'), steps, 64, 8, seed=i, pool=4000, words=40)
    for i in range(flags.runs)
  ]
  began = time.perf_counter()
  path = page.write(os.path.join(folder, 'report.html'), runs)
  return dict(write_s=round(time.perf_counter() - began, 2), bytes=os.path.getsize(path))


def _write_runs(folder: str) -> str:
  for i in range(_LISTED_RUNS):
    parent = os.path.join(folder, 'runs', f'group{i % 4}')
    run_folder.make(os.path.join(parent, f'run{i}'), 3 + i % 5, 2, 4, seed=i)
  path = os.path.join(folder, 'runs', 'runs.html')
  return page.write_runs(path, runs.find(os.path.join(folder, 'runs')))


def _drive(path: str, flags: argparse.Namespace, kind: str = '') -> dict:
  os.makedirs(flags.out, exist_ok=True)
  script = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'lib', 'report_page.mjs')
  mode = kind or ('look' if flags.page else 'drive')  # the interactions need the artificial page
  command = ['node', script, path, flags.out, flags.node, flags.chromium, mode]
  return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


if __name__ == '__main__':
  main()

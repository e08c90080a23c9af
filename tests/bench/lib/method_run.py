"""One run of tests/bench/methods.py in a process of its own: python -m tests.bench.lib.method_run REQUEST.

REQUEST is a JSON object; the result is written to `result` of it, so that what a run prints does not matter.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import threading
import time

from jaxrl_llm import train
from jaxrl_llm.commands import export
from tests.bench.lib import method_job

ACCURACY = 'val-core/all/acc/'


def exit_with_parent() -> None:
  """End this process when the pipe to its parent closes, also after a kill."""

  def wait() -> None:
    os.read(0, 1)  # not sys.stdin, whose lock would be held when this process ends
    os._exit(1)

  threading.Thread(target=wait, daemon=True).start()


def make_start(seed: int, steps: int, folder: str, to: str, is_smoke: bool) -> dict:
  """Train a supervised start and write it as a model folder, in float32."""
  config = method_job.start(seed, steps, is_smoke)
  train.run(config, folder)
  export.export_checkpoint(config, folder, to, 'float32')
  return {}


def train_method(
  method: str, seed: int, folder: str, start: str, teacher: str, is_smoke: bool
) -> dict:
  """Held-out accuracy in percent, before and after, CPU-seconds with compilation, and completions of a run."""
  config = method_job.job(method, seed, start, teacher, is_smoke)
  began = time.process_time()
  train.run(config, folder)
  cpu_s = time.process_time() - began
  first, last = (_accuracy(folder, step) for step in (0, config.steps))
  return dict(
    start=first['mean@4'],
    mean=last['mean@4'],
    greedy=last['greedy'],
    steps=config.steps,
    completions=method_job.completions(config),
    cpu_s=cpu_s,
  )


def _accuracy(folder: str, step: int) -> dict[str, float]:
  record = json.loads((pathlib.Path(folder) / 'eval' / f'step_{step:06d}.json').read_text())
  return {kind: 100 * record['metrics'][ACCURACY + kind] for kind in ('greedy', 'mean@4')}


def main() -> None:
  request = json.loads(sys.argv[1])
  exit_with_parent()
  result = pathlib.Path(request.pop('result'))
  outcome = (make_start if 'to' in request else train_method)(**request)
  result.write_text(json.dumps(outcome))


if __name__ == '__main__':
  main()

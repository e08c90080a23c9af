"""The same run on 1, 2 and 4 processes of two devices each: differences of metrics and rollouts.

python -m tests.bench.processes [--counts 1,2,4] [--out runs/processes] [--smoke]
Processes communicate over loopback (gloo) in float32. Sums in another order round differently, so that at some step a
sampled token may differ, and the runs diverge from there on. Exit status 1 if a metric before that step differs by more
than 1e-4, or more than one rollout in twenty of that step differs.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import tiny_job  # noqa: E402

from jaxrl_llm.checkpointing import metrics_log  # noqa: E402
from tests.bench.lib import smoke  # noqa: E402
from tests.distributed import test_processes  # noqa: E402

MESHES = {1: dict(fsdp=2), 2: dict(fsdp=2, tensor=2), 4: dict(data=2, fsdp=4)}


def run(folder: pathlib.Path, processes: int) -> list[dict]:
  """Train on `processes` processes; returns the metrics, without timings."""
  folder.mkdir(parents=True)
  job = test_processes.JOB | dict(prompts=8, mesh=MESHES[processes])
  config = tiny_job.config_file(folder, **job)
  for process in test_processes.start_all(config, folder / 'run', processes=processes, devices=2):
    tiny_job.finish(process)
  return metrics_log.comparable(metrics_log.read(str(folder / 'run' / 'metrics.jsonl')))


def outputs(folder: pathlib.Path) -> list[list[str]]:
  """The completions of every step."""
  files = sorted((folder / 'run' / 'rollouts').iterdir())
  return [[json.loads(line)['output'] for line in path.read_text().splitlines()] for path in files]


def shared(one: list[list[str]], two: list[list[str]]) -> tuple[int, float]:
  """(steps before the first with another completion, the share of that step's completions that differ)."""
  for step, (ours, theirs) in enumerate(zip(one, two, strict=True)):
    if ours != theirs:
      return step, sum(a != b for a, b in zip(ours, theirs, strict=True)) / len(ours)
  return len(one), 0.0


def largest_gap(one: list[dict], two: list[dict]) -> tuple[float, str]:
  """The largest |a − b| / max(1, |b|), and the name of its metric."""
  assert [row.keys() for row in one] == [row.keys() for row in two]
  pairs = (
    (name, row[name], other[name]) for row, other in zip(one, two, strict=True) for name in row
  )
  return max((abs(a - b) / max(1.0, abs(b)), name) for name, a, b in pairs)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--counts', default='1,2,4')
  parser.add_argument('--out', default='runs/processes')
  arguments = smoke.parse(parser, counts='1,2')
  folder, failed, first = pathlib.Path(arguments.out), False, None
  for processes in map(int, arguments.counts.split(',')):
    here = folder / str(processes)
    found = run(here, processes), outputs(here)
    first = first or found
    steps, other = shared(found[1], first[1])
    gap, name = largest_gap(found[0][:steps], first[0][:steps]) if steps else (0.0, 'no step')
    failed |= steps == 0 or gap > 1e-4 or other > 0.05
    print(
      f'{processes} processes × 2 devices, {MESHES[processes]}: same completions in {steps} of {len(first[1])} steps '
      f'(then {other:.0%} others), numbers at most {gap:.1e} apart ({name})', flush=True,
    )  # fmt: skip
  sys.exit(failed)


if __name__ == '__main__':
  main()

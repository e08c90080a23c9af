"""Every method on the tiny job against GRPO: same start, equal completions, three seeds.

python -m tests.bench.methods [--out runs/methods] [--methods grpo,dapo] [--seeds 0,1,2] [--hours 6] [--jobs 2]
  [--plan] [--retry] [--write] [--smoke]
lib/method_job.py lays a method's objective, learner, rollout, curriculum, replay, rewards and adapter over
configs/tiny.py with strings of up to 5 digits; methods that it cannot train are listed there with the reason. A run is
a process of its own and one line of results/methods.jsonl, so that the same command goes on where it was killed, on
another machine too: each trains its own supervised starts, which differ by roundings. Runs that fail or take longer
than --deadline_s are rows, too; --retry takes them again. After --hours no run begins. --plan prints the runs that are
left and their estimated time. --write makes results/methods.md of a complete table. --jobs runs take place at a time,
each with its share of the cores: a run that has one core takes less than twice as long as with two.
"""

from __future__ import annotations

import argparse
import collections
import fcntl
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection
from concurrent import futures

import numpy as np

from tests.bench.lib import method_job, method_rows, results, sides, smoke

sys.path.append(str(pathlib.Path(__file__).parents[1]))
from method_table import PAPERS  # noqa: E402

METHODS = tuple(
  sorted(
    (m for m in PAPERS if m not in method_job.EXCLUDED), key=lambda m: (m != method_rows.BASE, m)
  )
)
SECONDS_A_RUN = 75.0  # on two idle cores, before any run is measured
SEEDS = 3
TAIL_CHARS = 400  # of a failed run's output in its row


def pending(rows, methods, seeds, retry: bool) -> list[method_rows.Key]:
  """The runs that are left, seed by seed, so that every method has its first seed early."""
  keys = [(method, seed) for seed in seeds for method in methods]
  again = (method_rows.FAILED, method_rows.TIMEOUT) if retry else ()
  return [key for key in keys if key not in rows or rows[key]['status'] in again]


def plan(rows, left) -> str:
  """Two lines: how many runs are left, and how long they will take."""
  took = [row['wall_s'] for row in rows.values() if row['status'] == method_rows.OK]
  each = float(np.mean(took)) if took else SECONDS_A_RUN
  source = f'mean of {len(took)} finished runs' if took else 'an estimate for two idle cores'
  return (
    f'{len(left)} runs are left, {len(rows)} are finished.\n'
    f'{each:.0f} s a run ({source}): {len(left) * each / 3600:.1f} hours.'
  )


class StartFailed(Exception):
  """A supervised start could not be trained; no run of its seed can begin."""


class Runner:
  """Runs of one output folder, each in a process of its own."""

  def __init__(self, out: pathlib.Path, deadline_s: float, is_smoke: bool):
    self.out, self.deadline_s, self.is_smoke = out, deadline_s, is_smoke
    # Workers read from it: its other end closes with this process, also after a kill, and they end.
    self.parent_alive, self._keep_open = os.pipe()
    self._failed_starts: dict[tuple[int, int], str] = {}
    self._start_lock = threading.Lock()
    self.is_stopped = False

  def stop(self) -> None:
    """End the runs that are under way; their rows are not wanted."""
    self.is_stopped = True
    os.close(self._keep_open)

  def start(self, seed: int, steps: int) -> str:
    """The model folder of a supervised start, trained where it does not exist. Raises StartFailed, once more too."""
    with self._start_lock:
      return self._start(seed, steps)

  def _start(self, seed: int, steps: int) -> str:
    to = self.out / f'start_{seed}_{steps}'
    if (seed, steps) in self._failed_starts:
      raise StartFailed(self._failed_starts[seed, steps])
    if not to.exists():
      part = tempfile.mkdtemp(dir=self.out, prefix='part-')
      model = os.path.join(part, 'model')
      status, result = self.call(part, dict(seed=seed, steps=steps, to=model))
      if status != method_rows.OK:
        message = f'the supervised start of seed {seed}: {status}. {result["message"]}'
        self._failed_starts[seed, steps] = message
        raise StartFailed(message)
      os.rename(model, to)
      shutil.rmtree(part)
    return str(to)

  def run(self, method: str, seed: int) -> dict:
    """The row of a run. Its folder is removed."""
    row = dict(method=method, seed=seed, job=method_job.fingerprint(method, self.is_smoke))
    is_distilled = method_job.needs_teacher(method)
    try:
      start = self.start(seed, method_job.START_STEPS)
      teacher = self.start(seed, method_job.TEACHER_STEPS) if is_distilled else ''
    except StartFailed as error:
      return row | dict(status=method_rows.FAILED, wall_s=0.0, message=str(error))
    folder = tempfile.mkdtemp(dir=self.out, prefix='part-')
    began = time.monotonic()
    request = dict(method=method, seed=seed, start=start, teacher=teacher)
    status, result = self.call(folder, request)
    shutil.rmtree(folder, ignore_errors=True)
    return row | dict(status=status, wall_s=time.monotonic() - began) | result

  def call(self, folder: str, request: dict) -> tuple[str, dict]:
    """Status of a worker, and its result or the end of its output."""
    result, log = pathlib.Path(folder, 'result.json'), pathlib.Path(folder, 'output.txt')
    request |= dict(folder=f'{folder}/run', result=str(result), is_smoke=self.is_smoke)
    command = [sys.executable, '-m', 'tests.bench.lib.method_run', json.dumps(request)]
    environment = sides.environment(sides.compilation_cache(self.out / 'compiled'))
    with open(log, 'wb') as output:
      process = subprocess.Popen(
        command,
        stdin=self.parent_alive,
        stdout=output,
        stderr=output,
        env=environment,
        start_new_session=True,  # an interrupt reaches this process alone
      )
      try:
        process.wait(self.deadline_s)
      except subprocess.TimeoutExpired:
        return method_rows.TIMEOUT, dict(message=f'not finished after {self.deadline_s:.0f} s')
      finally:
        process.kill()
        process.wait()
    if process.returncode or not result.exists():
      text = log.read_text(errors='replace')[-TAIL_CHARS:]
      return method_rows.FAILED, dict(message=text.replace(f'{sides.ROOT}/', ''))
    return method_rows.OK, json.loads(result.read_text())


def arguments() -> argparse.Namespace:
  """The options of the command line."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  names = lambda text: text.split(',')  # noqa: E731
  parser.add_argument('--out', default='runs/methods')
  parser.add_argument('--methods', type=names, default=list(METHODS))
  parser.add_argument(
    '--seeds', type=lambda text: [*map(int, text.split(','))], default=[*range(SEEDS)]
  )
  parser.add_argument('--hours', type=float, default=6.0)
  parser.add_argument('--jobs', type=int, default=1)
  parser.add_argument('--deadline_s', type=float, default=900.0)
  parser.add_argument('--plan', action='store_true')
  parser.add_argument('--retry', action='store_true')
  parser.add_argument('--write', action='store_true')
  options = smoke.parse(parser, methods=[method_rows.BASE, 'dr_grpo'], seeds=[0])
  for method in options.methods:
    if method in method_job.EXCLUDED:
      raise SystemExit(f'--methods: {method} {method_job.EXCLUDED[method]}.')
    if method not in METHODS:
      raise SystemExit(f'--methods: {method} is no method of configs/README.md.')
  return options


def shares(cpus: Collection[int], jobs: int) -> list[set[int]]:
  """As many sets of cores, of which two have none in common as long as there is a core for each job."""
  cores = sorted(cpus)
  return [set(cores[job::jobs]) or {cores[job % len(cores)]} for job in range(jobs)]


def take_runs(runner: Runner, journal: pathlib.Path, left, hours: float, jobs: int) -> None:
  """Append the row of each run, `jobs` at a time, until none is left or the time is over."""
  end = time.monotonic() + 3600 * hours
  queue, lock = collections.deque(left), threading.Lock()

  def take() -> method_rows.Key | None:
    with lock:
      return queue.popleft() if queue and time.monotonic() < end else None

  def work(cpus: set[int]) -> None:
    if jobs > 1:
      os.sched_setaffinity(0, cpus)  # of this thread and of the runs that it starts
    while (key := take()) is not None:
      row = runner.run(*key) | dict(machine=results.machine(), jobs=jobs)
      if runner.is_stopped:
        return
      with lock:
        method_rows.append(journal, row)
        print(f'{progress(row)}, {len(queue)} wait', file=sys.stderr, flush=True)

  with futures.ThreadPoolExecutor(jobs) as pool:
    try:
      [*pool.map(work, shares(os.sched_getaffinity(0), jobs))]
    except KeyboardInterrupt:
      runner.stop()
      raise
  if queue:
    print(f'{hours} hours are over; the same command goes on.', file=sys.stderr)


def progress(row) -> str:
  """What a finished run shows."""
  shown = f'{row["mean"]:.1f} %' if row['status'] == method_rows.OK else row['status']
  return f'{row["method"]}, seed {row["seed"]}: {shown}, {row["wall_s"]:.0f} s'


def section(rows, options, load: float) -> str:
  """The text of the result file."""
  methods, seeds = options.methods, options.seeds
  start = method_rows.mean_and_error(
    [rows[method_rows.BASE, s]['start'] for s in seeds if 'start' in rows[method_rows.BASE, s]]
  )
  chance = 0.025 * (len(methods) - 1)
  left_out = '\n'.join(f'* `{name}`: {why}.' for name, why in method_job.EXCLUDED.items())
  return f"""`python -m tests.bench.methods --write`: {len(methods)} methods on the tiny job, seeds
{', '.join(map(str, seeds))}, from the same start of {method_rows.shown(*start)} % mean@4.
Held-out accuracy in percent after equal numbers of completions, means ± standard errors over seeds; "− GRPO" is paired
by seed; CPU-seconds are those of a run, with the compilation of what no earlier run has compiled. A method beats GRPO
where the 95 % interval of Student's t lies above 0, which {chance:.1f} of as many methods without effect do by chance.

{method_rows.table(rows, methods, seeds)}

Not run:

{left_out}

{results.facts(('jax', 'jaxlib', 'flax'), load)}"""


def main() -> None:
  options, load = arguments(), results.load_average()
  if options.smoke:
    sides.prepare_smoke()
  out = pathlib.Path(options.out).absolute()
  out.mkdir(parents=True, exist_ok=True)
  journal = results.path('methods.jsonl', options.smoke)
  with open(out / 'lock', 'w') as lock:
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
      raise SystemExit(f'--out={out}: another process runs there.') from None
    prints = {m: method_job.fingerprint(m, options.smoke) for m in options.methods}
    rows = method_rows.read(journal, prints)
    left = pending(rows, options.methods, options.seeds, options.retry)
    print(plan(rows, left), file=sys.stderr)
    if options.plan:
      return
    for unfinished in out.glob('part-*'):  # of a run that was killed
      shutil.rmtree(unfinished, ignore_errors=True)
    runner = Runner(out, options.deadline_s, options.smoke)
    take_runs(runner, journal, left, options.hours, options.jobs)
    rows = method_rows.read(journal, prints)
  print(method_rows.table(rows, options.methods, options.seeds))
  if options.write:
    write(rows, options, load)


def write(rows, options, load: float) -> None:
  """Write the result file, unless runs are missing: of all methods with three seeds each, or of a smoke run."""
  seeds = [*options.seeds, *(s for s in range(SEEDS) if s not in options.seeds)][:SEEDS]
  methods, seeds = (options.methods, options.seeds) if options.smoke else (METHODS, seeds)
  if left := pending(rows, methods, seeds, retry=False):
    raise SystemExit(
      f'--write needs {len(methods)} methods × {len(seeds)} seeds, and {len(left)} runs are left; nothing is written.'
    )
  text = section(rows, options, load)
  results.write(results.path('methods.md', options.smoke), 'methods', text)


if __name__ == '__main__':
  main()

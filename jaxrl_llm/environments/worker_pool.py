"""Live episodes of a run: those of shipped environments in this process, a user's in worker processes.

An episode stays with the worker that opened it. A worker past a deadline is killed and replaced. The episodes that
lived in it are replayed in another one when their next turn is due, or are lost where that is not possible. A failure
is an outcome of its episode; no call raises for it.
"""

from __future__ import annotations

import collections
import signal
import time
from collections.abc import Collection, Iterable, Sequence
from multiprocessing import connection

from absl import logging

from jaxrl_llm.environments.live import EpisodeKey, LiveEpisodes, TurnRequest, TurnResult
from jaxrl_llm.environments.protocol import Environment
from jaxrl_llm.environments.resolve import EnvironmentSettings, resolve
from jaxrl_llm.environments.worker import TERMINATED, Command, Job, Worker
from jaxrl_llm.rewards import CRASH, ERROR, OK, SKIP, TIMEOUT
from jaxrl_llm.rewards.outcomes import describe

_TRIES = 2  # of a turn whose worker was killed, possibly by another process
_MAX_IDLE_DEATHS = 3  # beyond one for each worker, all of which may have been killed from outside
_POLL_S = 1.0  # between looks at a worker whose pipe a process of its own holds open
# Metrics: episodes rebuilt from their turns, and lost ones; workers that ended; failures of close().
COUNTED = ('replayed', 'lost', 'worker_deaths', 'close_errors')
# Dropped, and no failure: a resumed run that loses all of its episodes must go on.
LOST = TurnResult(SKIP, 'the environment object is gone, and replayable = False')


class WorkerPool:
  """Episodes of one `config.environment`. Workers start when first needed; `close` ends them."""

  def __init__(self, settings: EnvironmentSettings):
    """Raises UserError as `resolve` does. With fn='none', `run` must not be called."""
    self.settings, self.factory = dict(settings), resolve(settings)
    self._inline = LiveEpisodes(self._make)
    self._workers: list[Worker] = []
    self._live: dict[EpisodeKey, Worker | None] = {}  # the worker of each; None: this process
    self._load: collections.Counter[Worker] = collections.Counter()  # episodes of a worker
    self._counts: collections.Counter[str] = collections.Counter()
    self._submitted: list[Job] = []  # that `collect` has not returned
    self._idle_deaths = 0  # of workers without a job, in a row

  def _make(self) -> Environment:
    assert self.factory is not None
    return self.factory.make()

  @property
  def live(self) -> Collection[EpisodeKey]:
    """The episodes with an environment object."""
    return self._live.keys()

  def is_lost(self, key: EpisodeKey) -> bool:
    """Whether an episode that has begun cannot go on."""
    return key not in self._live and self.factory is not None and not self.factory.replayable

  def take_counts(self) -> dict[str, int]:
    """The counts of `COUNTED` since the last call."""
    counts = {name: self._counts[name] for name in COUNTED}
    self._counts.clear()
    return counts

  def close(self) -> None:
    """End all episodes and workers. A later `run` starts new ones."""
    workers, self._workers, self._submitted = self._workers, [], []
    episodes = collections.Counter(self._live.values())
    self._live = {}
    for worker in workers:
      worker.hang_up()
    for worker in workers:
      worker.wait(episodes[worker])
    for key in self._inline.keys():
      self._inline.end(key)

  def run(self, requests: Sequence[TurnRequest]) -> list[TurnResult]:
    """Begin episodes or take a turn in each; the results, in the order of the requests."""
    return self._finish(self._start(self._turns(requests)))

  def end(self, keys: Iterable[EpisodeKey]) -> None:
    """Close the environments of episodes that are over, where they live."""
    self._count_ends(self._finish(self._start(self._ends(keys))))

  def submit(self, requests: Sequence[TurnRequest] = (), ended: Iterable[EpisodeKey] = ()) -> None:
    """As `run` and `end`, without waiting for results; `collect` returns those of the requests."""
    self._submitted += self._start(self._turns(requests) + self._ends(ended))

  @property
  def pending(self) -> int:
    """Submitted turns and ends that `collect` has not taken."""
    return len(self._submitted)

  @property
  def running(self) -> bool:
    """Whether a worker has something to do."""
    return any(worker.job or worker.queue for worker in self._workers)

  def collect(self, most_s: float = 0.0) -> list[tuple[EpisodeKey, TurnResult]]:
    """The results of submitted turns that are ready; where there are none, waits `most_s` for news of the workers.

    Deadlines are checked here: call it again and again while something is pending.
    """
    if all(job.result is None for job in self._submitted):
      self.advance(most_s)
    done = [job for job in self._submitted if job.result is not None]
    self._submitted = [job for job in self._submitted if job.result is None]
    self._count_ends([job.result for job in done if job.request is None and job.result])
    return [(job.key, job.result) for job in done if job.request is not None and job.result]

  def advance(self, most_s: float) -> None:
    """Take results of workers, waiting `most_s` for the first one, and start their next jobs."""
    try:
      awaited = [worker for worker in self._workers if worker.job or worker.queue]
      handles = [x for w in awaited for x in (w.connection, w.process.sentinel)]
      if handles:
        wait_s = min(worker.deadline for worker in awaited) - time.monotonic()
        connection.wait(handles, min(max(wait_s, 0.0), most_s))
      for worker in awaited:
        self._receive(worker)
      for worker in list(self._workers):
        self._send_next(worker)
    except BaseException:
      self.close()
      raise

  def _turns(self, requests: Sequence[TurnRequest]) -> list[Job]:
    if self.factory is None:
      raise ValueError("config.environment.fn='none' has no environments to run")
    return [Job(request.key, request) for request in requests]

  def _ends(self, keys: Iterable[EpisodeKey]) -> list[Job]:
    return [Job(key, None) for key in keys if key in self._live]

  def _count_ends(self, results: Iterable[TurnResult]) -> None:
    for result in results:
      if result.outcome != OK:
        self._counts['close_errors'] += 1
        logging.warning('close() of an environment failed: %s', result.message)

  def _start(self, jobs: list[Job]) -> list[Job]:
    """Run jobs in this process, or give them to workers."""
    try:
      if self.factory is not None and self.factory.inline:
        for job in jobs:
          command = self._command(job, None)
          job.result = command.run(self._inline) if command is not None else job.result
      elif jobs:
        while len(self._workers) < self.settings['workers']:
          self._workers.append(Worker(self.settings))
        self._load = collections.Counter(worker for worker in self._live.values() if worker)
        for job in jobs:
          self._assign(job)
        for worker in list(self._workers):
          self._send_next(worker)
    except BaseException:  # Ctrl-C too: a worker must not go on with an abandoned call
      self.close()
      raise
    return jobs

  def _finish(self, jobs: list[Job]) -> list[TurnResult]:
    """Wait for the results of jobs."""
    while any(job.result is None for job in jobs):
      self.advance(_POLL_S)
    return [job.result for job in jobs if job.result is not None]

  def _command(self, job: Job, worker: Worker | None) -> Command | None:
    """The command of a job in `worker`; None where the job has a result without one."""
    request, lives = job.request, job.key in self._live
    if request is None:
      if not lives:  # it ended with its worker
        job.result = TurnResult(OK)
        return None
      del self._live[job.key]
      return Command('end', (job.key,))
    if lives and request.texts:
      return Command('step', (job.key, request.texts[-1]))
    if request.texts and self.is_lost(job.key):
      self._counts['lost'] += 1
      job.result = LOST
      return None
    self._counts['replayed'] += bool(request.texts)
    self._live[job.key] = worker
    return Command('open', (request,), 1 + len(request.texts))

  def _assign(self, job: Job) -> None:
    """Queue a job for the worker of its episode, a new episode for the one with the fewest."""
    worker = self._live.get(job.key)
    if worker is None:
      worker = min(self._workers, key=lambda worker: self._load[worker])
      self._load[worker] += 1
    worker.queue.append(job)

  def _send_next(self, worker: Worker) -> None:
    """Start the next job of an idle worker."""
    while worker.ready and worker.job is None and worker.queue:
      job = worker.queue.popleft()
      command = self._command(job, worker)
      if command is None:
        continue
      try:
        worker.send(job, command)
      except OSError:  # it ended since the last call, and the job has not run
        worker.queue.appendleft(job)
        self._replace(worker, late=False)
        return
      except Exception as error:  # the row does not pickle
        self._live.pop(job.key, None)
        job.result = TurnResult(ERROR, describe(error).decode('utf-8', 'replace'))

  def _receive(self, worker: Worker) -> None:
    """Take the result of a worker, if it has one; replace a worker that ended or is late."""
    try:
      if worker.connection.poll():
        self._idle_deaths = 0 if worker.job else self._idle_deaths
        worker.receive()
        return
      late = worker.process.is_alive()
      if late and time.monotonic() < worker.deadline:
        return
    except (EOFError, OSError):
      late = False
    self._replace(worker, late)

  def _replace(self, worker: Worker, late: bool) -> None:
    """Start a new worker for one that ended, and repeat there what is not the fault of its running job."""
    code = worker.kill(0.0 if late else 5.0)
    logging.warning(
      'A worker of config.environment ended (exit code %s); starting a new one.', code
    )
    self._counts['worker_deaths'] += 1
    self._idle_deaths += worker.job is None
    if self._idle_deaths > _MAX_IDLE_DEATHS + len(self._workers):
      raise RuntimeError(
        'the environment workers cannot be started; what they wrote above to standard error says why'
      )
    self._live = {key: home for key, home in self._live.items() if home is not worker}
    self._workers[self._workers.index(worker)] = Worker(self.settings)
    self._load = collections.Counter(home for home in self._live.values() if home)
    if (job := worker.job) is not None:
      job.tries += 1
      outside = not late and code in (-signal.SIGKILL, TERMINATED)
      if job.request is None:  # nothing is left to close
        job.result = TurnResult(TIMEOUT if late else CRASH, 'the worker ended in close()')
      elif not outside or job.tries >= _TRIES:
        job.result = _result_of_exit(code, late)
      else:
        worker.queue.appendleft(job)
    for job in worker.queue:
      self._assign(job)


def _result_of_exit(code: int | None, late: bool) -> TurnResult:
  """The result of the turn that ran when its worker ended."""
  if late or code == -signal.SIGALRM:
    return TurnResult(TIMEOUT, 'TimeoutError: past config.environment.deadline_s')
  if code == -signal.SIGPROF:
    return TurnResult(TIMEOUT, 'TimeoutError: past config.environment.cpu_s')
  return TurnResult(CRASH, f'the worker ended with exit code {code}')

"""Graders that run a completion's program, each in its own sandbox: see sandbox.py.

The program of a completion is the last fenced block marked python, else the last fenced block, else the complete
text. It
runs as `python -S`, with only the standard library unless `packages`. Every program is right or wrong: one that hangs,
crashes, floods its output or attacks scores 0. Grading fails only for a row that lacks a field, for tests that cannot
run, and for a sandbox that fails.

The verdict is formed outside of the program's sandbox. stdin_stdout compares the output in the worker. Tests run in a
second sandbox, see guest_protocol/. The program never gets a test, an expected value or the pipe of the verdict, so
printing, exiting, changing builtins, an __eq__ that is always true or reading frames have no effect.

A program still can: see the arguments of its calls, change those that are lists, dicts or sets, and reuse them to
answer a later call; decide comparisons of two of its own objects, and the results of methods and operators of a class
that the tests name; raise the error that a test expects. Tests that can be passed this way are weak tests.

Common settings: wall_s, for all tests of a completion together, with the start of Python; program_mb, of address space
for each process; processes, threads included; packages, whether the site-packages of this Python can be imported.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import pathlib
import re
import select
import time
from collections.abc import Sequence
from typing import Any

from jaxrl_llm.rewards.code_execution import sandbox
from jaxrl_llm.rewards.parsing import answer_span
from jaxrl_llm.types import Row

_PYTHON = ('python', 'python3', 'py')
# The end of the function in a completion of a HumanEval prompt.
_NEXT = re.compile(r'\n(?=class|def|#|if|print|```)')


def unit_tests(
  text: str,
  row: Row,
  *,
  share: bool = False,
  wall_s: float = 6.0,
  program_mb: int = 512,
  processes: int = 8,
  packages: bool = False,
) -> float:
  """1 where all the row's tests pass, or with `share` passed / tests.

  The row holds `tests` or `test_list`: source, or a list of sources. Each is a test, or defines tests: functions named
  test…, classes of unittest.TestCase, or check(candidate), which gets the object named by `entry_point`. Optional are
  `setup`, `test_setup_code` or `test_imports`, run before the tests.

  A name that the tests use and do not define comes from the program. For one of Python's builtins this holds only where
  it is the `entry_point`; for a name that is usually imported, such as math or Counter, only where the program defines
  it. `from solution import f` imports from the program. An entry_point may be a method: Solution().f. Tests that cannot
  run are an error of the row, for any program.
  """
  tests = _field(row, 'tests', 'test_list')
  setup = _field(row, 'setup', 'test_setup_code', 'test_imports', required=False) or ''
  job = dict(
    tests=_sources(tests, row, 'tests'),
    setup='\n'.join(_sources(setup, row, 'setup')),
    entry=str(row.extra.get('entry_point') or ''),
    prompt='',
  )
  limits = _limits(wall_s, program_mb, processes, packages)
  return _scored(*_run_tests(_program(text), job, limits, row), share)


def human_eval(
  text: str,
  row: Row,
  *,
  wall_s: float = 6.0,
  program_mb: int = 512,
  processes: int = 8,
  packages: bool = False,
) -> float:
  """1 where the row's check(entry_point) passes on prompt + completion. arXiv:2107.03374 (HumanEval).

  The row holds the prompt, which is its question, and `entry_point` and `test` as in HumanEval. A completion that does
  not define the entry point continues the prompt, up to the next line that begins with class, def, #, if, print or ```.
  Helper functions of the tests come from the prompt, not from the completion.
  """
  prompt = str(row.extra.get('prompt') or row.question)
  entry = _field(row, 'entry_point')
  test = _field(row, 'test')
  program = _program(text)
  name = re.escape(re.split(r'[.(]', entry, maxsplit=1)[0])  # for Solution().f this is the class
  if re.search(rf'^(?:(?:(?:async\s+)?def|class)\s+{name}\b|{name}\s*=[^=])', program, re.M):
    program = f'{prompt if _complete(prompt) else ""}\n\n{program}'
  else:
    program = prompt + _NEXT.split(program, maxsplit=1)[0]
  job = dict(tests=[test], setup='', entry=entry, prompt=prompt)
  limits = _limits(wall_s, program_mb, processes, packages)
  return _scored(*_run_tests(program, job, limits, row), False)


def stdin_stdout(
  text: str,
  row: Row,
  *,
  share: bool = False,
  tolerance: float = 0.0,
  wall_s: float = 6.0,
  program_mb: int = 512,
  processes: int = 8,
  packages: bool = False,
) -> float:
  """1 where the program prints the expected output for every input, or with `share` right / pairs.

  The row holds `tests`, a list of {input, output}, or `input_output`, {inputs: [...], outputs: [...]} or that as JSON.
  Outputs are compared as tokens separated by white space. With a tolerance, tokens a and b that are numbers are also
  equal where |a − b| ≤ tolerance · max(1, |b|). A program whose exit code is not 0 is wrong.
  """
  pairs, program = _pairs(row), _encoded(_program(text))
  end, right = time.monotonic() + wall_s, 0
  for stdin, expected in pairs:
    left_s = end - time.monotonic()
    if left_s <= 0:
      break
    limits = _limits(left_s, program_mb, processes, packages)
    result = sandbox.run(
      ['/box/answer.py'], files={'answer.py': program}, stdin=_encoded(stdin), limits=limits
    )
    passed = (result.outcome, result.code) == (sandbox.DONE, 0) and _equal_tokens(
      result.stdout.decode('utf-8', 'replace'), expected, tolerance
    )
    right += passed
    if not passed and not share:
      break
  return _scored(right, len(pairs), share)


def _program(text: str) -> str:
  """The program of a completion, as the module docstring defines it."""
  blocks = answer_span.fences(text)
  marked = [block for language, block in blocks if language.lower() in _PYTHON]
  return (marked or [block for _, block in blocks] or [text])[-1]


def _complete(prompt: str) -> bool:
  """Whether a prompt compiles on its own, as a function with a docstring does."""
  try:
    compile(prompt, 'prompt.py', 'exec', dont_inherit=True)
  except (SyntaxError, ValueError):
    return False
  return True


def _encoded(text: str) -> bytes:
  return text.encode(
    'utf-8', 'surrogatepass'
  )  # Python then refuses the source, so the program fails


def _limits(wall_s: float, program_mb: int, processes: int, packages: bool) -> sandbox.Limits:
  return sandbox.Limits(wall_s=wall_s, memory_mb=program_mb, processes=processes, packages=packages)


def _scored(passed: int, tests: int, share: bool) -> float:
  return passed / tests if share else float(passed == tests)


def _field(row: Row, *names: str, required: bool = True) -> Any:
  """The row's first non-empty field of `names`; None without one, or ValueError where it is required."""
  value = next((row.extra[name] for name in names if row.extra.get(name)), None)
  if value is None and required:
    raise ValueError(f'row {row.id} holds no {" nor ".join(repr(name) for name in names)}')
  return value


def _sources(value: str | Sequence[str], row: Row, name: str) -> list[str]:
  sources = [value] if isinstance(value, str) else value
  if not isinstance(sources, list | tuple) or not all(isinstance(part, str) for part in sources):
    raise ValueError(f'{name!r} of row {row.id} must be source or a list of sources')
  return list(sources)


def _pairs(row: Row) -> list[tuple[str, str]]:
  """(input, output) pairs of the row. Raises ValueError for anything else."""
  value = _field(row, 'tests', 'input_output')
  try:
    value = json.loads(value) if isinstance(value, str) else value
    if isinstance(value, dict):
      pairs = list(zip(value['inputs'], value['outputs'], strict=True))
    else:
      pairs = [(pair['input'], pair['output']) for pair in value]
  except (ValueError, TypeError, KeyError):
    pairs = []
  if not pairs or not all(isinstance(part, str) for pair in pairs for part in pair):
    raise ValueError(f'the tests of row {row.id} must be a list of {{input, output}}, both texts')
  return pairs


def _equal_tokens(output: str, expected: str, tolerance: float) -> bool:
  tokens, wanted = output.split(), expected.split()
  return len(tokens) == len(wanted) and all(
    a == b or (tolerance > 0 and _near(a, b, tolerance))
    for a, b in zip(tokens, wanted, strict=True)
  )


def _near(a: str, b: str, tolerance: float) -> bool:
  try:
    return math.isclose(float(a), float(b), rel_tol=tolerance, abs_tol=tolerance)
  except ValueError:
    return False


def _run_tests(
  program: str, job: dict[str, str | list[str]], limits: sandbox.Limits, row: Row
) -> tuple[int, int]:
  """(passed, tests): the program runs in one sandbox, its tests in another."""
  end = time.monotonic() + limits.wall_s
  with contextlib.ExitStack() as stack:
    read, write = os.pipe()
    stack.callback(os.close, read)
    with contextlib.ExitStack() as ends:
      ends.callback(os.close, write)
      requests, replies = (_pipe(ends) for _ in range(2))
      files = {'answer.py': _encoded(program)}
      stack.enter_context(_start(['program'], files, limits, requests[0], replies[1]))
      files = {'job.json': json.dumps(job | dict(program=program)).encode()}
      args = ['tests', str(write)]
      tester = _start(args, files, limits, replies[0], requests[1], (write,))
      box = stack.enter_context(tester)
    verdict = _read_verdict(read, end)
    if b'E' in verdict:
      reason = verdict.partition(b'E')[2].decode('utf-8', 'replace').strip()
      raise ValueError(f'the tests of row {row.id} cannot be run: {reason}')
    tests, complete, passed = verdict.partition(b'\n')
    if not complete:
      box.process.kill()
      stderr = box.process.stderr.read(4096).decode('utf-8', 'replace')
      raise sandbox.SandboxError(f'no test began within {limits.wall_s} s {stderr}'.strip())
    return passed.count(b'1'), int(tests)


def _pipe(stack: contextlib.ExitStack) -> tuple[int, int]:
  ends = os.pipe()
  for end in ends:
    stack.callback(os.close, end)
  return ends


def _start(
  args: list[str],
  files: dict[str, bytes],
  limits: sandbox.Limits,
  stdin: int,
  stdout: int,
  pass_fds: tuple[int, ...] = (),
) -> contextlib.AbstractContextManager[sandbox.Box]:
  """A sandbox with the guest protocol and `files` (name → content), not yet entered."""
  paths = {f'/box/{name}': text for name, text in files.items()} | _guest_files()
  return sandbox.start(
    ['/box/start.py', *args],
    files=paths, limits=limits, stdin=stdin, stdout=stdout, pass_fds=pass_fds,
  )  # fmt: skip


@functools.cache
def _guest_files() -> dict[str, bytes]:
  """The guest protocol as files of the sandbox, path → content; no other code of this project is mounted."""
  folder = pathlib.Path(__file__).with_name('guest_protocol')
  sources = {p.name: p.read_bytes() for p in folder.glob('*.py')}
  start, package = sources.pop('start.py'), '/box/jaxrl_llm/rewards/code_execution'
  parents = (package, '/box/jaxrl_llm/rewards', '/box/jaxrl_llm')
  return (
    {f'{package}/guest_protocol/{name}': source for name, source in sources.items()}
    | {f'{parent}/__init__.py': b'' for parent in parents}
    | {'/box/start.py': start}
  )


def _read_verdict(read: int, end: float) -> bytes:
  """The bytes of the verdict until it is complete, its pipe is closed, or the time is over."""
  verdict = b''
  poll = select.poll()  # `select.select` fails for descriptors from 1024 on
  poll.register(read, select.POLLIN)
  # A verdict has two lines; the process that writes them may end later.
  while (left_s := end - time.monotonic()) > 0 and verdict.count(b'\n') < 2:
    if not poll.poll(left_s * 1000) or not (part := os.read(read, 65536)):
      break
    verdict += part
  return verdict

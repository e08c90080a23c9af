"""Graders that run what the model wrote, each in a sandbox of its own: see sandbox.py.

An answer's program is the last fenced block marked python, else the last fenced block, else the whole text. It runs as
`python -S`, with the standard library alone unless `packages`. Whatever it does, it is right or wrong: a program that
hangs, dies, floods or attacks scores 0. Only what the row lacks, tests that cannot run, or a sandbox that fails is an
error of grading.

The verdict is told where the program is not. For stdin_stdout the comparison is outside of any sandbox. For tests there
are two sandboxes, see guest_protocol/: the program never sees a test, an expected value or the verdict's pipe, so that
printing, exiting, changing builtins, an __eq__ that is always true or reading frames gives it nothing.
What it still may do: see the arguments of its calls, change those that are lists, dicts or sets, and answer a later
call by an earlier one; decide what a comparison of two of its own objects gives, and what its methods and the operators
of a class that the tests name return; raise what a test waits for. Tests that can be passed so are weak tests.

Settings of all: wall_s, for all that one answer's tests take together, starts of Python included; program_mb, of
address space for each process; processes, threads included; packages, whether the site-packages of this Python may be
imported.
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
from typing import Any

from jaxrl_llm.rewards.code_execution import sandbox
from jaxrl_llm.rewards.parsing import answer_span
from jaxrl_llm.types import Row

_PYTHON = ('python', 'python3', 'py')
# Where a completion of a HumanEval prompt goes on to something else.
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

  The row holds `tests` or `test_list`: source, or a list of sources. Each is a test, or defines them: functions named
  test…, classes of unittest.TestCase, or check(candidate), which is given what `entry_point` names. Optional are
  `setup`, `test_setup_code` or `test_imports`, run before them. A name that the tests use and nobody there defines is
  the answer's; one of Python's own is only where it is the `entry_point`, and one that programs import, such as math or
  Counter, is only where the answer defines it. `from solution import f` imports from the answer, and an entry_point may
  be a method: Solution().f. Tests that cannot run are an error of the row, whatever the answer. Source: none.
  """
  tests = _field(row, 'tests', 'test_list')
  setup = _field(row, 'setup', 'test_setup_code', 'test_imports', needed=False) or ''
  job = dict(
    tests=_sources(tests, row, 'tests'),
    setup='\n'.join(_sources(setup, row, 'setup')),
    entry=str(row.extra.get('entry_point') or ''),
    prompt='',
  )
  limits = _limits(wall_s, program_mb, processes, packages)
  return _scored(*_judged(_program(text), job, limits, row), share)


def human_eval(
  text: str,
  row: Row,
  *,
  wall_s: float = 6.0,
  program_mb: int = 512,
  processes: int = 8,
  packages: bool = False,
) -> float:
  """1 where the row's check(entry_point) passes on prompt + answer.

  The row holds the prompt, which is its question, and `entry_point` and `test` as in HumanEval. An answer that does not
  define the entry point continues the prompt, up to the next line that begins with class, def, #, if, print or ```.
  The tests' own helpers come from the prompt, not from the answer. Source: arXiv:2107.03374 (HumanEval).
  """
  prompt = str(row.extra.get('prompt') or row.question)
  entry = _field(row, 'entry_point')
  test = _field(row, 'test')
  program = _program(text)
  name = re.escape(re.split(r'[.(]', entry, maxsplit=1)[0])  # of Solution().f the class
  if re.search(rf'^(?:(?:(?:async\s+)?def|class)\s+{name}\b|{name}\s*=[^=])', program, re.M):
    program = f'{prompt if _complete(prompt) else ""}\n\n{program}'
  else:
    program = prompt + _NEXT.split(program, maxsplit=1)[0]
  job = dict(tests=[test], setup='', entry=entry, prompt=prompt)
  limits = _limits(wall_s, program_mb, processes, packages)
  return _scored(*_judged(program, job, limits, row), False)


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
  """1 where the program prints what is expected for every input, or with `share` right / pairs.

  The row holds `tests`, a list of {input, output}, or `input_output`, {inputs: [...], outputs: [...]} or that as JSON.
  Compared by tokens, whatever space is between them; with a tolerance, tokens a and b that are numbers are also equal
  where |a − b| ≤ tolerance · max(1, |b|). A program that ends with another code than 0 is wrong. Source: none.
  """
  pairs, program = _pairs(row), _encoded(_program(text))
  end, right = time.monotonic() + wall_s, 0
  for given, expected in pairs:
    left_s = end - time.monotonic()
    if left_s <= 0:
      break
    limits = _limits(left_s, program_mb, processes, packages)
    found = sandbox.run(
      ['/box/answer.py'], files={'answer.py': program}, stdin=_encoded(given), limits=limits
    )
    passed = (found.outcome, found.code) == (sandbox.DONE, 0) and _same(
      found.stdout.decode('utf-8', 'replace'), expected, tolerance
    )
    right += passed
    if not passed and not share:
      break
  return _scored(right, len(pairs), share)


def _program(text: str) -> str:
  blocks = answer_span.fences(text)
  marked = [block for language, block in blocks if language.lower() in _PYTHON]
  return (marked or [block for _, block in blocks] or [text])[-1]


def _complete(prompt: str) -> bool:
  """Whether a prompt is a program: a function with its docstring is."""
  try:
    compile(prompt, 'prompt.py', 'exec', dont_inherit=True)
  except (SyntaxError, ValueError):
    return False
  return True


def _encoded(text: str) -> bytes:
  return text.encode('utf-8', 'surrogatepass')  # which Python then refuses, as it should


def _limits(wall_s: float, program_mb: int, processes: int, packages: bool) -> sandbox.Limits:
  return sandbox.Limits(wall_s=wall_s, memory_mb=program_mb, processes=processes, packages=packages)


def _scored(passed: int, tests: int, share: bool) -> float:
  return passed / tests if share else float(passed == tests)


def _field(row: Row, *names: str, needed: bool = True) -> Any:
  found = next((row.extra[name] for name in names if row.extra.get(name)), None)
  if found is None and needed:
    raise ValueError(f'row {row.id} holds no {" nor ".join(repr(name) for name in names)}')
  return found


def _sources(told: Any, row: Row, name: str) -> list[str]:
  found = [told] if isinstance(told, str) else told
  if not isinstance(found, list | tuple) or not all(isinstance(part, str) for part in found):
    raise ValueError(f'{name!r} of row {row.id} must be source or a list of sources')
  return list(found)


def _pairs(row: Row) -> list[tuple[str, str]]:
  told = _field(row, 'tests', 'input_output')
  try:
    told = json.loads(told) if isinstance(told, str) else told
    if isinstance(told, dict):
      given, expected = told['inputs'], told['outputs']
      found = list(zip(given, expected, strict=True))
    else:
      found = [(pair['input'], pair['output']) for pair in told]
  except (ValueError, TypeError, KeyError):
    found = []
  if not found or not all(isinstance(part, str) for pair in found for part in pair):
    raise ValueError(f'the tests of row {row.id} must be a list of {{input, output}}, both texts')
  return found


def _same(found: str, expected: str, tolerance: float) -> bool:
  one, other = found.split(), expected.split()
  return len(one) == len(other) and all(
    a == b or (tolerance > 0 and _near(a, b, tolerance)) for a, b in zip(one, other, strict=True)
  )


def _near(a: str, b: str, tolerance: float) -> bool:
  try:
    return math.isclose(float(a), float(b), rel_tol=tolerance, abs_tol=tolerance)
  except ValueError:
    return False


def _judged(program: str, job: dict[str, Any], limits: sandbox.Limits, row: Row) -> tuple[int, int]:
  """(passed, tests) of the program, run in one sandbox, by the tests in another."""
  end = time.monotonic() + limits.wall_s
  with contextlib.ExitStack() as stack:
    read, write = os.pipe()
    stack.callback(os.close, read)
    with contextlib.ExitStack() as ends:
      ends.callback(os.close, write)
      calls, replies = (_pipe(ends) for _ in range(2))
      answer = _start(['answer'], {'answer.py': _encoded(program)}, limits, calls[0], replies[1])
      stack.enter_context(answer)
      told = {'job.json': json.dumps(job | dict(program=program)).encode()}
      tester = _start(['tests', str(write)], told, limits, replies[0], calls[1], (write,))
      box = stack.enter_context(tester)
    verdict = _listen(read, end)
    if b'E' in verdict:
      reason = verdict.partition(b'E')[2].decode('utf-8', 'replace').strip()
      raise ValueError(f'the tests of row {row.id} cannot be run: {reason}')
    tests, ended, passed = verdict.partition(b'\n')
    if not ended:
      box.process.kill()
      said = box.process.stderr.read(4096).decode('utf-8', 'replace')
      raise sandbox.SandboxError(f'no test was begun within {limits.wall_s} s {said}'.strip())
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
  told = {f'/box/{name}': text for name, text in files.items()} | _inside()
  return sandbox.start(
    ['/box/start.py', *args],
    files=told, limits=limits, stdin=stdin, stdout=stdout, pass_fds=pass_fds,
  )  # fmt: skip


@functools.cache
def _inside() -> dict[str, bytes]:
  """The package that runs in the sandboxes, and nothing else of ours: path → content."""
  folder = pathlib.Path(__file__).with_name('guest_protocol')
  found = {p.name: p.read_bytes() for p in folder.glob('*.py')}
  start, package = found.pop('start.py'), '/box/jaxrl_llm/rewards/code_execution'
  return (
    {f'{package}/guest_protocol/{name}': source for name, source in found.items()}
    | {
      f'{parent}/__init__.py': b''
      for parent in (package, '/box/jaxrl_llm/rewards', '/box/jaxrl_llm')
    }
    | {'/box/start.py': start}
  )


def _listen(read: int, end: float) -> bytes:
  """What comes until the other end is closed, or the time is over."""
  told = b''
  # Two lines are all of it: no need to wait for the end of what told them.
  while (left_s := end - time.monotonic()) > 0 and told.count(b'\n') < 2:
    if not select.select([read], [], [], left_s)[0] or not (part := os.read(read, 65536)):
      break
    told += part
  return told

"""The server in the sandbox: a completion that takes over its own child changes no later score."""

from __future__ import annotations

import contextlib

import pytest

from jaxrl_llm import rewards
from jaxrl_llm.rewards import verifiers
from jaxrl_llm.rewards.code_execution import sandbox
from jaxrl_llm.rewards.gym import sandboxed
from tests.rewards.gym.gym_attacks import row_of

pytest.importorskip('reasoning_gym')
needs_sandbox = pytest.mark.skipif(
  bool(sandbox.unavailable_reason()), reason=sandbox.unavailable_reason()
)

# Code that a completion runs in the process that scores it, and its attack on later scores there.
TAKEOVERS = dict(
  scorer="""
import reasoning_gym.algorithmic.spiral_matrix as module
from jaxrl_llm.rewards.gym import scorers, server
from jaxrl_llm.rewards.parsing import safe_eval
module.SpiralMatrixDataset.score_answer = lambda *_: 1.0
scorers.safe_scorer = lambda *_: lambda *_: 1.0
server._score_in_child = lambda *_: (1.0, '')
safe_eval._tree = safe_eval.literal = lambda *_: [1]
__import__('ast').literal_eval = lambda *_: [1]
""",
  builtins="""
import builtins, json
builtins.float = builtins.str = lambda *_: 1.0
json.dumps = json.loads = lambda *_: ['', 1.0, '']
""",
  every_descriptor="""
import os
for number in range(256):
  try:
    os.write(number, b'["", 1.0, ""]\\n' * 9)
  except OSError:
    pass
  try:
    os.close(number)
  except OSError:
    pass
""",
  descriptors_of_the_server="""
import ctypes, os
parent, libc = os.getppid(), ctypes.CDLL(None, use_errno=True)
handle = libc.syscall(434, parent, 0)
for number in range(64):
  taken = libc.syscall(438, handle, number, 0)
  try:
    os.write(taken, b'["", 1.0, ""]\\n' * 9)
  except OSError:
    pass
""",
  a_process_that_stays="""
import os
if os.fork() == 0:
  while True:
    pass
""",
  a_thread_that_stays="""
import threading
threading.Thread(target=lambda: [None for _ in iter(int, 1)], daemon=True).start()
""",
  files_for_the_next="""
import os, pathlib
for folder in ('/tmp', '/box', '/box/jaxrl_llm/rewards/gym', os.path.dirname(os.__file__)):
  for name in ('json.py', 'ast.py', 'sitecustomize.py'):
    try:
      pathlib.Path(folder, name).write_text('raise SystemExit')
    except OSError:
      pass
""",
  ignored_signals="""
import os, signal
for number in range(1, 65):
  try:
    signal.signal(number, signal.SIG_IGN)
  except (OSError, ValueError):
    pass
""",
  a_flood="""
import os
for number in range(256):
  try:
    while os.write(number, b'1' * 65536):
      pass
  except OSError:
    pass
""",
  an_exit='import os; os._exit(3)',
  an_abort='import os; os.abort()',
  all_memory="x = ['x' * 10**9 for _ in range(99)]",
  its_parent="""
import os, signal
os.kill(os.getppid(), signal.SIGKILL)
""",
  everything="""
import os, signal
os.kill(-1, signal.SIGKILL)
""",
)


@pytest.fixture
def with_a_hole(monkeypatch):
  """A sandbox whose parser of literals is Python's eval, so that code of a completion runs."""
  sources = dict(sandboxed._sources())
  sources['/box/jaxrl_llm/rewards/parsing/safe_eval.py'] += (
    b'\n\ndef literal(text):\n  return eval(text)\n'
  )
  sandboxed.close()
  monkeypatch.setattr(sandboxed, '_sources', lambda: sources)
  yield
  sandboxed.close()


@needs_sandbox
@pytest.mark.parametrize('name', TAKEOVERS)
def test_a_completion_that_takes_over_its_process_changes_no_later_score(name, with_a_hole):
  right = row_of('spiral_matrix')
  assert verifiers.gym(right.answer, right) == 1
  completion = f'exec({TAKEOVERS[name]!r})'
  if name in ('its_parent', 'everything'):
    with pytest.raises(sandbox.SandboxError, match='ended'):
      verifiers.gym(completion, right)
  else:
    with contextlib.suppress(ValueError):
      verifiers.gym(completion, right)
  for _ in range(3):
    assert verifiers.gym('1 2 3', right) == 0
    assert verifiers.gym('[9]', right) == 0
    assert verifiers.gym(right.answer, right) == 1


@needs_sandbox
def test_the_hole_runs_code(with_a_hole):
  """Proves that the attacks above run."""
  with pytest.raises(ValueError, match='SystemExit: 7'):
    verifiers.gym("exec('raise SystemExit(7)')", row_of('spiral_matrix'))


@needs_sandbox
def test_a_completion_leaves_no_file_for_the_next(with_a_hole):
  right = row_of('spiral_matrix')
  with contextlib.suppress(ValueError):
    verifiers.gym('exec(\'open("/tmp/note", "w").write("left")\')', right)
  with pytest.raises(ValueError, match=r'SystemExit: \[\]'):
    verifiers.gym('exec(\'raise SystemExit([*open("/tmp/note")])\')', right)


@needs_sandbox
def test_a_completion_that_ends_the_server_fails_alone(with_a_hole):
  right = row_of('spiral_matrix')
  kill = "__import__('os').kill(__import__('os').getppid(), 9)"
  with rewards.Pool(dict(fn='gym', workers=1)) as pool:
    sandboxed.close()
    assert pool.score([right] * 3, [right.answer, '7', right.answer]).reward_B.tolist() == [1, 0, 1]
  with pytest.raises(sandbox.SandboxError):
    verifiers.gym(kill, right)
  assert verifiers.gym(right.answer, right) == 1


@needs_sandbox
def test_workers_start_a_sandbox_for_the_tasks_that_need_one():
  plain, other = row_of('chain_sum'), row_of('countdown')
  with rewards.Pool(dict(fn='gym', workers=1)) as pool:
    assert pool.score([plain], [plain.answer]).reward_B == 1
    assert not pool._sandboxed
    assert pool.score([plain, other], [plain.answer, other.answer]).reward_B.tolist() == [1, 1]
    assert pool._sandboxed == {'countdown'}
    workers = pool._processes.newest
    assert pool.score([other], ['1']).reward_B < 0.1
    assert pool._processes.newest is workers


@needs_sandbox
def test_a_sandbox_that_does_not_start_is_an_error_of_the_completions(monkeypatch):
  monkeypatch.setattr(
    sandboxed, '_sources', lambda: {'/box/jaxrl_llm/__init__.py': b'raise SystemExit(1)'}
  )
  sandboxed.close()
  sandboxed.prepare(['countdown'])
  row = row_of('countdown')
  for _ in range(2):
    with pytest.raises(sandbox.SandboxError, match="that scores 'countdown' ended"):
      verifiers.gym(row.answer, row)
  monkeypatch.undo()
  assert verifiers.gym(row.answer, row) == 1

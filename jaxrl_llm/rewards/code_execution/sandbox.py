"""Programs nobody has read, run by bubblewrap in namespaces of their own: no file, no network, no process but theirs.

What a program finds: a Python with its standard library and C libraries, the files it is given under /box, all
read-only; a /tmp of its own that lives in memory, with a limit on its files where the machine lets a user mount one;
null, zero, full, random and urandom under /dev; no /proc, no
environment, no user but nobody. All in it ends with its first process, that with bubblewrap, and bubblewrap with the
process that asked.

What this does not hold: a flaw of the kernel in the system calls that stay open. And programs that run at once share
the machine: each may take its processes times its memory, and the cores until its time is over. Where memory runs out,
the kernel is told to take them before any other process.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
import select
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_llm.rewards.code_execution import program_io, seccomp
from jaxrl_llm.types import UserError

DONE, DEADLINE, FLOOD = program_io.DONE, program_io.DEADLINE, program_io.FLOOD

_NOBODY = 65534
_OPEN_FILES, _LEAST_OPEN_FILES = 64, 16
_TIMERS = 1024  # and signals that wait: each takes kernel memory
_FILES = (
  10_000  # in /tmp, links and folders included: each takes about a kB that disk_mb does not count
)
_SOCKET_BYTES = 212_992  # of a buffer, unless the machine says otherwise
_DYING_S = 5.0  # longer than any process takes to die
_DEVICES = ('null', 'zero', 'full', 'random', 'urandom')
_OWN_PROCESS = 1  # the namespace's first, which is bubblewrap's own and counts as one of the user's
_ENVIRONMENT = dict(HOME='/tmp', LANG='C.UTF-8', PATH='/usr/bin', PYTHONHASHSEED='0', OMP_NUM_THREADS='1')  # fmt: skip
_TOOLS = dict(bwrap='bubblewrap', prlimit='util-linux', setpriv='util-linux')
_PROBE = """
import os, signal
count = 0
try:
  while count < 8:
    if os.fork() == 0:
      signal.pause()
    count += 1
except OSError:
  pass
print('forks', count, flush=True)
"""


class Limits(NamedTuple):
  """What one program may take."""

  wall_s: float = 6.0
  memory_mb: int = 512  # of each of its processes: address space, and what may lie in its sockets
  processes: int = 8  # at once, threads included
  disk_mb: int = 64  # in /tmp, which is memory
  output_kb: int = 1024  # of stdout, and of stderr
  packages: bool = False  # may it import this Python's site-packages


_LIMITS = Limits()


class Result(NamedTuple):
  """How a program ended."""

  outcome: str  # DONE: by itself or by a signal; DEADLINE: too long; FLOOD: too much output
  code: int  # of its exit, 128 + n by signal n; −1 where it was stopped
  stdout: bytes  # at most output_kb
  stderr: bytes
  seconds: float


class SandboxError(RuntimeError):
  """The sandbox itself failed, which says nothing about the program."""


def require(where: str) -> None:
  """Raises UserError, with the reason and the remedy, where this machine gives no sandbox. Source: none."""
  if sentence := why_not():
    raise UserError(f'{where} runs programs in a sandbox only, and {sentence}.')


@functools.cache
def why_not() -> str:
  """'' where a sandbox can be had and really limits what is in it, else the reason and the remedy. Source: none."""
  if not sys.platform.startswith('linux'):
    return f'there is none for {sys.platform}; train on Linux'
  if os.uname().machine not in seccomp.MACHINES:
    return f'there is none for {os.uname().machine}; train on: {" or ".join(seccomp.MACHINES)}'
  for tool in (*_TOOLS,) if os.geteuid() == 0 else ('bwrap', 'prlimit'):
    if shutil.which(tool) is None:
      return f'{tool} is not installed; install it: apt-get install {_TOOLS[tool]}'
  told = subprocess.run(['bwrap', '--help'], capture_output=True, text=True).stdout
  if '--disable-userns' not in told or '--size' not in told:
    return 'this bubblewrap is older than 0.8, which lacks --disable-userns; install 0.8 or later'
  try:
    found = run(['-c', _PROBE], limits=Limits(wall_s=20.0, processes=2))
  except SandboxError as error:
    return _explain(str(error))
  if found.outcome != DONE or found.code or found.stdout != b'forks 1\n':
    said = (found.stdout + found.stderr).decode('utf-8', 'replace').strip()[-200:]
    return (
      f'the limit on processes does not hold in it ({found.outcome}, {found.code}, {said!r}, one fork '
      'expected); it takes Linux 5.14 or later and a Python that other users may read'
    )
  return ''


def _explain(message: str) -> str:
  """What bubblewrap said, with the most likely remedy."""
  reason = f'bubblewrap cannot make one here ({message})'
  if _sysctl('kernel/apparmor_restrict_unprivileged_userns') == '1':
    remedy = 'allow user namespaces: sysctl kernel.apparmor_restrict_unprivileged_userns=0'
  elif _sysctl('kernel/unprivileged_userns_clone') == '0':
    remedy = 'allow user namespaces: sysctl kernel.unprivileged_userns_clone=1'
  elif _sysctl('user/max_user_namespaces') == '0':
    remedy = 'allow user namespaces: sysctl user.max_user_namespaces=10000'
  elif 'source path' in message:
    remedy = 'install Python where every user may read it'
  else:
    remedy = (
      'in a container, let it make user namespaces: docker run --security-opt seccomp=unconfined '
      '--security-opt apparmor=unconfined'
    )
  return f'{reason}; {remedy}'


def _sysctl(name: str) -> str:
  try:
    with open(f'/proc/sys/{name}') as file:
      return file.read().strip()
  except OSError:
    return ''


def run(
  args: Sequence[str],
  *,
  files: Mapping[str, bytes] | None = None,
  stdin: bytes = b'',
  limits: Limits = _LIMITS,
) -> Result:
  """Runs Python with `args`, `files` (name → content) under /box and `stdin` both there and at /dev/stdin.

  Returns within wall_s and what it takes to kill. Raises SandboxError where the sandbox fails. Source: none.
  """
  begin = time.monotonic()
  told = {**{f'/box/{name}': text for name, text in (files or {}).items()}, '/dev/stdin': stdin}
  with contextlib.ExitStack() as stack:
    source = stack.enter_context(program_io.in_memory(stdin))
    box = stack.enter_context(
      start(args, files=told, limits=limits, stdin=source, stdout=subprocess.PIPE)
    )
    outcome, output = program_io.collect(
      box.process, begin + limits.wall_s, limits.output_kb * 1024
    )
    if outcome != DONE:
      return Result(outcome, -1, *output, time.monotonic() - begin)
    code = box.process.wait()
    box.check(output[1])
    return Result(DONE, code, *output, time.monotonic() - begin)


class Box(NamedTuple):
  """A program that runs."""

  process: subprocess.Popen
  status: int  # a pipe that tells what bubblewrap did
  told: bytearray  # and what it told
  layers: int  # how many of it there are, one in another

  def check(self, stderr: bytes) -> None:
    """Raises SandboxError unless bubblewrap, which has ended, says that it ran the program to its end."""
    self._listen()
    if self.told.count(b'"exit-code"') < self.layers:
      said = stderr.decode('utf-8', 'replace').strip()[-300:]
      raise SandboxError(said or f'bubblewrap ended with code {self.process.returncode}')

  def end(self) -> None:
    """Kills all that is in the sandbox and returns when it is dead: what it held is free, what it ran runs no more."""
    self._listen()
    with contextlib.ExitStack() as stack:
      if found := re.search(rb'"child-pid": *([0-9]+)', self.told):
        # The first process of a namespace ends after all others in it.
        with contextlib.suppress(ProcessLookupError):
          first = os.pidfd_open(int(found[1]))
          stack.callback(os.close, first)
          stack.callback(select.select, [first], [], [], _DYING_S)
      self.process.kill()

  def _listen(self) -> None:
    os.set_blocking(self.status, False)
    with contextlib.suppress(BlockingIOError):
      self.told.extend(os.read(self.status, 65536))


@contextlib.contextmanager
def start(
  args: Sequence[str],
  *,
  files: Mapping[str, bytes],
  limits: Limits,
  pass_fds: Iterable[int] = (),
  **streams: Any,
) -> Iterator[Box]:
  """Starts Python with `args` in a sandbox that is killed when the context ends; `files` are path → content.

  streams: stdin and stdout as subprocess.Popen takes them; stderr is a pipe. Source: none.
  """
  with contextlib.ExitStack() as stack:
    read, write = os.pipe()
    stack.callback(os.close, read)
    sources = {
      path: stack.enter_context(program_io.in_memory(text)) for path, text in files.items()
    }
    calls = stack.enter_context(program_io.in_memory(seccomp.program()))
    other = os.dup(write)  # each layer closes its own before it runs the next
    outer = _reached(limits.packages, other)
    counted = _files_can_be_counted()
    room = _room(limits) if counted else []
    walls = _walls(limits, sources, write, calls, counted)
    argv = [*outer, *room, *walls, *_limited(limits), *args]
    # Where no layer is around it, nobody would close the second: the program would have it.
    status = (write, other) if 'bwrap' in outer else (write,)
    try:
      process = subprocess.Popen(
        argv, stderr=subprocess.PIPE, pass_fds=(*sources.values(), calls, *status, *pass_fds),
        cwd='/', env=dict(PATH=os.environ.get('PATH', os.defpath)), **streams,
      )  # fmt: skip
    finally:
      os.close(write)
      os.close(other)
    stack.enter_context(process)
    box = Box(process, read, bytearray(), 1 + outer.count('bwrap'))
    stack.callback(box.end)
    # Where memory runs out, the kernel is to take this and not the trainer.
    with contextlib.suppress(OSError), open(f'/proc/{process.pid}/oom_score_adj', 'w') as file:
      file.write('1000')
    yield box


def _room(limits: Limits) -> list[str]:
  """What mounts the program's /tmp with a limit on files, which bubblewrap cannot set."""
  size = f'size={limits.disk_mb * 1024**2},nr_inodes={_FILES},mode=0755'
  script = f'mount -t tmpfs -o {size} tmpfs {_ROOM} && exec "$@"'
  return ['unshare', '--user', '--map-root-user', '--mount', '--', 'sh', '-c', script, 'sh']


# Any folder that is everywhere, and that no program in a sandbox sees.
_ROOM = '/sys'


@functools.cache
def _files_can_be_counted() -> bool:
  """Whether this machine lets a user mount a file system and run bubblewrap there."""
  inner = [
    'bwrap',
    '--unshare-user',
    '--disable-userns',
    '--ro-bind',
    '/',
    '/',
    '--bind',
    _ROOM,
    '/tmp',
  ]
  argv = [*_become_nobody(), *_room(_LIMITS), *inner, '--', 'true']
  try:
    return subprocess.run(argv, capture_output=True, cwd='/').returncode == 0
  except OSError:
    return False


def _walls(
  limits: Limits, files: Mapping[str, int], status: int, calls: int, counted: bool
) -> list[str]:
  """bubblewrap's part: what a program may see. The order of mounts matters."""
  binds, masks = _places(limits.packages)
  argv = [
    *('bwrap', '--unshare-user', '--disable-userns', '--unshare-ipc', '--unshare-pid', '--unshare-net'),
    *('--unshare-uts', '--unshare-cgroup-try', '--uid', str(_NOBODY), '--gid', str(_NOBODY)),
    *('--die-with-parent', '--new-session', '--clearenv', '--cap-drop', 'ALL'),
    *('--hostname', 'sandbox', '--json-status-fd', str(status)),
    *('--seccomp', str(calls)),
  ]  # fmt: skip
  # First: this Python, or its packages, may lie below the machine's own /tmp.
  size = str(limits.disk_mb * 1024**2)
  argv += ['--bind', _ROOM, '/tmp'] if counted else ['--size', size, '--tmpfs', '/tmp']
  for name in ('/lib', '/lib32', '/lib64'):  # links into /usr, or folders on older systems
    if os.path.islink(name):
      argv += ['--symlink', os.readlink(name), name]
    else:
      argv += ['--ro-bind-try', name, name]
  for path in binds:
    argv += ['--ro-bind-try', path, path]
  for path in masks:
    argv += ['--size', '4096', '--tmpfs', path, '--remount-ro', path]
  for name in _DEVICES:
    argv += ['--dev-bind', f'/dev/{name}', f'/dev/{name}']
  for path, file in files.items():
    argv += ['--perms', '0444', '--file', str(file), path]
  for name, value in _ENVIRONMENT.items():
    argv += ['--setenv', name, value]
  if limits.packages:
    argv += ['--setenv', 'PYTHONPATH', ':'.join(_packages())]
  return [*argv, '--remount-ro', '/', '--chdir', '/tmp', '--']


def _limited(limits: Limits) -> list[str]:
  # Set inside: there the kernel counts the processes of this namespace, outside all of the user's, who may have
  # hundreds. It spares root, also under another name in a namespace: `_reached` sees to it that nobody is root.
  address_bytes, open_files = _shares(limits.memory_mb * 1024**2)
  return [
    *(shutil.which('prlimit'), f'--nproc={limits.processes + _OWN_PROCESS}'),
    *(f'--as={address_bytes}', f'--fsize={limits.disk_mb * 1024**2}', f'--sigpending={_TIMERS}'),
    *(f'--cpu={math.ceil(limits.wall_s) + 1}', f'--nofile={open_files}', '--core=0', '--'),
    *(_python(), '-S', '-s', '-B'),
  ]


def _shares(memory_bytes: int) -> tuple[int, int]:
  """(bytes of address space, open files): any of these may be a socket with a full buffer, which counts as memory."""
  default = _sysctl('net/core/wmem_default')
  each = int(default) if default.isdigit() else _SOCKET_BYTES
  files = min(max(memory_bytes // 4 // max(each, 1), _LEAST_OPEN_FILES), _OPEN_FILES)
  return max(memory_bytes - files * each, memory_bytes // 2), files


def _python() -> str:
  return os.path.realpath(getattr(sys, '_base_executable', sys.executable))


def _packages() -> list[str]:
  return sorted({sysconfig.get_path('purelib'), sysconfig.get_path('platlib')})


@functools.cache
def _places(packages: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
  """(paths to show, paths within to empty): what Python needs, without anything installed for it."""
  shown = ['/usr/lib', '/usr/lib32', '/usr/lib64', '/etc/ld.so.cache', shutil.which('prlimit')]
  shown += [os.path.join(os.path.realpath(sys.base_prefix), 'lib'), _python()]
  base = os.path.realpath(sysconfig.get_path('stdlib'))
  installed = [os.path.join(base, name) for name in ('site-packages', 'dist-packages')]
  installed += ['/usr/lib/python3/dist-packages', '/usr/local/lib/python3/dist-packages']
  wanted = _packages() if packages else []
  seen = [path for path in dict.fromkeys(shown + wanted) if os.path.exists(path)]
  empty = [path for path in installed if os.path.isdir(path) and path not in wanted]
  return tuple(seen), tuple(path for path in empty if any(path.startswith(f'{s}/') for s in seen))


def _reached(packages: bool, status: int) -> list[str]:
  """For root alone: what makes it nobody, and lays Python open where only root may go (/root/.pyenv, say)."""
  if os.geteuid() != 0:
    return []
  closed: dict[str, list[str]] = {}
  for path in _places(packages)[0]:
    folders = _parents(path)
    shut = [folder for folder in folders if not os.stat(folder).st_mode & 0o001]
    if shut:
      closed.setdefault(shut[0], []).append(path)
  argv = []
  if closed:
    # With a namespace of processes, because it has given up the right to kill those of nobody.
    argv += ['bwrap', '--die-with-parent', '--unshare-pid', '--json-status-fd', str(status)]
    argv += ['--dev-bind', '/', '/', '--proc', '/proc']
  for folder, paths in closed.items():
    argv += ['--perms', '0755', '--tmpfs', folder]
    for path in paths:
      for parent in _parents(path):
        if parent.startswith(f'{folder}/'):
          argv += ['--perms', '0755', '--dir', parent]
      argv += ['--ro-bind', path, path]
  return [*argv, *(['--'] if closed else []), *_become_nobody()]


def _become_nobody() -> list[str]:
  if os.geteuid() != 0:
    return []
  return ['setpriv', f'--reuid={_NOBODY}', f'--regid={_NOBODY}', '--clear-groups', '--']


def _parents(path: str) -> list[str]:
  """The folders above a path, from the top."""
  parts = path.strip('/').split('/')[:-1]
  return ['/' + '/'.join(parts[: i + 1]) for i in range(len(parts))]

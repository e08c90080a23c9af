"""Runs untrusted programs under bubblewrap, in their own namespaces: no outside file, network or process.

A program sees a Python with its standard library and C libraries, and the given files under /box, all read-only. It has
a private /tmp in memory, with a limit on the number of files where the machine lets a user mount one. /dev holds null,
zero, full, random and urandom. There is no /proc and no inherited environment, and the user is nobody. All processes
end with the sandbox's first process, that one ends with bubblewrap, and bubblewrap ends with the calling process.

Not covered: a flaw of the kernel in the system calls that stay open. Concurrent programs share the machine: each may
use its number of processes times its memory, and the cores until its deadline. When memory runs out, the kernel is set
to kill these processes first.
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
_TIMERS = 1024  # timers and pending signals: each takes kernel memory
# Files in /tmp, links and folders included: each takes about 1 kB of kernel memory that disk_mb does not count.
_FILES = 10_000
_SOCKET_BYTES = 212_992  # size of a socket buffer, unless the machine's setting differs
_KILL_S = 5.0  # longer than any killed process takes to end
_DEVICES = ('null', 'zero', 'full', 'random', 'urandom')
_OWN_PROCESS = (
  1  # bubblewrap's own process, the first of the namespace, which counts toward the limit
)
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
  """Resource limits of one program."""

  wall_s: float = 6.0
  memory_mb: int = 512  # of each process: address space and socket buffers together
  processes: int = 8  # at once, threads included
  disk_mb: int = 64  # in /tmp, which is memory
  output_kb: int = 1024  # of stdout, and of stderr
  packages: bool = False  # whether it can import this Python's site-packages


_LIMITS = Limits()


class Result(NamedTuple):
  """How a program ended."""

  outcome: str  # DONE: ended by itself or a signal; DEADLINE: ran too long; FLOOD: too much output
  code: int  # exit code, 128 + n after signal n; −1 where the sandbox stopped it
  stdout: bytes  # at most output_kb
  stderr: bytes
  seconds: float


class SandboxError(RuntimeError):
  """The sandbox itself failed; the program may be correct."""


def require(where: str) -> None:
  """Raise UserError, with the reason and the remedy, where this machine has no sandbox."""
  if reason := unavailable_reason():
    raise UserError(f'{where} runs programs in a sandbox only, and {reason}.')


@functools.cache
def unavailable_reason() -> str:
  """'' where a sandbox starts and its limits hold, else the reason and the remedy."""
  if not sys.platform.startswith('linux'):
    return f'there is none for {sys.platform}; train on Linux'
  if os.uname().machine not in seccomp.MACHINES:
    return f'there is none for {os.uname().machine}; train on: {" or ".join(seccomp.MACHINES)}'
  for tool in (*_TOOLS,) if os.geteuid() == 0 else ('bwrap', 'prlimit'):
    if shutil.which(tool) is None:
      return f'{tool} is not installed; install it: apt-get install {_TOOLS[tool]}'
  options = subprocess.run(['bwrap', '--help'], capture_output=True, text=True).stdout
  if '--disable-userns' not in options or '--size' not in options:
    return 'this bubblewrap is older than 0.8, which lacks --disable-userns; install 0.8 or later'
  try:
    result = run(['-c', _PROBE], limits=Limits(wall_s=20.0, processes=2))
  except SandboxError as error:
    return _with_remedy(str(error))
  if result.outcome != DONE or result.code or result.stdout != b'forks 1\n':
    output = (result.stdout + result.stderr).decode('utf-8', 'replace').strip()[-200:]
    return (
      f'the limit on processes does not hold in it ({result.outcome}, {result.code}, {output!r}, one fork '
      'expected); it takes Linux 5.14 or later and a Python that other users may read'
    )
  return ''


def _with_remedy(message: str) -> str:
  """The error message of bubblewrap, with the most likely remedy."""
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
  """Run Python with `args`, `files` (name → content) under /box, and `stdin` as its input and at /dev/stdin.

  Returns within wall_s plus the time to kill the program. Raises SandboxError where the sandbox fails.
  """
  begin = time.monotonic()
  paths = {**{f'/box/{name}': text for name, text in (files or {}).items()}, '/dev/stdin': stdin}
  with contextlib.ExitStack() as stack:
    source = stack.enter_context(program_io.in_memory(stdin))
    box = stack.enter_context(
      start(args, files=paths, limits=limits, stdin=source, stdout=subprocess.PIPE)
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
  """A running program."""

  process: subprocess.Popen
  status: int  # read end of the pipe with bubblewrap's status
  received: bytearray  # status bytes so far
  layers: int  # number of nested bubblewraps

  def check(self, stderr: bytes) -> None:
    """Raise SandboxError unless the status of bubblewrap, which has ended, reports the program's exit code."""
    self._read_status()
    if self.received.count(b'"exit-code"') < self.layers:
      message = stderr.decode('utf-8', 'replace').strip()[-300:]
      raise SandboxError(message or f'bubblewrap ended with code {self.process.returncode}')

  def kill(self) -> None:
    """Kill all processes of the sandbox; return after they have ended and their memory is free."""
    self._read_status()
    with contextlib.ExitStack() as stack:
      if match := re.search(rb'"child-pid": *([0-9]+)', self.received):
        # The first process of a namespace ends after all others in it.
        with contextlib.suppress(ProcessLookupError):
          first = os.pidfd_open(int(match[1]))
          stack.callback(os.close, first)
          stack.callback(_wait_for_end, first)
      self.process.kill()

  def _read_status(self) -> None:
    os.set_blocking(self.status, False)
    with contextlib.suppress(BlockingIOError):
      self.received.extend(os.read(self.status, 65536))


def _wait_for_end(pidfd: int) -> None:
  """Returns when the process has ended, after `_KILL_S` seconds at most."""
  poll = select.poll()  # `select.select` fails for descriptors from 1024 on
  poll.register(pidfd, select.POLLIN)
  poll.poll(_KILL_S * 1000)


@contextlib.contextmanager
def start(
  args: Sequence[str],
  *,
  files: Mapping[str, bytes],
  limits: Limits,
  pass_fds: Iterable[int] = (),
  **streams: Any,
) -> Iterator[Box]:
  """Start Python with `args` in a sandbox that is killed when the context ends; `files` are path → content.

  streams: stdin and stdout as for subprocess.Popen; stderr is a pipe.
  """
  with contextlib.ExitStack() as stack:
    read, write = os.pipe()
    stack.callback(os.close, read)
    sources = {
      path: stack.enter_context(program_io.in_memory(text)) for path, text in files.items()
    }
    call_filter = stack.enter_context(program_io.in_memory(seccomp.program()))
    outer_write = os.dup(write)  # each layer closes its own copy before it runs the next
    outer = _drop_root(limits.packages, outer_write)
    counted = _files_can_be_counted()
    mount = _mount_tmp(limits) if counted else []
    isolate = _isolate(limits, sources, write, call_filter, counted)
    argv = [*outer, *mount, *isolate, *_limited(limits), *args]
    # Without an outer layer to close it, the second copy would stay open in the program.
    status = (write, outer_write) if 'bwrap' in outer else (write,)
    try:
      process = subprocess.Popen(
        argv, stderr=subprocess.PIPE, pass_fds=(*sources.values(), call_filter, *status, *pass_fds),
        cwd='/', env=dict(PATH=os.environ.get('PATH', os.defpath)), **streams,
      )  # fmt: skip
    finally:
      os.close(write)
      os.close(outer_write)
    stack.enter_context(process)
    box = Box(process, read, bytearray(), 1 + outer.count('bwrap'))
    stack.callback(box.kill)
    # When memory runs out, the kernel must kill this process before the trainer.
    with contextlib.suppress(OSError), open(f'/proc/{process.pid}/oom_score_adj', 'w') as file:
      file.write('1000')
    yield box


def _mount_tmp(limits: Limits) -> list[str]:
  """Command prefix that mounts the program's /tmp with a limit on files, which bubblewrap cannot set."""
  size = f'size={limits.disk_mb * 1024**2},nr_inodes={_FILES},mode=0755'
  script = f'mount -t tmpfs -o {size} tmpfs {_MOUNT_POINT} && exec "$@"'
  return ['unshare', '--user', '--map-root-user', '--mount', '--', 'sh', '-c', script, 'sh']


# A folder that exists on every machine and is hidden from the program.
_MOUNT_POINT = '/sys'


@functools.cache
def _files_can_be_counted() -> bool:
  """Whether this machine lets a user mount a file system and run bubblewrap in it."""
  inner = ['bwrap', '--unshare-user', '--disable-userns', '--ro-bind', '/', '/']
  inner += ['--bind', _MOUNT_POINT, '/tmp']
  argv = [*_become_nobody(), *_mount_tmp(_LIMITS), *inner, '--', 'true']
  try:
    return subprocess.run(argv, capture_output=True, cwd='/').returncode == 0
  except OSError:
    return False


def _isolate(
  limits: Limits, files: Mapping[str, int], status: int, call_filter: int, counted: bool
) -> list[str]:
  """Command prefix that runs bubblewrap: namespaces and visible paths. The order of mounts matters."""
  binds, masks = _python_paths(limits.packages)
  argv = [
    *('bwrap', '--unshare-user', '--disable-userns', '--unshare-ipc', '--unshare-pid', '--unshare-net'),
    *('--unshare-uts', '--unshare-cgroup-try', '--uid', str(_NOBODY), '--gid', str(_NOBODY)),
    *('--die-with-parent', '--new-session', '--clearenv', '--cap-drop', 'ALL'),
    *('--hostname', 'sandbox', '--json-status-fd', str(status)),
    *('--seccomp', str(call_filter)),
  ]  # fmt: skip
  # Mounted first: this Python, or its packages, may lie below the machine's own /tmp.
  size = str(limits.disk_mb * 1024**2)
  argv += ['--bind', _MOUNT_POINT, '/tmp'] if counted else ['--size', size, '--tmpfs', '/tmp']
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
  """Command prefix that runs Python under resource limits."""
  # The limits are set inside of the namespace, where the kernel counts only its processes; outside it would count all
  # processes of the user. They do not apply to root, even under another name in a namespace: hence `_drop_root`.
  address_bytes, open_files = _memory_shares(limits.memory_mb * 1024**2)
  return [
    *(shutil.which('prlimit'), f'--nproc={limits.processes + _OWN_PROCESS}'),
    *(f'--as={address_bytes}', f'--fsize={limits.disk_mb * 1024**2}', f'--sigpending={_TIMERS}'),
    *(f'--cpu={math.ceil(limits.wall_s) + 1}', f'--nofile={open_files}', '--core=0', '--'),
    *(_python(), '-S', '-s', '-B'),
  ]


def _memory_shares(memory_bytes: int) -> tuple[int, int]:
  """(bytes of address space, open files), where every file may be a socket with a full buffer."""
  default = _sysctl('net/core/wmem_default')
  socket_bytes = int(default) if default.isdigit() else _SOCKET_BYTES
  files = min(max(memory_bytes // 4 // max(socket_bytes, 1), _LEAST_OPEN_FILES), _OPEN_FILES)
  return max(memory_bytes - files * socket_bytes, memory_bytes // 2), files


def _python() -> str:
  return os.path.realpath(getattr(sys, '_base_executable', sys.executable))


def _packages() -> list[str]:
  return sorted({sysconfig.get_path('purelib'), sysconfig.get_path('platlib')})


@functools.cache
def _python_paths(packages: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
  """(paths to show, paths within these to empty): the files of Python, without installed packages."""
  needed = ['/usr/lib', '/usr/lib32', '/usr/lib64', '/etc/ld.so.cache', shutil.which('prlimit')]
  needed += [os.path.join(os.path.realpath(sys.base_prefix), 'lib'), _python()]
  base = os.path.realpath(sysconfig.get_path('stdlib'))
  installed = [os.path.join(base, name) for name in ('site-packages', 'dist-packages')]
  installed += ['/usr/lib/python3/dist-packages', '/usr/local/lib/python3/dist-packages']
  wanted = _packages() if packages else []
  shown = [path for path in dict.fromkeys(needed + wanted) if os.path.exists(path)]
  hidden = [path for path in installed if os.path.isdir(path) and path not in wanted]
  hidden = [path for path in hidden if any(path.startswith(f'{above}/') for above in shown)]
  return tuple(shown), tuple(hidden)


def _drop_root(packages: bool, status: int) -> list[str]:
  """Command prefix that changes from root to the user nobody; empty for other users.

  Where Python lies in folders that only root may enter (/root/.pyenv, say), an outer bubblewrap opens these.
  """
  if os.geteuid() != 0:
    return []
  closed: dict[str, list[str]] = {}
  for path in _python_paths(packages)[0]:
    folders = _parents(path)
    shut = [folder for folder in folders if not os.stat(folder).st_mode & 0o001]
    if shut:
      closed.setdefault(shut[0], []).append(path)
  argv = []
  if closed:
    # In its own process namespace, because it may not kill processes of another user.
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

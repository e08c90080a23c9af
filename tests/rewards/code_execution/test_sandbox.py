"""Attacks of programs on the sandbox. Each attack prints the list of its successes."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time

import pytest

from jaxrl_llm.rewards.code_execution import sandbox
from jaxrl_llm.rewards.code_execution.sandbox import DEADLINE, DONE, FLOOD, Limits
from jaxrl_llm.types import UserError

ROOT = pathlib.Path(__file__).parents[3]
LIMITS = Limits(wall_s=20.0, disk_mb=16, output_kb=64)

# Start of every attack, which runs in the writable folder. `tried` and `refused` record successes; there must be none.
PRELUDE = """
import ctypes, fcntl, json, os, signal, socket, sys, threading, time
outside, got = json.load(open('/dev/stdin')), []
libc = ctypes.CDLL(None, use_errno=True)
def tried(name, attempt):
  try:
    got.append(f'{name}: {attempt()!r}')
  except Exception:
    pass
def refused(name, *call):
  result = libc.syscall(*call)
  if result != -1:
    got.append(f'{name}: {result}')
"""
END = '\nprint(got)\n'

REFUSED = dict(
  project="tried('listed', lambda: os.listdir(outside['project']))",
  home_folder="""
names = os.listdir(outside['home']) if os.path.exists(outside['home']) else []
if set(names) - set(outside['python'].split('/')): got.append(names)
""",
  secret_file="tried('read', lambda: open(outside['secret']).read())",
  passwd="tried('read', lambda: open('/etc/passwd').read())",
  own_proc="""
for path in ('/proc/1/environ', '/proc/self/mem', '/proc/self/fd', '/sys/kernel', '/run'):
  tried(path, lambda: os.stat(path))
""",
  environment="if outside['secret'] in os.environ.values() or len(os.environ) > 9: got.append(os.environ)",
  descriptors="""
for number in range(3, 1024):
  tried(number, lambda: os.fstat(number))
""",
  neighbors="""
tried('signal', lambda: os.kill(outside['pid'], 0))
if os.getppid() != 1 or os.getpid() > 9 or os.getsid(0) == 0: got.append((os.getppid(), os.getpid(), os.getsid(0)))
""",
  network="tried('connected', lambda: socket.create_connection(('1.1.1.1', 53), 1))",
  loopback="tried('connected', lambda: socket.create_connection(('127.0.0.1', outside['port']), 1))",
  name_service="tried('looked up', lambda: socket.getaddrinfo('example.com', 80))",
  unix_socket="tried('connected', lambda: socket.socket(socket.AF_UNIX).connect(outside['unix']))",
  abstract_socket="tried('connected', lambda: socket.socket(socket.AF_UNIX).connect(chr(0) + outside['abstract']))",
  raw_socket="tried('opened', lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW))",
  # To the machine's hypervisor, which ignores network namespaces; to the kernel; and families of later kernels.
  other_sockets="""
for family in (*range(1, 50), 2**31, -1):
  for kind in (1, 2, 3, 5):
    tried((family, kind), lambda: socket.socket(family, kind))
    if family != 1: tried((family, kind), lambda: socket.socketpair(family, kind))
""",
  # Checks the mounts: permissions do not protect a folder that is writable for all users.
  mounted_to_write="""
for path in ('/', '/usr/lib', '/lib', outside['python'], '/box/attack.py'):
  tried('writable ' + path, lambda: 1 / (not os.statvfs(path).f_flag & os.ST_RDONLY))
""",
  write_outside="""
for folder in ('/', '/box', '/dev', '/dev/shm', '/usr/lib', '/etc', '/root', '/home', '/var/tmp', outside['python']):
  tried(folder, lambda: open(folder + '/planted', 'w'))
  for name in ('first', 'second'):
    tried(folder, lambda: os.mkdir(folder + '/' + name))
for path in ('/box/attack.py', '/dev/stdin', os.__file__):
  tried(path, lambda: open(path, 'a'))
  tried(path, lambda: os.remove(path))
  tried(path, lambda: os.chmod(path, 0o777))
""",
  leave_by_link="os.symlink(outside['secret'], 'link'); tried('read', lambda: open('link').read())",
  leave_by_chroot="tried('chroot', lambda: os.chroot('/tmp'))",
  become_root="""
for become in (os.setuid, os.setgid, os.seteuid):
  tried('became', lambda: become(0))
tried('groups', lambda: os.setgroups([0]))
if 0 in (os.getuid(), os.geteuid(), os.getgid()) : got.append(os.getuid())
""",
  suid="""
open('id', 'w').write('#!/bin/sh')
tried('owned', lambda: os.chown('id', 0, 0))
os.chmod('id', 0o6755)
tried('ran', lambda: os.execv('./id', ['id']))
""",
  devices="""
tried('made', lambda: os.mknod('mem', 0o20666, os.makedev(1, 1)))
for name in ('mem', 'kmem', 'vda', 'sda', 'kvm', 'nvidia0', 'fuse', 'tty', 'ptmx'):
  tried(name, lambda: open('/dev/' + name))
""",
  ptrace="refused('ptrace', 101 if os.uname().machine == 'x86_64' else 117, 16, 1, 0, 0)",
  mount="if libc.mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0: got.append('mounted')",
  unshare="""
for flag in (0x10000000, 0x00020000, 0x40000000):
  if libc.unshare(flag) == 0: got.append(hex(flag))
""",
  new_user_namespace="""
pid = libc.syscall(56 if os.uname().machine == 'x86_64' else 220, 0x10000000 | signal.SIGCHLD, 0, 0, 0, 0)
if pid == 0: os._exit(0)
if pid > 0: got.append('made')
""",
  uncounted_memory="""
tried('memfd', lambda: os.memfd_create('hog'))
if libc.shmget(0, 1 << 30, 0o1600) != -1: got.append('shm')
""",
  # asyncio wakes itself through such a pair, so it stays allowed; its buffers count as memory.
  socket_buffers="""
pair = socket.socketpair()
for end in pair:
  tried('larger', lambda: end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 24))
  tried('larger', lambda: end.setsockopt(socket.SOL_SOCKET, 32, 1 << 24))
# No limit counts descriptors in flight, nor the content of their buffers.
tried('sent', lambda: socket.send_fds(pair[0], [b'x'], [1]))
pair[0].send(b'x')
if pair[1].recv(1) != b'x': got.append('the pair does not work')
""",
  pipe_buffers="tried('larger', lambda: fcntl.fcntl(os.pipe()[1], 1031, 1 << 20))",
  watches="""
refused('inotify', 294 if os.uname().machine == 'x86_64' else 26, 0)
refused('fanotify', 300 if os.uname().machine == 'x86_64' else 262, 0, 0)
""",
  timers="""
count, timer = 0, ctypes.c_int()
while count < 5000 and libc.timer_create(0, None, ctypes.byref(timer)) == 0: count += 1
if count > 1024: got.append(count)
""",
  keyring="refused('keyctl', 250 if os.uname().machine == 'x86_64' else 219, 0, -3, 1)",
  raise_limits="""
import resource
for name in ('RLIMIT_AS', 'RLIMIT_NPROC', 'RLIMIT_FSIZE', 'RLIMIT_CPU', 'RLIMIT_NOFILE', 'RLIMIT_CORE'):
  most = resource.getrlimit(getattr(resource, name))[1]
  tried(name, lambda: resource.setrlimit(getattr(resource, name), (most + 1, most + 1)))
tried('nice', lambda: os.nice(-5))
""",
  packages="""
sys.path += [folder + '/site-packages' for folder in sys.path]
for name in ('jax', 'numpy', 'jaxrl_llm', 'pip', 'pytest'):
  tried(name, lambda: __import__(name))
""",
  kill_first="os.kill(1, signal.SIGKILL); os.kill(os.getppid(), signal.SIGKILL)",
  kill_all="""
if os.fork() == 0: time.sleep(60)
os.kill(-1, signal.SIGKILL)
""",
  kill_group="os.setpgid(0, 0); signal.signal(signal.SIGTERM, signal.SIG_IGN); os.killpg(0, signal.SIGTERM)",
  fork_bomb="""
count = 0
try:
  while count < 50:
    if os.fork() == 0:
      time.sleep(60)
    count += 1
except OSError:
  pass
if count != 7: got.append(count)
""",
  thread_bomb="""
count = 0
try:
  while count < 50:
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    count += 1
except RuntimeError:
  pass
if count != 7: got.append(count)
""",
  open_files="""
tried('opened', lambda: [open('/dev/null') for _ in range(64)])
""",
  disk="""
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
written = 0
for name in range(4):  # one file has its own limit
  try:
    with open(str(name), 'wb', 0) as file:
      while True:
        written += file.write(bytes(1 << 20))
  except OSError:
    pass
if not 0 < written <= 16 << 20: got.append(written)
""",
  # A name, a link or an empty file takes kernel memory that the size limit does not count.
  many_files="""
count = 0
try:
  while count < 40000:
    (os.symlink('x' * 100, f's{count}') if count % 2 else open(f'f{count}', 'x').close())
    count += 1
except OSError:
  pass
if not 100 < count < 20000: got.append(count)
""",
  long_file="""
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
tried('long', lambda: os.truncate(os.open('a', os.O_CREAT | os.O_RDWR), 1 << 30))
""",
)  # fmt: skip


@pytest.fixture(scope='module', autouse=True)
def needs_sandbox():
  if reason := sandbox.unavailable_reason():
    if os.environ.get('JAXRL_LLM_REQUIRE_SANDBOX') == '1':
      pytest.fail(f'JAXRL_LLM_REQUIRE_SANDBOX=1, but {reason}')
    pytest.skip(reason)


@pytest.fixture(scope='module')
def outside(tmp_path_factory):
  """Targets outside of the sandbox: name → path, port or process id."""
  folder = tmp_path_factory.mktemp('outside')
  os.chmod(folder, 0o755)
  secret = folder / 'secret'
  secret.write_text('secret')
  with contextlib.ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
    patch.setenv('TOKEN', str(secret))
    loopback, path, abstract = (
      stack.enter_context(socket.socket(family))
      for family in (socket.AF_INET, socket.AF_UNIX, socket.AF_UNIX)
    )
    loopback.bind(('127.0.0.1', 0))
    path.bind(str(folder / 'socket'))
    abstract.bind(f'\0{folder}')
    for listener in (loopback, path, abstract):
      listener.listen()
    yield dict(
      project=str(ROOT), home=str(pathlib.Path.home()), secret=str(secret), pid=os.getpid(),
      python=os.path.realpath(sys.base_prefix), port=loopback.getsockname()[1],
      unix=str(folder / 'socket'), abstract=str(folder),
    )  # fmt: skip


def run_attack(source: str, outside: dict, limits: Limits = LIMITS) -> sandbox.Result:
  files = {'attack.py': (PRELUDE + source + END).encode()}
  return sandbox.run(
    ['/box/attack.py'], files=files, stdin=json.dumps(outside).encode(), limits=limits
  )


def alive(marker: str) -> list[int]:
  """Processes of this machine that have `marker` among their arguments."""
  pids = []
  for path in pathlib.Path('/proc').glob('[0-9]*'):
    with contextlib.suppress(OSError):
      dead = (path / 'stat').read_text().rsplit(')', 1)[1].split()[0] in 'ZX'
      if not dead and marker.encode() in (path / 'cmdline').read_bytes():
        pids.append(int(path.name))
  return pids


@pytest.mark.parametrize('name', REFUSED)
def test_an_attack_fails_and_the_program_continues(name, outside):
  result = run_attack(REFUSED[name], outside)
  assert (result.outcome, result.code, result.stdout) == (DONE, 0, b'[]\n'), result


@pytest.mark.parametrize('name', ['descriptors', 'write_outside', 'many_files'])
def test_limits_hold_for_another_user_than_root(name, outside, monkeypatch):
  monkeypatch.setattr(os, 'geteuid', lambda: 1000)
  result = run_attack(REFUSED[name], outside)
  assert (result.outcome, result.code, result.stdout) == (DONE, 0, b'[]\n'), result


@pytest.mark.parametrize('name', ['disk', 'write_outside', 'mounted_to_write'])
def test_other_limits_hold_where_files_cannot_be_counted(name, outside, monkeypatch):
  monkeypatch.setattr(sandbox, '_files_can_be_counted', lambda: False)
  result = run_attack(REFUSED[name], outside)
  assert (result.outcome, result.code, result.stdout) == (DONE, 0, b'[]\n'), result


def test_asyncio_runs_in_a_sandbox():
  source = 'import asyncio\nasync def f(): await asyncio.sleep(0); print("done")\nasyncio.run(f())'
  result = sandbox.run(['-c', source], limits=LIMITS)
  assert (result.outcome, result.stdout) == (DONE, b'done\n'), result


def test_socket_buffers_are_part_of_the_memory(monkeypatch):
  """On machines tuned for large transfers every socket has megabytes of buffers."""
  limits = Limits(memory_mb=512)
  for default in ('212992', str(4 << 20), '', 'x'):
    monkeypatch.setattr(sandbox, '_sysctl', lambda name, value=default: value)
    argv = sandbox._limited(limits)
    limit_of = {a.split('=')[0]: int(a.split('=')[1]) for a in argv if '=' in a}
    buffers = limit_of['--nofile'] * int(default if default.isdigit() else 212992)
    assert limit_of['--as'] + buffers <= 512 << 20 and limit_of['--nofile'] >= 16
    assert limit_of['--as'] >= 256 << 20


# Run by a Python environment below a folder that the sandbox replaces.
BELOW = """
import sys
from jaxrl_llm.rewards.code_execution import sandbox
assert sandbox.unavailable_reason() == '', sandbox.unavailable_reason()
limits = sandbox.Limits(packages=True, wall_s=20.0)
source = 'import marker, os; open("/tmp/a", "w").write("x"); print(marker.__file__, os.listdir("/tmp"))'
result = sandbox.run(['-c', source], limits=limits)
print(result.stdout.decode() + result.stderr.decode())
result = sandbox.run(['-c', 'import os; print([p for p in os.listdir("/tmp") if p != "a"])'])
print(result.stdout.decode() + result.stderr.decode())
"""


@pytest.mark.parametrize('above', ['/tmp', '/var/tmp', '/dev/shm', '/run'])
def test_an_environment_below_a_temporary_folder_has_its_packages(above):
  if not os.access(above, os.W_OK):
    pytest.skip(f'{above} cannot be written to')
  with tempfile.TemporaryDirectory(dir=above) as folder:
    env = pathlib.Path(folder, 'clone', '.venv')
    subprocess.run([sys.executable, '-m', 'venv', '--without-pip', str(env)], check=True)
    (packages,) = env.glob('lib/python*/site-packages')
    (packages / 'marker.py').write_text('')
    ours = sysconfig.get_path('purelib')
    done = subprocess.run(
      [str(env / 'bin/python'), '-c', BELOW],
      env=os.environ | dict(PYTHONPATH=f'{ROOT}:{ours}'), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, second = [line for line in done.stdout.splitlines() if line]
    assert first.startswith(f'{packages}/marker.py ') and second == '[]', done.stdout
    assert os.listdir(folder) == ['clone']


def test_the_attacks_succeed_outside_of_a_sandbox(outside, tmp_path):
  """Proves that the attacks above can succeed."""
  names = (
    *('project', 'secret_file', 'passwd', 'own_proc', 'environment', 'leave_by_link'),
    *('loopback', 'unix_socket', 'abstract_socket'),
  )
  for name in names:
    done = subprocess.run(
      [sys.executable, '-c', PRELUDE + REFUSED[name] + END],
      input=json.dumps(outside),
      capture_output=True,
      text=True,
      cwd=tmp_path,
    )
    assert done.stdout not in ('', '[]\n'), (name, done.stderr)


ENDS = dict(
  loop=('while True: pass', DEADLINE, None),
  sleep=('time.sleep(1000)', DEADLINE, None),
  stop=('os.kill(os.getpid(), signal.SIGSTOP)', DEADLINE, None),
  loop_without_signals=(
    'for n in range(1, 65):\n  tried(n, lambda: signal.signal(n, signal.SIG_IGN))\nwhile True: pass',
    DEADLINE,
    None,
  ),
  silent_loop=('os.close(1); os.close(2)\nwhile True: pass', DEADLINE, None),
  forks_without_end=(
    'while True:\n  try: os.fork()\n  except OSError: pass',
    DEADLINE,
    None,
  ),
  leave_children=(
    'if os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0:\n    time.sleep(1000)\nos._exit(0)',
    DONE,
    0,
  ),
  huge_integer=('print(len(str(10 ** 10 ** 9)))', DEADLINE, None),
  stdout_flood=("while True: print('x' * 4096)", FLOOD, None),
  stderr_flood=("while True: print('x' * 4096, file=sys.stderr)", FLOOD, None),
  exit_0=('os._exit(0)', DONE, 0),
  exit_3=('sys.exit(3)', DONE, 3),
  kill_itself=('os.kill(os.getpid(), signal.SIGKILL)', DONE, 128 + signal.SIGKILL),
  segfault=('ctypes.string_at(0)', DONE, 128 + signal.SIGSEGV),
  faulthandler=('import faulthandler; faulthandler._sigsegv()', DONE, 128 + signal.SIGSEGV),
  memory_hog=('x = bytearray(600 << 20)', DONE, 1),
  memory_creep=('x = []\nwhile True: x.append(bytes(1 << 20))', DONE, 1),
  recursion=('def f(): f()\nf()', DONE, 1),
  import_jax=('import jax', DONE, 1),
  nul=('x = "\0"', DONE, 1),
  surrogate=('x = "\ud800"', DONE, 1),
  nesting=('(' * 1000, DONE, 1),
  long_source=('x = "' + 'y' * 10_000_000 + '"', DONE, 0),
)


@pytest.mark.parametrize('name', ENDS)
def test_every_program_ends_in_time_and_leaves_nothing_running(name, outside):
  source, outcome, code = ENDS[name]
  marker = f'sandbox-{name}-{os.getpid()}'
  files = {'attack.py': (PRELUDE + source + END).encode('utf-8', 'surrogatepass')}
  limits = LIMITS._replace(wall_s=1.0) if outcome == DEADLINE else LIMITS
  result = sandbox.run(
    ['/box/attack.py', marker],
    files=files,
    stdin=json.dumps(outside).encode(),
    limits=limits,
  )
  assert result.outcome == outcome and (code is None or result.code == code), result
  assert alive(marker) == []
  assert len(result.stdout) <= limits.output_kb * 1024
  assert len(result.stderr) <= limits.output_kb * 1024


def test_endless_recursion_without_pythons_limit_ends():
  source = b'import sys; sys.setrecursionlimit(10**9)\ndef f(): f()\nf()'
  result = sandbox.run(['/box/a.py'], files={'a.py': source}, limits=Limits(wall_s=2.0))
  assert result.outcome == DEADLINE or result.code != 0


def test_a_program_finds_its_files_and_stdin():
  source = b"import decimal, zlib, random\nopen('a', 'w').write('saved')\n"
  source += (
    b"print(open(0).read() + open('/dev/stdin').read() + open('/box/b').read() + open('a').read())"
  )
  result = sandbox.run(['/box/a.py'], files={'a.py': source, 'b': b' and '}, stdin='ä'.encode())
  assert (result.outcome, result.code, result.stderr) == (DONE, 0, b'')
  assert result.stdout.decode() == 'ää and saved\n'


def test_packages_can_be_imported_where_the_limits_allow_it():
  result = sandbox.run(
    ['-c', 'import numpy; print(numpy.arange(3))'],
    limits=Limits(packages=True, wall_s=20, memory_mb=2048),
  )
  assert (result.outcome, result.stdout) == (DONE, b'[0 1 2]\n'), result


CALLER = """
from jaxrl_llm.rewards.code_execution import sandbox
print('ready', flush=True)
sandbox.run(['-c', 'import time; time.sleep(1000)', {marker!r}], limits=sandbox.Limits(wall_s=600.0))
"""


def test_a_program_ends_with_the_calling_process():
  marker = f'sandbox-orphan-{os.getpid()}'
  caller = subprocess.Popen(
    [sys.executable, '-c', CALLER.format(marker=marker)],
    env=os.environ | dict(PYTHONPATH=str(ROOT)),
    stdout=subprocess.PIPE,
  )
  try:
    assert caller.stdout.readline() == b'ready\n'
    # The calling process itself has the marker among its arguments.
    wait_for(lambda: len(alive(marker)) > 2, 'the program')
  finally:
    caller.kill()
    caller.communicate()
  wait_for(lambda: alive(marker) == [], 'the end of all its processes')


def wait_for(condition, event: str) -> None:
  for _ in range(600):
    if condition():
      return
    time.sleep(0.05)
  pytest.fail(f'did not happen in 30 s: {event}')


def test_no_descriptor_stays_open():
  before = len(os.listdir('/proc/self/fd'))
  for _ in range(3):
    sandbox.run(['-c', 'pass'], files={'a': b''}, limits=LIMITS)
  assert len(os.listdir('/proc/self/fd')) == before


def test_a_failed_sandbox_raises(monkeypatch):
  monkeypatch.setattr(sandbox, '_python', lambda: '/missing')
  # prlimit cannot run it: bubblewrap ran its command to the end, so the program has a code. A bad mount has none.
  assert sandbox.run(['-c', 'pass']).code == 127
  monkeypatch.setattr(sandbox, '_DEVICES', ('missing',))
  with pytest.raises(sandbox.SandboxError, match='missing'):
    sandbox.run(['-c', 'pass'])


@pytest.fixture
def fresh_answer():
  sandbox.unavailable_reason.cache_clear()
  yield
  sandbox.unavailable_reason.cache_clear()


@pytest.mark.parametrize(
  'break_it, message',
  [
    (lambda m: m.setattr(sys, 'platform', 'darwin'), 'there is none for darwin; train on Linux'),
    (lambda m: m.setattr(sandbox.seccomp, 'MACHINES', dict(vax=())), 'train on: vax'),
    (
      lambda m: m.setattr('shutil.which', lambda name: None),
      'bwrap is not installed; install it: apt-get install bubblewrap',
    ),
    (lambda m: m.setattr(sandbox, '_OWN_PROCESS', 4), 'the limit on processes does not hold'),
    (lambda m: m.setattr(sandbox, '_DEVICES', ('missing',)), 'bubblewrap cannot make one here'),
    (
      lambda m: (
        m.setattr(sandbox, '_DEVICES', ('missing',)),
        m.setattr(sandbox, '_sysctl', lambda name: '0' * name.startswith('user/')),
      ),
      'allow user namespaces: sysctl user.max_user_namespaces=10000',
    ),
  ],
)
def test_a_missing_sandbox_is_reported_with_its_reason(
  break_it, message, monkeypatch, fresh_answer
):
  break_it(monkeypatch)
  with pytest.raises(UserError) as error:
    sandbox.require("config.rewards.fn='unit_tests'")
  assert message in str(error.value)
  assert str(error.value).startswith(
    "config.rewards.fn='unit_tests' runs programs in a sandbox only"
  )

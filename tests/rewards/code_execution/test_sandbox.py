"""What programs try in a sandbox, and what becomes of it. Each attack says on stdout what it got hold of."""

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

# Attacks that end by themselves begin with this, in the folder that they may write in. `tried` tells what succeeded:
# nothing may.
PRELUDE = """
import ctypes, fcntl, json, os, signal, socket, sys, threading, time
told, got = json.load(open('/dev/stdin')), []
libc = ctypes.CDLL(None, use_errno=True)
def tried(what, attempt):
  try:
    got.append(f'{what}: {attempt()!r}')
  except Exception:
    pass
def refused(what, *call):
  found = libc.syscall(*call)
  if found != -1:
    got.append(f'{what}: {found}')
"""
END = '\nprint(got)\n'

HOLDS = dict(
  project="tried('listed', lambda: os.listdir(told['project']))",
  home_folder="""
seen = os.listdir(told['home']) if os.path.exists(told['home']) else []
if set(seen) - set(told['python'].split('/')): got.append(seen)
""",
  secret_file="tried('read', lambda: open(told['secret']).read())",
  passwd="tried('read', lambda: open('/etc/passwd').read())",
  own_proc="""
for path in ('/proc/1/environ', '/proc/self/mem', '/proc/self/fd', '/sys/kernel', '/run'):
  tried(path, lambda: os.stat(path))
""",
  environment="if told['secret'] in os.environ.values() or len(os.environ) > 9: got.append(os.environ)",
  descriptors="""
for number in range(3, 1024):
  tried(number, lambda: os.fstat(number))
""",
  neighbors="""
tried('signal', lambda: os.kill(told['pid'], 0))
if os.getppid() != 1 or os.getpid() > 9 or os.getsid(0) == 0: got.append((os.getppid(), os.getpid(), os.getsid(0)))
""",
  network="tried('connected', lambda: socket.create_connection(('1.1.1.1', 53), 1))",
  loopback="tried('connected', lambda: socket.create_connection(('127.0.0.1', told['port']), 1))",
  name_service="tried('looked up', lambda: socket.getaddrinfo('example.com', 80))",
  unix_socket="tried('connected', lambda: socket.socket(socket.AF_UNIX).connect(told['unix']))",
  abstract_socket="tried('connected', lambda: socket.socket(socket.AF_UNIX).connect(chr(0) + told['abstract']))",
  raw_socket="tried('opened', lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW))",
  # To the machine's own hypervisor, whatever the namespace of networks; to the kernel; and all that is not known yet.
  other_sockets="""
for family in (*range(1, 50), 2**31, -1):
  for kind in (1, 2, 3, 5):
    tried((family, kind), lambda: socket.socket(family, kind))
    if family != 1: tried((family, kind), lambda: socket.socketpair(family, kind))
""",
  # Not by permissions alone, which a folder that all may write to has none of.
  mounted_to_write="""
for path in ('/', '/usr/lib', '/lib', told['python'], '/box/attack.py'):
  tried('writable ' + path, lambda: 1 / (not os.statvfs(path).f_flag & os.ST_RDONLY))
""",
  write_outside="""
for folder in ('/', '/box', '/dev', '/dev/shm', '/usr/lib', '/etc', '/root', '/home', '/var/tmp', told['python']):
  tried(folder, lambda: open(folder + '/planted', 'w'))
  for name in ('made', 'other'):
    tried(folder, lambda: os.mkdir(folder + '/' + name))
for path in ('/box/attack.py', '/dev/stdin', os.__file__):
  tried(path, lambda: open(path, 'a'))
  tried(path, lambda: os.remove(path))
  tried(path, lambda: os.chmod(path, 0o777))
""",
  leave_by_link="os.symlink(told['secret'], 'link'); tried('read', lambda: open('link').read())",
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
  # asyncio wakes itself by such a pair; what lies in its buffers is memory.
  socket_buffers="""
pair = socket.socketpair()
for end in pair:
  tried('larger', lambda: end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 24))
  tried('larger', lambda: end.setsockopt(socket.SOL_SOCKET, 32, 1 << 24))
# Descriptors that travel are counted nowhere, nor what lies in theirs.
tried('sent', lambda: socket.send_fds(pair[0], [b'x'], [1]))
pair[0].send(b'x')
if pair[1].recv(1) != b'x': got.append('the pair is deaf')
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
for name in range(4):  # a file alone has its own limit
  try:
    with open(str(name), 'wb', 0) as file:
      while True:
        written += file.write(bytes(1 << 20))
  except OSError:
    pass
if not 0 < written <= 16 << 20: got.append(written)
""",
  # A name, a link or an empty file takes kernel memory that no size limits.
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
  if reason := sandbox.why_not():
    if os.environ.get('JAXRL_LLM_REQUIRE_SANDBOX') == '1':
      pytest.fail(f'JAXRL_LLM_REQUIRE_SANDBOX=1, but {reason}')
    pytest.skip(reason)


@pytest.fixture(scope='module')
def prizes(tmp_path_factory):
  """What lies outside for the taking, and how it is called."""
  folder = tmp_path_factory.mktemp('prizes')
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


def attacked(source: str, prizes: dict, limits: Limits = LIMITS) -> sandbox.Result:
  files = {'attack.py': (PRELUDE + source + END).encode()}
  return sandbox.run(
    ['/box/attack.py'], files=files, stdin=json.dumps(prizes).encode(), limits=limits
  )


def alive(marker: str) -> list[int]:
  """Processes of this machine that have `marker` among their arguments."""
  found = []
  for path in pathlib.Path('/proc').glob('[0-9]*'):
    with contextlib.suppress(OSError):
      dead = (path / 'stat').read_text().rsplit(')', 1)[1].split()[0] in 'ZX'
      if not dead and marker.encode() in (path / 'cmdline').read_bytes():
        found.append(int(path.name))
  return found


@pytest.mark.parametrize('name', HOLDS)
def test_what_is_tried_fails_and_the_program_goes_on(name, prizes):
  found = attacked(HOLDS[name], prizes)
  assert (found.outcome, found.code, found.stdout) == (DONE, 0, b'[]\n'), found


@pytest.mark.parametrize('name', ['descriptors', 'write_outside', 'many_files'])
def test_another_user_than_root_is_held_as_well(name, prizes, monkeypatch):
  monkeypatch.setattr(os, 'geteuid', lambda: 1000)
  found = attacked(HOLDS[name], prizes)
  assert (found.outcome, found.code, found.stdout) == (DONE, 0, b'[]\n'), found


@pytest.mark.parametrize('name', ['disk', 'write_outside', 'mounted_to_write'])
def test_where_files_cannot_be_counted_the_rest_holds(name, prizes, monkeypatch):
  monkeypatch.setattr(sandbox, '_files_can_be_counted', lambda: False)
  found = attacked(HOLDS[name], prizes)
  assert (found.outcome, found.code, found.stdout) == (DONE, 0, b'[]\n'), found


def test_asyncio_runs_in_a_sandbox():
  source = 'import asyncio\nasync def f(): await asyncio.sleep(0); print("done")\nasyncio.run(f())'
  found = sandbox.run(['-c', source], limits=LIMITS)
  assert (found.outcome, found.stdout) == (DONE, b'done\n'), found


def test_socket_buffers_are_part_of_the_memory(monkeypatch):
  """Machines that are tuned for large transfers give every socket megabytes."""
  limits = Limits(memory_mb=512)
  for default in ('212992', str(4 << 20), '', 'x'):
    monkeypatch.setattr(sandbox, '_sysctl', lambda name, told=default: told)
    argv = sandbox._limited(limits)
    told = {a.split('=')[0]: int(a.split('=')[1]) for a in argv if '=' in a}
    buffers = told['--nofile'] * int(default if default.isdigit() else 212992)
    assert told['--as'] + buffers <= 512 << 20 and told['--nofile'] >= 16
    assert told['--as'] >= 256 << 20


# A Python environment, and what it runs, in a folder that the sandbox has one of its own in the place of.
BELOW = """
import sys
from jaxrl_llm.grade import sandbox
assert sandbox.why_not() == '', sandbox.why_not()
limits = sandbox.Limits(packages=True, wall_s=20.0)
source = 'import marker, os; open("/tmp/a", "w").write("x"); print(marker.__file__, os.listdir("/tmp"))'
found = sandbox.run(['-c', source], limits=limits)
print(found.stdout.decode() + found.stderr.decode())
found = sandbox.run(['-c', 'import os; print([p for p in os.listdir("/tmp") if p != "a"])'])
print(found.stdout.decode() + found.stderr.decode())
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


def test_outside_a_sandbox_the_prizes_can_be_had(prizes, tmp_path):
  """Else the attacks above prove nothing."""
  names = (
    *('project', 'secret_file', 'passwd', 'own_proc', 'environment', 'leave_by_link'),
    *('loopback', 'unix_socket', 'abstract_socket'),
  )
  for name in names:
    done = subprocess.run(
      [sys.executable, '-c', PRELUDE + HOLDS[name] + END],
      input=json.dumps(prizes),
      capture_output=True,
      text=True,
      cwd=tmp_path,
    )
    assert done.stdout not in ('', '[]\n'), (name, done.stderr)


ENDS = dict(
  loop=('while True: pass', DEADLINE, None),
  sleep=('time.sleep(1000)', DEADLINE, None),
  stop=('os.kill(os.getpid(), signal.SIGSTOP)', DEADLINE, None),
  deaf_loop=(
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
def test_every_program_ends_in_time_and_leaves_nothing_running(name, prizes):
  source, outcome, code = ENDS[name]
  marker = f'sandbox-{name}-{os.getpid()}'
  files = {'attack.py': (PRELUDE + source + END).encode('utf-8', 'surrogatepass')}
  limits = LIMITS._replace(wall_s=1.0) if outcome == DEADLINE else LIMITS
  found = sandbox.run(
    ['/box/attack.py', marker],
    files=files,
    stdin=json.dumps(prizes).encode(),
    limits=limits,
  )
  assert found.outcome == outcome and (code is None or found.code == code), found
  assert alive(marker) == []
  assert len(found.stdout) <= limits.output_kb * 1024
  assert len(found.stderr) <= limits.output_kb * 1024


def test_endless_recursion_without_pythons_limit_ends():
  source = b'import sys; sys.setrecursionlimit(10**9)\ndef f(): f()\nf()'
  found = sandbox.run(['/box/a.py'], files={'a.py': source}, limits=Limits(wall_s=2.0))
  assert found.outcome == DEADLINE or found.code != 0


def test_what_a_program_is_given_is_there():
  source = b"import decimal, zlib, random\nopen('a', 'w').write('kept')\n"
  source += (
    b"print(open(0).read() + open('/dev/stdin').read() + open('/box/b').read() + open('a').read())"
  )
  found = sandbox.run(['/box/a.py'], files={'a.py': source, 'b': b' and '}, stdin='ä'.encode())
  assert (found.outcome, found.code, found.stderr) == (DONE, 0, b'')
  assert found.stdout.decode() == 'ää and kept\n'


def test_packages_are_there_where_they_are_asked_for():
  found = sandbox.run(
    ['-c', 'import numpy; print(numpy.arange(3))'],
    limits=Limits(packages=True, wall_s=20, memory_mb=2048),
  )
  assert (found.outcome, found.stdout) == (DONE, b'[0 1 2]\n'), found


ASKING = """
from jaxrl_llm.grade import sandbox
print('ready', flush=True)
sandbox.run(['-c', 'import time; time.sleep(1000)', {marker!r}], limits=sandbox.Limits(wall_s=600.0))
"""


def test_a_program_ends_with_the_process_that_asked_for_it():
  marker = f'sandbox-orphan-{os.getpid()}'
  asking = subprocess.Popen(
    [sys.executable, '-c', ASKING.format(marker=marker)],
    env=os.environ | dict(PYTHONPATH=str(ROOT)),
    stdout=subprocess.PIPE,
  )
  try:
    assert asking.stdout.readline() == b'ready\n'
    # The asking process itself has the marker among its arguments.
    wait_for(lambda: len(alive(marker)) > 2, 'the program')
  finally:
    asking.kill()
    asking.communicate()
  wait_for(lambda: alive(marker) == [], 'the end of all of it')


def wait_for(condition, what: str) -> None:
  for _ in range(600):
    if condition():
      return
    time.sleep(0.05)
  pytest.fail(f'waited in vain for: {what}')


def test_no_descriptor_is_left_open_here():
  before = len(os.listdir('/proc/self/fd'))
  for _ in range(3):
    sandbox.run(['-c', 'pass'], files={'a': b''}, limits=LIMITS)
  assert len(os.listdir('/proc/self/fd')) == before


def test_a_sandbox_that_fails_is_no_result(monkeypatch):
  monkeypatch.setattr(sandbox, '_python', lambda: '/missing')
  # prlimit cannot run it: what bubblewrap ran ended, so this is the program's end. A bad mount is not.
  assert sandbox.run(['-c', 'pass']).code == 127
  monkeypatch.setattr(sandbox, '_DEVICES', ('missing',))
  with pytest.raises(sandbox.SandboxError, match='missing'):
    sandbox.run(['-c', 'pass'])


@pytest.fixture
def asked_anew():
  sandbox.why_not.cache_clear()
  yield
  sandbox.why_not.cache_clear()


@pytest.mark.parametrize(
  'break_it, told',
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
def test_why_there_is_no_sandbox_is_told(break_it, told, monkeypatch, asked_anew):
  break_it(monkeypatch)
  with pytest.raises(UserError) as error:
    sandbox.require("config.rewards.fn='unit_tests'")
  assert told in str(error.value)
  assert str(error.value).startswith(
    "config.rewards.fn='unit_tests' runs programs in a sandbox only"
  )

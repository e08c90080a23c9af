"""The seccomp filter of the sandbox: a BPF program that the kernel runs at every system call.

Refused are memory that no limit counts (memfd, System V, message queues, file watches, larger buffers of pipes and
sockets, descriptors in flight between sockets), every socket but a pair of Unix sockets, access to other processes,
mounts and namespaces, and the parts of the kernel with most of the known flaws. The numbers of calls and machines are
those of Linux's headers.
"""

from __future__ import annotations

import errno
import functools
import os
import socket
import struct
from typing import NamedTuple

_REFUSED = (
  *('memfd_create', 'memfd_secret', 'shmget', 'semget', 'msgget', 'mq_open'),
  *('ptrace', 'process_vm_readv', 'process_vm_writev', 'open_by_handle_at'),
  *('unshare', 'setns', 'mount', 'umount2', 'pivot_root'),
  *('fsopen', 'fsmount', 'open_tree', 'move_mount', 'mount_setattr'),
  *('bpf', 'perf_event_open', 'userfaultfd', 'io_uring_setup', 'add_key', 'request_key', 'keyctl'),
  *('socket', 'setsockopt', 'sendmsg', 'sendmmsg', 'inotify_init1', 'fanotify_init'),
)


class Machine(NamedTuple):
  """System call numbers of an architecture."""

  audit: int  # AUDIT_ARCH number of the architecture
  refused: tuple[int, ...]  # the numbers of _REFUSED
  socketpair: int
  fcntl: int


MACHINES = dict(
  x86_64=Machine(
    0xC000003E,
    (
      *(319, 447, 29, 64, 68, 240, 101, 310, 311, 304, 272, 308, 165, 166, 155, 430, 432, 428, 429),
      *(442, 321, 298, 323, 425, 248, 249, 250, 41, 54, 46, 307, 294, 300),
      253,  # inotify_init, which newer machines lack
    ),
    socketpair=53,
    fcntl=72,
  ),
  aarch64=Machine(
    0xC00000B7,
    (
      *(279, 447, 194, 190, 186, 180, 117, 270, 271, 265, 97, 268, 40, 39, 41, 430, 432, 428, 429),
      *(442, 280, 241, 282, 425, 217, 218, 219, 198, 208, 211, 269, 26, 262),
    ),
    socketpair=199,
    fcntl=25,
  ),
)

_LOAD, _EQUAL, _ABOVE, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000 | errno.EPERM
# Offsets in the record of a call: its number, its architecture, and the low halves of the first two arguments. The
# kernel reads no more of an int.
_NUMBER, _AUDIT, _FIRST, _SECOND = 0, 4, 16, 24
_X32_CALLS = 0x40000000  # x32 numbers of calls begin here
_F_SETPIPE_SZ = 1031


@functools.cache
def program() -> bytes:
  """Classic BPF that returns EPERM for refused calls and for calls of another architecture's numbering."""
  machine = MACHINES[os.uname().machine]
  # (code, value, label if true, label if false); None is the next line.
  lines = [
    (_LOAD, _AUDIT, None, None),
    (_EQUAL, machine.audit, None, 'fail'),
    (_LOAD, _NUMBER, None, None),
    (_ABOVE, _X32_CALLS, 'fail', None),
    *((_EQUAL, number, 'fail', None) for number in machine.refused),
    (_EQUAL, machine.socketpair, 'pair', None),
    (_EQUAL, machine.fcntl, 'fcntl', 'allow'),
    'pair',
    (_LOAD, _FIRST, None, None),
    (_EQUAL, int(socket.AF_UNIX), 'allow', 'fail'),
    'fcntl',
    (_LOAD, _SECOND, None, None),
    (_EQUAL, _F_SETPIPE_SZ, 'fail', 'allow'),
    'allow',
    (_RETURN, _ALLOW, None, None),
    'fail',
    (_RETURN, _FAIL, None, None),
  ]
  labels, code = {}, []
  for line in lines:
    if isinstance(line, str):
      labels[line] = len(code)
    else:
      code.append(line)
  jump = lambda at, label: 0 if label is None else labels[label] - at - 1  # noqa: E731
  return b''.join(
    struct.pack('=HBBI', kind, jump(at, yes), jump(at, no), value)
    for at, (kind, value, yes, no) in enumerate(code)
  )

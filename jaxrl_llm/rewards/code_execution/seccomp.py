"""The system calls that a sandbox refuses, as the program that the kernel runs at every call.

Refused are memory that no limit counts (memfd, System V, message queues, watches of files, larger buffers of pipes and
sockets, descriptors on their way between sockets), every socket but a pair of Unix ones, looking into other processes,
mounts and namespaces, and what kernels had most of their flaws in. Number of a call and machine: Linux's own headers.
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
  """Numbers of an architecture."""

  audit: int  # its own, among architectures
  refused: tuple[int, ...]  # of _REFUSED
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

_LOAD, _EQUAL, _ABOVE, _GIVE = 0x20, 0x15, 0x35, 0x06
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000 | errno.EPERM
# Where the record of a call holds its number, its machine, and the low halves of its first two arguments, which are all
# that the kernel reads of an int.
_NUMBER, _AUDIT, _FIRST, _SECOND = 0, 4, 16, 24
_OTHER_NUMBERING = 0x40000000  # x86's, from here on
_F_SETPIPE_SZ = 1031


@functools.cache
def program() -> bytes:
  """Classic BPF: EPERM for what is refused and for all that is not of this machine's own numbering. Source: none."""
  machine = MACHINES[os.uname().machine]
  # (code, value, where to go on if true, and if not); a name is a place below, None the next line.
  lines = [
    (_LOAD, _AUDIT, None, None),
    (_EQUAL, machine.audit, None, 'fail'),
    (_LOAD, _NUMBER, None, None),
    (_ABOVE, _OTHER_NUMBERING, 'fail', None),
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
    (_GIVE, _ALLOW, None, None),
    'fail',
    (_GIVE, _FAIL, None, None),
  ]
  places, code = {}, []
  for line in lines:
    if isinstance(line, str):
      places[line] = len(code)
    else:
      code.append(line)
  jump = lambda at, place: 0 if place is None else places[place] - at - 1  # noqa: E731
  return b''.join(
    struct.pack('=HBBI', kind, jump(at, yes), jump(at, no), value)
    for at, (kind, value, yes, no) in enumerate(code)
  )

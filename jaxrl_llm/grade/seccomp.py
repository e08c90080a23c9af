"""The system calls that a sandbox refuses, as the program that the kernel runs at every call.

Refused are memory that no limit counts (memfd, System V, message queues), looking into other processes, mounts and
namespaces, and what kernels had most of their flaws in. Number of a call and machine: Linux's own headers.
"""

from __future__ import annotations

import errno
import functools
import os
import struct

_REFUSED = (
  *('memfd_create', 'memfd_secret', 'shmget', 'semget', 'msgget', 'mq_open'),
  *('ptrace', 'process_vm_readv', 'process_vm_writev', 'open_by_handle_at'),
  *('unshare', 'setns', 'mount', 'umount2', 'pivot_root'),
  *('fsopen', 'fsmount', 'open_tree', 'move_mount', 'mount_setattr'),
  *('bpf', 'perf_event_open', 'userfaultfd', 'io_uring_setup', 'add_key', 'request_key', 'keyctl'),
)
# Machine → its number among architectures, then those of _REFUSED.
MACHINES = dict(
  x86_64=(
    0xC000003E,
    *(319, 447, 29, 64, 68, 240, 101, 310, 311, 304, 272, 308, 165, 166, 155, 430, 432, 428, 429),
    *(442, 321, 298, 323, 425, 248, 249, 250),
  ),
  aarch64=(
    0xC00000B7,
    *(279, 447, 194, 190, 186, 180, 117, 270, 271, 265, 97, 268, 40, 39, 41, 430, 432, 428, 429),
    *(442, 280, 241, 282, 425, 217, 218, 219),
  ),
)

_LOAD, _EQUAL, _ABOVE, _GIVE = 0x20, 0x15, 0x35, 0x06
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000 | errno.EPERM


@functools.cache
def program() -> bytes:
  """Classic BPF: EPERM for what is refused and for all that is not of this machine's own numbering. Source: none."""
  machine, *refused = MACHINES[os.uname().machine]
  fail = len(refused) + 5  # the number of the last line, where it fails; the line before it allows
  lines = [(_LOAD, 0, 0, 4), (_EQUAL, 0, fail - 2, machine), (_LOAD, 0, 0, 0)]
  lines.append((_ABOVE, fail - 4, 0, 0x40000000))  # x86's other numbering
  for number in refused:
    lines.append((_EQUAL, fail - 1 - len(lines), 0, number))
  lines += [(_GIVE, 0, 0, _ALLOW), (_GIVE, 0, 0, _FAIL)]
  return b''.join(struct.pack('=HBBI', *line) for line in lines)

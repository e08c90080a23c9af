"""The command of both sandboxes: `program`, or `tests VERDICT`, connected by stdin and stdout."""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
  """Move the pipes to private descriptors and run one of the two sides."""
  sys.set_int_max_str_digits(0)
  read, write = os.fdopen(os.dup(0), 'rb'), os.fdopen(os.dup(1), 'wb')
  null = os.open('/dev/null', os.O_RDWR)
  for stream in (0, 1, 2):  # output that bypasses sys.stdout is dropped
    os.dup2(null, stream)
  if sys.argv[1] == 'program':
    from jaxrl_llm.rewards.code_execution.guest_protocol import program_peer

    sys.stdout = program_peer.captured_stream()
    with open('/box/answer.py', 'rb') as file:
      source = file.read()
    program_peer.ProgramPeer(read, write).run(source)
    return
  from jaxrl_llm.rewards.code_execution.guest_protocol import tests_peer, tests_runner

  with open('/box/job.json') as file:
    job = json.load(file)
  with os.fdopen(int(sys.argv[2]), 'w') as verdict:
    tests_runner.write_verdict(tests_peer.TestsPeer(read, write), job, verdict)


if __name__ == '__main__':
  main()

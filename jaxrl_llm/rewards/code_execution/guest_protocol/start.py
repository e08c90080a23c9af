"""The command of both sandboxes: `answer`, or `tests VERDICT`, each with stdin and stdout tied to the other's."""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
  """Takes the pipes away from the program, and runs one of the two sides."""
  sys.set_int_max_str_digits(0)
  read, write = os.fdopen(os.dup(0), 'rb'), os.fdopen(os.dup(1), 'wb')
  null = os.open('/dev/null', os.O_RDWR)
  for stream in (0, 1, 2):  # what is printed past sys.stdout goes nowhere
    os.dup2(null, stream)
  if sys.argv[1] == 'answer':
    from jaxrl_llm.rewards.code_execution.guest_protocol import answer_side

    sys.stdout = answer_side.silent()
    with open('/box/answer.py', 'rb') as file:
      source = file.read()
    answer_side.Answer(read, write).run(source)
    return
  from jaxrl_llm.rewards.code_execution.guest_protocol import link, tests_side

  with open('/box/job.json') as file:
    job = json.load(file)
  with os.fdopen(int(sys.argv[2]), 'w') as verdict:
    tests_side.judge(link.Link(read, write), job, verdict)


if __name__ == '__main__':
  main()

"""Tokens per second and latencies of --mode=serve with 1, 8 and 64 concurrent requests: streams of chat completions.

python -m tests.bench.serving [--model=smollm2-135m --slots=8 --tokens=64] [--write] [--smoke]   needs the extra `serve`
The server is a process of its own on the same machine and shares its cores with this client. Every request has another
question and seed; a concurrency of c sends max(4, 2c) of them from c threads. The time of the first token includes the
queue. `--write` replaces a section of tests/bench/results/serving.md.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent import futures
from typing import NamedTuple

import numpy as np

from tests.bench.lib import results, smoke


class Answer(NamedTuple):
  """Seconds from the request on, and what came."""

  first_s: float
  total_s: float
  prompt_tokens: int
  tokens: int


class Server:
  """`python -m jaxrl_llm.main --mode=serve` of a model as loaded."""

  def __init__(self, model: str, slots: int, log: str):
    command = [sys.executable, '-m', 'jaxrl_llm.main', '--mode=serve', '--base', '--port=0']
    command += ['--config=tiny', f'--config.model={model}', '--config.sft.steps=0']
    command += [f'--slots={slots}'] if slots else []
    with open(log, 'w') as file:
      self.process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    self.banner = ''
    while not (found := re.search(r'serving (\S+) .* at http://127.0.0.1:(\d+)/v1', self.banner)):
      if self.process.poll() is not None:
        raise RuntimeError(f'the server ended: {self.banner}')
      time.sleep(0.05)
      with open(log) as file:
        self.banner = file.read()
    self.name, self.port = found[1], int(found[2])

  def ask(self, number: int, tokens: int) -> Answer:
    """One stream, read to its end."""
    question = f'What is {number} + {3 * number}? Explain how you add the two numbers.'
    body = dict(model=self.name, messages=[dict(role='user', content=question)], seed=number)
    body |= dict(max_tokens=tokens, stream=True, stream_options=dict(include_usage=True))
    began = time.perf_counter()
    connection = http.client.HTTPConnection('127.0.0.1', self.port, timeout=600)
    headers = {'content-type': 'application/json'}
    connection.request('POST', '/v1/chat/completions', json.dumps(body), headers)
    response = connection.getresponse()
    assert response.status == 200, response.read()
    first_s, usage = 0.0, None
    for line in response:
      if line.startswith(b'data: {'):
        event = json.loads(line[6:])
        first_s = first_s or time.perf_counter() - began
        usage = event.get('usage') or usage
    connection.close()
    assert usage is not None
    took = time.perf_counter() - began
    return Answer(first_s, took, usage['prompt_tokens'], usage['completion_tokens'])


def measure(server: Server, concurrent: int, requests: int, tokens: int) -> list[str]:
  """The cells of one row of the table."""
  began = time.perf_counter()
  with futures.ThreadPoolExecutor(concurrent) as pool:
    answers = list(pool.map(lambda i: server.ask(i, tokens), range(1, requests + 1)))
  wall = time.perf_counter() - began
  first = np.array([answer.first_s for answer in answers])
  total = np.array([answer.total_s for answer in answers])
  sampled = sum(answer.tokens for answer in answers)
  spread = lambda x: f'{np.median(x):.2f} and {np.quantile(x, 0.95):.2f}'  # noqa: E731
  return [
    str(concurrent), str(requests), str(sampled), f'{sampled / wall:.0f}', spread(first), spread(total),
  ]  # fmt: skip


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--model', default='smollm2-135m')
  parser.add_argument('--slots', type=int, default=0)
  parser.add_argument('--tokens', type=int, default=64)
  parser.add_argument('--concurrent', type=int, nargs='+', default=[1, 8, 64])
  parser.add_argument('--write', action='store_true', help='write results/serving.md')
  args = smoke.parse(parser, model='scratch', slots=2, tokens=8, concurrent=[1, 4], write=True)
  load = results.load_average()
  with tempfile.TemporaryDirectory() as folder:
    server = Server(args.model, args.slots, os.path.join(folder, 'log'))
    try:
      server.ask(0, 4)
      rows = [measure(server, count, max(4, 2 * count), args.tokens) for count in args.concurrent]
    finally:
      server.process.terminate()
      server.process.wait()
  header = ('concurrent', 'requests', 'tokens', 'tokens/s', 'first token, s', 'whole answer, s')
  table = results.table(header, rows)
  facts = results.facts(('jax', 'starlette', 'uvicorn'), load)
  compiled = '\n'.join(f'> {line}' for line in server.banner.splitlines() if 'serving' not in line)
  section = f'{facts}\n\n{compiled}\n\nMedian and 95th percentile of requests:\n\n{table}'
  print(section, flush=True)
  if args.write:
    file = results.path('serving.md', args.smoke)
    results.write(file, f'{os.path.basename(args.model)}, {args.slots or "default"} slots', section)


if __name__ == '__main__':
  main()

"""Rewards for jobs of tests, by dotted path; a model drawn at random gets them in about half of its answers."""

from __future__ import annotations

import os
import time


def odd(data_source, solution_str, ground_truth, extra_info=None):
  """1 where the code points sum up to an odd number."""
  return float(sum(map(ord, solution_str)) % 2)


def slow(data_source, solution_str, ground_truth, extra_info=None):
  """The same; the first to grade where no file JUDGES is says in it who it is, and takes its time.

  The trial on the first row, whose completions are the answer and '', does not count.
  """
  if solution_str not in ('', ground_truth) and not os.path.exists(os.environ['JUDGES']):
    with open(os.environ['JUDGES'], 'w') as file:
      file.write(str(os.getpid()))
    time.sleep(0.5)
  return odd(data_source, solution_str, ground_truth)


def together(completions, **columns):
  """1 for all. Calls but the trial on the first row end once two have begun, which files in the folder JUDGES tell."""
  folder = os.environ['JUDGES']
  if len(completions) > 2:
    open(os.path.join(folder, str(time.monotonic_ns())), 'w').close()
    while len(os.listdir(folder)) < 2:
      time.sleep(0.01)
  return [1.0] * len(completions)


def quarter(data_source, solution_str, ground_truth, extra_info=None):
  """A dense reward in [0, 0.25]: a quarter of the share of characters that stand where the answer has them."""
  said = solution_str.strip()
  same = sum(a == b for a, b in zip(said, ground_truth, strict=False))
  return 0.25 * same / max(len(said), len(ground_truth))


def quarter_odd(data_source, solution_str, ground_truth, extra_info=None):
  """A dense reward in [0, 0.25] for a model drawn at random, too: a quarter of the share of odd code points."""
  return 0.25 * sum(ord(c) % 2 for c in solution_str) / max(len(solution_str), 1)


def broken(data_source, solution_str, ground_truth, extra_info=None):
  """A reward function with a mistake in it, which the trial on the first row does not show."""
  if solution_str in ('', ground_truth):
    return 0.0
  raise KeyError('no such column')

"""Tools that a turn may call. A turn without a call is the answer: it ends the episode and is graded."""

from __future__ import annotations

import collections
import functools
import json
import math
import re
from collections.abc import Callable

from jaxrl_llm.checkpointing import safe_files
from jaxrl_llm.environments import tool_calls
from jaxrl_llm.environments.protocol import Result
from jaxrl_llm.rewards.code_execution import sandbox
from jaxrl_llm.rewards.parsing.arithmetic import calculate
from jaxrl_llm.types import Row, UserError


class Tool:
  """A function from text to text, called as <tag>…</tag>, without state between turns."""

  remembers = False

  def __init__(self, use: Callable[[str], str], tag: str, argument: str):
    self.use, self.tag, self.argument = use, tag, argument

  def reset(self, row: Row, seed: int) -> None:
    del row, seed

  def step(self, text: str) -> Result:
    try:
      argument = tool_calls.find(text, self.tag, self.argument)
      if argument is None:
        return Result(None, 0.0, True)
      return Result(self.use(argument))
    except ValueError as error:  # caused by the call, not by the tool
      return Result(f'error: {error}')


def calculator(*, tag: str = 'calc') -> Tool:
  """Exact arithmetic on the last <calc>…</calc>: numbers, + − * / // % ** and brackets."""
  return Tool(calculate, tag, 'expression')


def python(
  *, tag: str = 'python', wall_s: float = 4.0, memory_mb: int = 256, most: int = 1000
) -> Tool:
  """Runs the last <python>…</python> as a separate program in the sandbox; the observation is its output.

  The observation is standard output, and standard error after a failure, of which the last `most` characters. Requires
  the sandbox of code rewards.
  """
  for name, value, least in (
    ('wall_s', wall_s, 0.01),
    ('memory_mb', memory_mb, 64),
    ('most', most, 1),
  ):
    if not least <= value < math.inf:
      raise UserError(f'config.environment.{name}={value!r} must be a number of at least {least}.')
  limits = sandbox.Limits(wall_s=wall_s, memory_mb=memory_mb)

  def use(source: str) -> str:
    files = {'program.py': source.encode('utf-8', 'replace')}
    ended = sandbox.run(['/box/program.py'], files=files, limits=limits)
    if ended.outcome != sandbox.DONE:
      raise ValueError(dict(deadline='it took too long').get(ended.outcome, 'it printed too much'))
    output = ended.stdout + (ended.stderr if ended.code else b'')
    return output.decode('utf-8', 'replace').strip()[-most:] or 'no output'

  return Tool(use, tag, 'code')


def search(*, path: str, tag: str = 'search', results: int = 3) -> Tool:
  """The passages of a local JSON lines file, {"text": …, "title": …}, that best match the last <search>…</search>.

  Ranked by Okapi BM25, k₁ = 1.2, b = 0.75. Raises UserError for a file that is missing or contains no passage.
  """
  index = _index(path)
  return Tool(functools.partial(index.observation, results), tag, 'query')


class Index:
  """An inverted index of passages."""

  def __init__(self, passages: list[str]):
    self.passages = passages
    counts = [collections.Counter(_words(text)) for text in passages]
    self.length = [sum(count.values()) for count in counts]
    self.mean = sum(self.length) / len(passages)
    self.postings: dict[str, list[tuple[int, int]]] = collections.defaultdict(list)
    for number, count in enumerate(counts):
      for word, times in count.items():
        self.postings[word].append((number, times))

  def best(self, query: str, results: int) -> list[int]:
    """Σ over the query's words of idf·tf·(k₁ + 1) / (tf + k₁·(1 − b + b·|d|/mean)), idf = ln(1 + (N − n + ½)/(n + ½)).

    Numbers of the passages with the largest scores, at most `results`; passages without a word of the query are left
    out. Ties go to the earlier passage.
    """
    score: dict[int, float] = collections.defaultdict(float)
    for word in set(_words(query)):
      found = self.postings.get(word, ())
      idf = math.log(1 + (len(self.passages) - len(found) + 0.5) / (len(found) + 0.5))
      for number, times in found:
        norm = 1.2 * (0.25 + 0.75 * self.length[number] / self.mean)
        score[number] += idf * times * 2.2 / (times + norm)
    return sorted(score, key=lambda number: (-score[number], number))[:results]

  def observation(self, results: int, query: str) -> str:
    return '\n'.join(self.passages[n] for n in self.best(query, results)) or 'nothing found'


def _words(text: str) -> list[str]:
  return re.findall(r'\w+', text.lower())


@functools.lru_cache(maxsize=4)
def _index(path: str) -> Index:
  where = f'config.environment.path={path!r}'
  try:
    with safe_files.open_regular(path) as file:
      rows = [json.loads(line) for line in file if line.strip()]
    passages = ['\n'.join(filter(None, (row.get('title', ''), row['text']))) for row in rows]
  except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
    raise UserError(
      f'{where} cannot be read ({type(error).__name__}: {error}); give JSON lines of {{"text": …}}.'
    ) from error
  if not any(map(_words, passages)):
    raise UserError(f'{where} holds no word; give JSON lines of {{"text": …}}.')
  return Index(passages)

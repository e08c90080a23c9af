"""A user's agent as it is: it asks for completions at an OpenAI-compatible endpoint, and is run once for each episode.

The only turn of the environment is the run. Its text holds the address and the API key as JSON, and the reward is
posted to the endpoint.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import subprocess
import urllib.request
from collections.abc import Callable

from jaxrl_llm.config import stages
from jaxrl_llm.environments.adapters import Foreign
from jaxrl_llm.environments.protocol import Result
from jaxrl_llm.rewards import adapters as signatures
from jaxrl_llm.types import JsonObject, JsonValue, Row, UserError

REWARD_PATH = '/episodes/reward'
_POST_S = 30.0
_SHOWN = 300  # last characters of stderr in the message of a failed command


class Harness:
  """Runs `run` (the row as a dict → reward or None), with the endpoint in the process's environment variables."""

  remembers = False

  def __init__(self, run: Callable[[JsonObject], JsonValue]):
    self._run = run
    self._row: JsonObject = {}

  def reset(self, row: Row, seed: int) -> None:
    named = dict(id=row.id, question=row.question, messages=list(row.messages), source=row.source)
    named |= dict(seed=seed)  # the same in all rollouts of a group
    self._row = named | signatures.columns(row)

  def step(self, text: str) -> Result:
    address = json.loads(text)
    url, key = address['base_url'], address['api_key']
    # One episode runs in a process at a time. A proxy for the internet does not reach loopback.
    os.environ.update(OPENAI_BASE_URL=url, OPENAI_API_KEY=key, NO_PROXY='*', no_proxy='*')
    reward = self._run(self._row)
    if reward is not None:
      _post(url + REWARD_PATH, key, dict(reward=reward))
    return Result(None, 0.0, True)


def endpoint(*, harness: str = '', command: tuple[str, ...] = ()) -> Harness:
  """An agent that is trained as it is: `harness`='package.module:function', or a `command`; see README.md.

  The function is called with the row as a dict, may be async, and returns the reward or None. The command gets the row
  as JSON on standard input; its last line of output may be the reward as JSON: a number, null or {"reward": …}.

  Raises UserError without exactly one of them, and where the function does not import.
  """
  if bool(harness) == bool(command):
    raise UserError(
      f'config.environment.harness={harness!r} and config.environment.command={tuple(command)!r}: give one of them, '
      "'package.module:function' or the words of a command line."
    )
  if command:
    words = tuple(command)
    return Harness(lambda row: _run_command(words, row))
  function: Callable = stages.imported(harness, f'config.environment.harness={harness!r}')
  return Harness(lambda row: _checked(_awaited(function(row))))


def _run_command(words: tuple[str, ...], row: JsonObject) -> JsonValue:
  """The reward of a command. Raises RuntimeError where it fails."""
  done = subprocess.run(words, input=json.dumps(row).encode(), capture_output=True, check=False)
  if done.returncode:
    shown = done.stderr.decode('utf-8', 'replace').strip()[-_SHOWN:]
    raise RuntimeError(f'the command ended with status {done.returncode}: {shown}')
  lines = done.stdout.decode('utf-8', 'replace').strip().splitlines()
  try:
    value = json.loads(lines[-1]) if lines else None
  except ValueError:  # text that is no reward: it was posted, or the reward function decides
    return None
  if isinstance(value, dict):
    value = value.get('reward')
  return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _checked(value: Foreign) -> JsonValue:
  """The return value of a function. Raises TypeError where it is neither a number nor None."""
  if value is None:
    return None
  try:
    return float(value)
  except (TypeError, ValueError) as error:
    raise TypeError(f'the harness returned {type(value).__name__}, not a number or None') from error


def _awaited(value: Foreign) -> Foreign:
  return asyncio.run(value) if inspect.iscoroutine(value) else value


def _post(url: str, key: str, body: JsonObject) -> None:
  headers = {'content-type': 'application/json', 'authorization': f'Bearer {key}'}
  request = urllib.request.Request(url, json.dumps(body).encode(), headers)
  with urllib.request.urlopen(request, timeout=_POST_S):
    pass

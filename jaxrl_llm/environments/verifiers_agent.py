"""Environments of the package verifiers, trained as they are through the endpoint of a run.

    python -m jaxrl_llm.environments.verifiers_agent '{"id": "my-env"}' rows.jsonl

writes a row for each task. With these, config.environment.harness=jaxrl_llm.environments.verifiers_agent:play runs the
environment's own rollout for each row of a step, and the reward is that of its rubric. See README.md.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import os
import sys
from typing import NamedTuple

from jaxrl_llm.config import user_code
from jaxrl_llm.config.extras import install
from jaxrl_llm.environments.adapters import Foreign
from jaxrl_llm.types import JsonObject, UserError

_MODEL = 'policy'  # the endpoint serves one model under any name
_USAGE = (
  'usage: python -m jaxrl_llm.environments.verifiers_agent ENVIRONMENT_AS_JSON rows.jsonl [ROWS]'
)


class Played(NamedTuple):
  """An episode that is over."""

  reward: float
  error: str  # '' without one


class Classic:
  """An environment that load_environment(id, **args) returns, of verifiers 0.1.11 to 0.3."""

  needs = "verifiers below 0.4: pip install 'verifiers>=0.1.11,<0.4'"

  def __init__(self, env: JsonObject):
    self._package: Foreign = importlib.import_module('verifiers')
    self._environment = self._package.load_environment(env['id'], **env.get('args', {}))
    self._sampling = dict(self._environment.sampling_args) | env.get('sampling', {})

  def questions(self, limit: int | None) -> list[str]:
    prompts = itertools.islice(self._environment.get_dataset(), limit)
    return [_last_text(example['prompt']) for example in prompts]

  async def play(self, task: int, url: str, key_variable: str) -> Played:
    client = self._package.ClientConfig(api_base_url=url, api_key_var=key_variable)
    example = self._environment.get_dataset()[task]
    output = await self._environment.run_rollout(example, client, _MODEL, self._sampling)
    error = output.get('error')
    return Played(output['reward'], error['error_chain_repr'] if error else '')


class Tasks:
  """A taskset with its environment, of the module verifiers.v1 of version 0.4."""

  needs = f'verifiers 0.4: {install("verifiers")}'

  def __init__(self, env: JsonObject):
    self._package: Foreign = importlib.import_module('verifiers.v1')
    self._environment = self._package.load_environment(self._package.resolve_env_config(env))

  def questions(self, limit: int | None) -> list[str]:
    taskset = self._environment.taskset
    if limit is None and not taskset.bounded:
      raise UserError('the taskset has no end: give the number of rows as a third argument.')
    return [task.data.prompt_text or '?' for task in itertools.islice(taskset, limit)]

  async def play(self, task: int, url: str, key_variable: str) -> Played:
    client = self._package.EvalClientConfig(base_url=url, api_key_var=key_variable)
    (chosen,) = self._environment.taskset.include(idx=[task])
    async with self._environment.serving():
      episode = await self._environment.run_episode(
        chosen, self._package.ModelContext(_MODEL, client)
      )
    traces = episode.traces
    errors = [*episode.errors, *(error for trace in traces for error in trace.errors)]
    if errors or not episode.ok:
      return Played(0.0, f'{errors[0].type}: {errors[0].message}' if errors else 'not ok')
    if len(traces) > 1:  # requests of several agents are no single conversation
      return Played(0.0, f'{len(traces)} agents took part, and one can be trained')
    return Played(traces[0].reward, '')


async def play(row: JsonObject) -> float:
  """The reward of one episode of a row's task, as verifiers adds it up.

  Raises RuntimeError where verifiers reports an error, and what the environment's own code raises.
  """
  environment = _load(json.dumps(row['env']))
  played = await environment.play(row['task'], os.environ['OPENAI_BASE_URL'], 'OPENAI_API_KEY')
  if played.error:
    raise RuntimeError(f'the episode of verifiers failed ({played.error})')
  return played.reward


def rows(env: JsonObject, limit: int | None = None) -> list[JsonObject]:
  """A row for each of the first `limit` tasks of an environment. Raises UserError where it does not load."""
  texts = _load(json.dumps(env)).questions(limit)
  source = env.get('taskset', env)['id']
  return [dict(question=text, data_source=source, env=env, task=n) for n, text in enumerate(texts)]


@functools.lru_cache(maxsize=4)
def _load(env: str) -> Classic | Tasks:
  """The environment of a JSON object, loaded once in a process. Raises UserError where it does not load."""
  settings = json.loads(env)
  form = Tasks if 'taskset' in settings else Classic
  try:
    return form(settings)
  except Exception as error:  # of verifiers, or of the environment's own code
    raise UserError(
      f'verifiers does not load the environment {env} ({user_code.describe(error)}); install its package and '
      f'{form.needs}, or correct the settings.'
    ) from error


def _last_text(messages: Foreign) -> str:
  """The text of the last message; '?' without one."""
  content = messages if isinstance(messages, str) else messages[-1]['content']
  if not isinstance(content, str):  # parts, some of which are text
    content = ' '.join(part.get('text') or '' for part in content)
  return content or '?'


def main(arguments: list[str]) -> None:
  """Write the rows of an environment. Exits with a sentence where it does not load."""
  if len(arguments) not in (2, 3):
    sys.exit(_USAGE)
  env, path, *limit = arguments
  try:
    lines = [json.dumps(row) for row in rows(json.loads(env), *map(int, limit))]
  except UserError as error:
    sys.exit(str(error))
  except ValueError as error:  # of JSON, or of the number
    sys.exit(f'{error}; {_USAGE}')
  with open(path, 'w') as file:
    file.writelines(f'{line}\n' for line in lines)


if __name__ == '__main__':
  main(sys.argv[1:])

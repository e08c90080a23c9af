"""Two environments with OpenEnv's own classes: `python openenv_server.py NAME PORT` serves one."""

from __future__ import annotations

import sys

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.types import Action, Observation, State

SESSIONS = 3


class Echoed(Observation):
  echo: str = ''
  length: int = 0


class Message(Action):
  message: str
  loud: bool = False


class Echo(Environment):
  """Pays the length of a message; 'stop' ends, 'fail' raises."""

  SUPPORTS_CONCURRENT_SESSIONS = True
  start = ''

  def reset(self, seed=None, episode_id=None, start='', **_):
    self.start = start
    return Echoed(echo=f'{start}{seed}', length=0, metadata=dict(id=episode_id), reward=None)

  def step(self, action, timeout_s=None, **_):
    if action.message == 'fail':
      raise RuntimeError('no such room')
    text = self.start + (action.message.upper() if action.loud else action.message)
    return Echoed(echo=text, length=len(text), reward=len(text), done=action.message == 'stop')

  @property
  def state(self):
    return State()


class Sums(MCPEnvironment):
  """A tool that adds; each call pays 0.5."""

  SUPPORTS_CONCURRENT_SESSIONS = True

  def __init__(self):
    server = FastMCP('sums')

    @server.tool
    def add(a: int, b: int = 40) -> int:
      """Adds two numbers."""
      if a < 0:
        raise ValueError('a negative number')
      return a + b

    super().__init__(server)

  def reset(self, seed=None, episode_id=None, **_):
    return Observation(metadata=dict(message='ready'))

  def _step_impl(self, action, timeout_s=None, **_):
    return Observation()

  async def step_async(self, action, timeout_s=None, **others):
    observation = await super().step_async(action, timeout_s, **others)
    observation.reward = 0.5
    return observation

  @property
  def state(self):
    return State()


if __name__ == '__main__':
  environment, action = dict(echo=(Echo, Message), sums=(Sums, Action))[sys.argv[1]]
  app = create_fastapi_app(environment, action, Observation, max_concurrent_envs=SESSIONS)
  uvicorn.run(app, host='127.0.0.1', port=int(sys.argv[2]), log_level='warning')

"""A taskset of verifiers with its environment and harness, as their author would write them."""

from __future__ import annotations

import openai
import verifiers.v1 as vf

__all__ = ['EvenEnv', 'EvenHarness', 'EvenTaskset']


class EvenTask(vf.Task[vf.TaskData]):
  @vf.reward(weight=2.0)
  async def even(self, trace: vf.Trace) -> float:
    """The share of even characters in all answers."""
    text = ''.join(message.content or '' for message in trace.assistant_messages)
    return sum(ord(c) % 2 == 0 for c in text) / max(len(text), 1)

  @vf.reward(weight=0.25)
  async def known(self, trace: vf.Trace) -> float:
    return 1.0


class EvenConfig(vf.EnvConfig):
  player: vf.AgentConfig = vf.AgentConfig(runtime={'type': 'subprocess'})


class EvenEnv(vf.Env[EvenConfig]):
  """Two turns, the second of which fails in some tasks."""

  async def run(self, task, agents):
    async with agents.player.interaction(task) as interaction:
      await interaction.turn()
      if task.data.prompt == 'raises':
        raise RuntimeError('no such tool')
      if task.data.prompt == 'reports':
        raise vf.ToolsetError('the tool is gone')
      await interaction.turn('again')


class EvenHarness(vf.Harness[vf.HarnessConfig]):
  """Makes its request in the process of the environment."""

  SUPPORTS_RESUME = True
  EXECUTES_CODE = NEEDS_CONTAINER = False

  async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
    _, prompt = self.resolve_prompt(data)
    if isinstance(prompt, str):
      messages = [dict(role='user', content=prompt)]
    else:
      messages = [dict(role=m.role, content=m.content) for m in prompt]
    async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
      await client.chat.completions.create(model=ctx.model, messages=messages)
    return vf.ProgramResult(0, '', '')


class EvenTaskset(vf.Taskset[EvenTask]):
  def load(self):
    for question in ('12', 'raises', '345', 'reports'):
      yield EvenTask(vf.TaskData(prompt=question), self.config.task)

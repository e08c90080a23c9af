"""Stands for the module verifiers.v1: the part of its interface that the agent touches, around an even taskset."""

from __future__ import annotations

import contextlib
import itertools
import os
from types import SimpleNamespace
from typing import NamedTuple

import openai


class EvalClientConfig(SimpleNamespace):
  pass


class ModelContext(NamedTuple):
  model: str
  client: EvalClientConfig


class Tasks(list):
  bounded = True

  def include(self, idx):
    return [self[n] for n in idx]


class Env:
  def __init__(self, config):
    self.taskset, self.sampling = Tasks(), config['player']['sampling']
    self.served = False
    for question in ('12', 'raises', '345', 'reports'):
      data = SimpleNamespace(prompt=question, prompt_text=question)
      self.taskset.append(SimpleNamespace(data=data))

  @contextlib.asynccontextmanager
  async def serving(self):
    self.served = True
    yield
    self.served = False

  async def run_episode(self, task, context):
    assert self.served
    prompt = task.data.prompt
    trace = SimpleNamespace(errors=[], reward=0.0)
    episode = SimpleNamespace(errors=[], traces=[trace], ok=True)
    url, key = context.client.base_url, os.environ[context.client.api_key_var]
    messages, answers = [dict(role='user', content=prompt)], []
    async with openai.AsyncOpenAI(base_url=url, api_key=key) as served:
      for turn in itertools.count():
        answer = await served.chat.completions.create(
          model=context.model, messages=messages, **self.sampling
        )
        answers.append(answer.choices[0].message.content or '')
        if turn:
          break
        if prompt in ('raises', 'reports'):
          error = SimpleNamespace(type='EnvError', message='no such tool')
          episode.errors, episode.ok = [error], False
          return episode
        messages += [dict(role='assistant', content=answers[0])]
        messages += [dict(role='user', content='again')]
    text = ''.join(answers)
    trace.reward = 2 * sum(ord(c) % 2 == 0 for c in text) / max(len(text), 1) + 0.25
    return episode


def resolve_env_config(data):
  assert data['taskset']['id'] == 'even-taskset'
  return data


def load_environment(config):
  return Env(config)

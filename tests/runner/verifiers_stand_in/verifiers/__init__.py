"""Stands for the package verifiers before 0.4: the part of its interface that even_env.py and the agent touch."""

from __future__ import annotations

import importlib
import inspect
import os
from types import SimpleNamespace

import openai


class ToolError(Exception):
  pass


class ClientConfig(SimpleNamespace):
  pass


class Rubric:
  def __init__(self, funcs, weights):
    self.funcs, self.weights = funcs, weights

  async def score_rollout(self, state):
    state['reward'] = 0.0
    for function, weight in zip(self.funcs, self.weights, strict=True):
      score = function(**{name: state[name] for name in inspect.signature(function).parameters})
      state['reward'] += weight * (await score if inspect.iscoroutine(score) else score)


class MultiTurnEnv:
  def __init__(self, dataset, rubric, max_turns, sampling_args):
    self.rubric, self.max_turns = rubric, max_turns
    self.sampling_args = dict(n=1, extra_body={}) | sampling_args
    self._dataset = [
      row | dict(prompt=[dict(role='user', content=row['question'])], example_id=n)
      for n, row in enumerate(dataset)
    ]

  def get_dataset(self):
    return self._dataset

  async def run_rollout(self, input, client, model, sampling_args):
    state = input | dict(completion=[], error=None)
    url, key = client.api_base_url, os.environ[client.api_key_var]
    try:
      async with openai.AsyncOpenAI(base_url=url, api_key=key) as served:
        for turn in range(self.max_turns):
          messages = input['prompt'] + state['completion']
          if turn:
            state['completion'] += await self.env_response(messages, state)
          answer = await served.chat.completions.create(
            model=model, messages=input['prompt'] + state['completion'], **sampling_args
          )
          message = dict(role='assistant', content=answer.choices[0].message.content)
          state['completion'] += [message]
    except ToolError as error:
      state['error'] = dict(error='ToolError', error_chain_repr=repr(error))
    await self.rubric.score_rollout(state)
    return {name: state[name] for name in ('completion', 'reward', 'error')}


def load_environment(env_id, **env_args):
  return importlib.import_module(env_id.replace('-', '_')).load_environment(**env_args)

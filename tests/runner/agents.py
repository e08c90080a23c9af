"""Agents written against OpenAI's client, as their authors would: they know nothing of the trainer."""

from __future__ import annotations

import json
import os
import pathlib
import sys
import time
import urllib.request

import openai

FAILING = '3'  # digits of a question that decide what `fragile` does
HANGING = '7'


def asks_twice(row):
  """Two turns of a chat; the reward is the share of even characters in the answers. Writes down what it got."""
  client = openai.OpenAI()
  messages = [dict(role='user', content=row['question'])]
  answers, got = [], []
  for _ in range(2):
    answer = client.chat.completions.create(
      model='gpt-4o',
      messages=messages,
      max_tokens=5,
      temperature=0.2,
      extra_body=dict(return_token_ids=True),
    )
    choice = answer.choices[0]
    answers.append(choice.message.content or '')
    got.append(choice.model_extra)
    messages += [dict(role='assistant', content=answers[-1]), dict(role='user', content='again')]
  text = ''.join(answers)
  reward = sum(ord(c) % 2 == 0 for c in text) / max(len(text), 1)
  path = pathlib.Path(os.environ['AGENT_LOG']) / f'{client.api_key}.json'
  path.write_text(json.dumps(dict(got=got, reward=reward)))
  return reward


def forgets(row):
  """Its second request leaves the first answer out."""
  client = openai.OpenAI()
  for text in (row['question'], 'anew'):
    answer = client.completions.create(model='any', prompt=text, max_tokens=4)
  return float(len(answer.choices[0].text) % 2)


def fragile(row):
  """Raises, kills its process or hangs after its first request, or before it; else returns no reward."""
  which = os.environ.get('FRAGILE') or row['question']
  if 'silent' in which:
    time.sleep(3600)
  client = openai.OpenAI()
  client.completions.create(model='any', prompt=row['question'], max_tokens=3)
  if FAILING in which:
    raise RuntimeError('no such tool')
  if HANGING in which:
    time.sleep(3600)
  if '5' in which:
    os.abort()
  return None


def command() -> None:
  """A program of its own: the row on standard input, the reward as the last line, or posted where the row says so."""
  row = json.load(sys.stdin)
  url, key = os.environ['OPENAI_BASE_URL'], os.environ['OPENAI_API_KEY']

  def post(path, **body):
    headers = {'content-type': 'application/json', 'authorization': f'Bearer {key}'}
    request = urllib.request.Request(url + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as response:
      return json.load(response)

  completion = post('/completions', model='any', prompt=row['question'], max_tokens=3)
  if row['question'] == 'post':
    post('/episodes/reward', reward=0.25)
    print('done')
  else:
    print(completion['choices'][0]['text'])
    print(json.dumps(dict(reward=0.75)))


if __name__ == '__main__':
  command()

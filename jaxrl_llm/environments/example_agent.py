"""An agent as its author may have it, written against OpenAI's client: configs/agents/harness.py trains it."""

from __future__ import annotations

import random

_GUESSES = 5


def guesses(row: dict) -> float:
  """Plays number guessing, as `games.guess` does, in a chat: 1 for the secret number within five guesses, else 0."""
  import openai

  client = openai.OpenAI()  # reads OPENAI_BASE_URL and OPENAI_API_KEY
  secret = random.Random(row['seed']).randint(row['low'], row['high'])
  messages = [dict(role='user', content=row['question'])]
  for _ in range(_GUESSES):
    answer = client.chat.completions.create(model='gpt-4o-mini', messages=messages, max_tokens=4)
    text = answer.choices[0].message.content or ''
    if text == str(secret):
      return 1.0
    hint = '?' if not text.isdecimal() else '^' if int(text) < secret else 'v'
    messages += [dict(role='assistant', content=text), dict(role='user', content=hint)]
  return 0.0

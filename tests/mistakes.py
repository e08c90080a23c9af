"""Mistakes of new users and the answers to them: mistakes.jsonl, which test_mistakes.py tries and users read.

python tests/mistakes.py          writes the list into jaxrl_llm/config/README.md
"""

from __future__ import annotations

import json
import pathlib
import shlex
from typing import NamedTuple

README = pathlib.Path(__file__).parents[1] / 'jaxrl_llm' / 'config' / 'README.md'
LIST = pathlib.Path(__file__).with_suffix('.jsonl')
_MARK = '<!-- The rest is written by tests/mistakes.py. -->\n'


class Mistake(NamedTuple):
  """A command with a mistake."""

  group: str  # a key of STARTS
  typed: str  # the words after `jaxrl-llm`, as in a shell
  answer: str  # the message; … stands for any text
  without: str = ''  # a package that is not installed

  @property
  def argv(self) -> list[str]:
    """The arguments of the command."""
    return shlex.split(f'{STARTS[self.group]} {self.typed}')


_ROWS = [dict(question=f'{n}+1=', answer=str(n + 1)) for n in range(120)]


def _lines(rows: list[dict]) -> str:
  return ''.join(json.dumps(row) + '\n' for row in rows)


_LLAMA = dict(
  model_type='llama', architectures=['LlamaForCausalLM'], vocab_size=32, hidden_size=16, num_hidden_layers=1,
  num_attention_heads=2, num_key_value_heads=1, intermediate_size=32, max_position_embeddings=64,
  rms_norm_eps=1e-5, tie_word_embeddings=True,
)  # fmt: skip
_MY_TASK = """
import math


def closeness(completions, answer, **columns):
  return [1.0 for _ in completions]


def unnamed(x):
  return 1.0


def divides(completions, **columns):
  return [1 / 0 for _ in completions]


def not_a_number(completions, **columns):
  return [math.nan for _ in completions]


def one_score(completions, **columns):
  return []


def words(completions, **columns):
  return ['good' for _ in completions]


def of_level(completions, level, **columns):
  return [1.0 for _ in completions]


class Guess:
  def reset(self, row, seed):
    pass
"""
# The folder in which the commands are typed: path → content. Beside it `run` is a run directory of 6 steps.
FILES = {
  'rows.jsonl': _lines(_ROWS),
  'few.jsonl': _lines(_ROWS[:5]),
  'empty.jsonl': '',
  'array.json': json.dumps(_ROWS),
  'rows.csv': 'question,answer\n1+1=,2\n',
  'broken.jsonl': _lines(_ROWS[:2]) + '{"question": "1+1=", "answer": 2\n',
  'texts.jsonl': _lines([dict(text='1+1=', label='2')]),
  'questions.jsonl': _lines([dict(question='1+1=')]),
  'words.jsonl': _lines([row | dict(answer='many') for row in _ROWS]),
  'table.parquet': 'PAR1',
  'my_task.py': _MY_TASK,
  'my_config.py': "def get_config():\n  return dict(base='tiny', stpes=10)\n",
  'my_base.py': "def get_config():\n  return dict(base='tinny')\n",
  'plain.py': 'config = dict(steps=10)\n',
  'broken.py': 'def get_config():\n  return dict(steps=10\n',
  'nothing.py': 'def get_config():\n  dict(steps=10)\n',
  'llama/config.json': json.dumps(_LLAMA),
  'llama_bin/config.json': json.dumps(_LLAMA),
  'llama_bin/pytorch_model.bin': '',
  'gpt/config.json': json.dumps(dict(model_type='gpt2')),
  'weights/model.safetensors': '',
  'model.gguf': 'not a model',
  'notes.txt': '',
  'results/old.txt': '',
}

# The kinds of mistakes, and the words that commands of a kind begin with.
STARTS = {
  'Flags': '--config=tiny',
  'Config files': '',
  'Values': '--config=tiny',
  'Devices and processes': '--config=tiny',
  'Rows': '--config=tiny --config.data.source=jsonl',
  'Reward functions and environments': '--config=tiny',
  'Missing packages': '',
  'Models': '--config=tiny',
  'Run directories': '',
}


def read() -> list[Mistake]:
  """The mistakes of mistakes.jsonl."""
  return [Mistake(**json.loads(line)) for line in LIST.read_text().splitlines()]


def page() -> str:
  """The README of jaxrl_llm/config with the list."""
  lines = [README.read_text().partition(_MARK)[0] + _MARK]
  for group, start in STARTS.items():
    lines += [f'### {group}', '']
    lines += [f'Commands begin with `{start}`.', ''] if start else []
    lines += ['| typed | answer |', '|---|---|']
    for mistake in read():
      if mistake.group == group:
        without = f', without {mistake.without}' if mistake.without else ''
        lines.append(f'| {_code(mistake.typed)}{without} | {_code(mistake.answer)} |')
    lines.append('')
  return '\n'.join(lines)


def _code(text: str) -> str:
  escaped = text.replace('|', '\\|')
  return f'`{escaped}`'


if __name__ == '__main__':
  README.write_text(page())

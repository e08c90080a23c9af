"""The README.md of an exported model: what it was trained on, its accuracy, and how it is asked."""

from __future__ import annotations

import json
import os

from jaxrl_llm.config.schema import Config
from jaxrl_llm.data import pipeline
from jaxrl_llm.types import Row

# How a model is loaded, by library. An adapter has no tokenizer of its own.
_LOADING = dict(
  transformers="""from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained({name!r})
tokenizer = AutoTokenizer.from_pretrained({name!r})""",
  peft="""from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer

model = AutoPeftModelForCausalLM.from_pretrained({name!r})
tokenizer = AutoTokenizer.from_pretrained({base!r})""",
)
# How a question is put to the model, with the chat template and without it.
_CHAT = """  messages = [{}]
  inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors='pt', return_dict=True)"""
_TEXT = """  inputs = tokenizer({}, return_tensors='pt')"""


def model_card(
  config: Config, step: int, name: str, library: str = 'transformers', accuracy: str = ''
) -> str:
  """The README.md of a model trained for `step` steps, to be loaded with `library`; `accuracy` is a table."""
  hub = hub_name(config.model)
  head = f'library_name: {library}\n' + (f'base_model: {hub}\n' if hub else '')
  paths = [str(file.get('path', '')) for file in config.data.files]
  if datasets := [path.removeprefix('hub:') for path in paths if path.startswith('hub:')]:
    head += f'datasets: {json.dumps(datasets)}\n'
  tasks = [str(task.get('name', '')) for task in config.data.tasks]
  rows = ', '.join(f'`{x}`' for x in dict.fromkeys((config.data.path, *paths, *tasks)) if x)
  objective = config.objective
  stages = objective.advantage.fn, objective.trust_region.fn, objective.aggregation.fn
  parts = (
    f'---\n{head}pipeline_tag: text-generation\ntags: [reinforcement-learning, jaxrl_llm]\n---',
    f'# {name}',
    f'`{config.model}` after {step} steps of reinforcement learning with verifiable rewards (jaxrl_llm), '
    f'{config.prompts} prompts × {config.rollouts} rollouts a step, rewards by `{config.rewards.fn}`.',
    f'* Method: advantage `{stages[0]}`, trust region `{stages[1]}`, aggregation `{stages[2]}`\n'
    f'* Data: source `{config.data.source}`{": " if rows else ""}{rows}',
    accuracy,
    f'A question is put as in training, and answered greedily:\n\n```python\n{_usage(config, name, library)}\n```',
    f'The whole configuration:\n\n```json\n{config.to_json(indent=2, sort_keys=True)}\n```',
  )
  return '\n\n'.join(part for part in parts if part) + '\n'


def _usage(config: Config, name: str, library: str) -> str:
  """Code that defines answer(question)."""
  row = Row('', '{question}', (), '', '', {})
  rendered = pipeline.render(row, config.data)
  if isinstance(rendered, str):
    inputs = _TEXT.format(_with_question(rendered))
  else:
    messages = (
      f"{{'role': {m['role']!r}, 'content': {_with_question(m['content'])}}}" for m in rendered
    )
    inputs = _CHAT.format(', '.join(messages))
  loading = _LOADING[library].format(name=name, base=config.model)
  return f"""{loading}


def answer(question):
{inputs}
  tokens = model.generate(**inputs, max_new_tokens={config.completion_tokens}, do_sample=False)
  return tokenizer.decode(tokens[0, inputs['input_ids'].shape[1] :], skip_special_tokens=True)"""


def _with_question(text: str) -> str:
  """An expression of `text` with the value of `question` in place of {question}."""
  parts = (repr(part) if part else '' for part in text.split('{question}'))
  return ' + question + '.join(parts).removeprefix(' + ').removesuffix(' + ')


def hub_name(name: str) -> str:
  """`name` if it is a hub name and not a path, else ''."""
  return name if '/' in name and not os.path.exists(name) else ''

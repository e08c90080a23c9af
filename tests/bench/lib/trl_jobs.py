"""Shared parts of the benchmarks against TRL: the exported model, prompts with equal token ids, TRL's settings."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

from tests.bench.lib import smoke


def export_model(folder: pathlib.Path, is_tiny: bool):
  """Writes folder/model in float32, which both sides load; returns the model.

  Tiny: the smallest model, of random weights, with a tokenizer of characters.
  """
  from jaxrl_llm import models
  from jaxrl_llm.config import loading
  from jaxrl_llm.models import default_model, export

  if is_tiny:
    sizes = [f'--config.{field}' for field in smoke.TINY if field.startswith('scratch.')]
    model = models.load('scratch', scratch=loading.load('', sizes).scratch)
  else:
    model = models.load(default_model.NAME)
  export.save(str(folder / 'model'), model, dtype='float32')
  return model


def check_token_ids(folder: pathlib.Path, prompts: Sequence[Any], ids: Iterable) -> None:
  """Raises SystemExit unless transformers encodes each prompt, text or messages, to the same token ids."""
  import transformers

  tokenizer = transformers.AutoTokenizer.from_pretrained(folder / 'model')
  for prompt, expected in zip(prompts, ids, strict=True):
    if isinstance(prompt, str):
      found = tokenizer(prompt)['input_ids']
    else:
      chat = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)
      found = chat['input_ids']
    if list(found) != list(expected):
      raise SystemExit(
        f'transformers encodes the prompt {prompt!r} as {list(found)}, and jaxrl_llm as {list(expected)}: the two '
        'sides would not do the same job. Check the chat template and tokenizer files of the exported model.'
      )


def grpo_config(folder: pathlib.Path, rows: int, microbatch: int, **changes: Any):
  """TRL's GRPOConfig for `rows` rollouts a generation batch, on the CPU in float32, without logs or checkpoints.

  AdamW as in jaxrl_llm.config.schema.OptimizerConfig; no KL term, no gradient checkpointing, temperature 1.
  """
  import trl

  settings = dict(
    output_dir=str(folder / 'trl'),
    per_device_train_batch_size=microbatch,
    gradient_accumulation_steps=rows // microbatch,
    temperature=1.0,
    beta=0.0,
    adam_beta1=0.9,
    adam_beta2=0.95,
    max_grad_norm=1.0,
    gradient_checkpointing=False,
    bf16=False,
    use_cpu=True,
    logging_strategy='no',
    save_strategy='no',
    report_to='none',
    disable_tqdm=True,
  )
  return trl.GRPOConfig(**settings | changes)


def load_trl_model(folder: pathlib.Path):
  """(model, tokenizer) of transformers, from folder/model."""
  import torch
  import transformers

  path = folder / 'model'
  model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
  return model, transformers.AutoTokenizer.from_pretrained(path)


def text_of(completion: Any) -> str:
  """The text of a completion as reward functions of TRL get it: text, or a list of one message."""
  return completion if isinstance(completion, str) else completion[0]['content']

"""A model as a Hugging Face folder, which `transformers` and every server of it load."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.flax

from jaxrl_llm.checkpointing import safe_files
from jaxrl_llm.models import families, huggingface
from jaxrl_llm.models.model_folder import read_json
from jaxrl_llm.types import Model, ModelConfig, UserError

DTYPES = ('bfloat16', 'float16', 'float32')
_ARCHITECTURES = dict(
  llama='LlamaForCausalLM',
  mistral='MistralForCausalLM',
  qwen2='Qwen2ForCausalLM',
  qwen3='Qwen3ForCausalLM',
  qwen3_moe='Qwen3MoeForCausalLM',
  smollm3='SmolLM3ForCausalLM',
  olmo2='Olmo2ForCausalLM',
  gemma2='Gemma2ForCausalLM',
  gemma3_text='Gemma3ForCausalLM',
)
# Of the folder that the model came from; what is not there is made.
_TOKENIZER = (
  'tokenizer.json',
  'tokenizer_config.json',
  'special_tokens_map.json',
  'added_tokens.json',
  'chat_template.jinja',
  'generation_config.json',
)


def save(
  folder: str,
  model: Model,
  *,
  dtype: str = 'bfloat16',
  card: str = '',
  shard_bytes: int = 5 * 10**9,
) -> str:
  """Writes config.json, safetensors of at most `shard_bytes` each, the tokenizer and README.md; returns `folder`.

  Raises UserError as `begun` does. Source: none.
  """
  with staged_folder(folder, dtype, card) as part:
    write_json(part, 'config.json', _raw(model, dtype))
    _weights(part, model, dtype, shard_bytes)
    _tokenizer(part, model)
  return folder


@contextlib.contextmanager
def staged_folder(folder: str, dtype: str, card: str) -> Iterator[str]:
  """Gives `folder`.part to be filled; with README.md it becomes `folder` when all is written.

  Raises UserError for what is no empty folder and can be none, and a dtype that there is not. Source: none.
  """
  if dtype not in DTYPES:
    raise UserError(f'--dtype={dtype!r} is unknown; choose one of: {", ".join(DTYPES)}.')
  if why := safe_files.folder_write_problem(folder):
    raise UserError(
      f'--to={folder!r} cannot be written: {why}; name a folder that is empty, or that is not there.'
    )
  part = f'{folder.rstrip(os.sep)}.part'
  shutil.rmtree(part, ignore_errors=True)
  os.makedirs(part)
  yield part
  readme = os.path.join(part, 'README.md')
  with open(readme, 'w', encoding='utf-8') as file:
    file.write(card or f'# {os.path.basename(folder)}\n')
  for name in os.listdir(part):  # safetensors lets the owner alone read what it writes
    shutil.copymode(readme, os.path.join(part, name))
  if os.path.isdir(folder):
    os.rmdir(folder)
  os.rename(part, folder)


def model_card(config: Any, step: int, name: str, library: str = 'transformers') -> str:
  """README.md of what `config`, a whole configuration, made in `step` steps, for those who load it with `library`.

  Source: none.
  """
  hub = hub_name(config.model)
  told = f'base_model: {hub}\n' if hub else ''
  return (
    f'---\nlibrary_name: {library}\n{told}pipeline_tag: text-generation\ntags: [reinforcement-learning, '
    f'jaxrl_llm]\n---\n\n# {name}\n\n`{config.model}` after {step} steps of reinforcement learning with verifiable '
    f'rewards (jaxrl_llm), {config.prompts} prompts × {config.rollouts} rollouts a step, rewards by '
    f'`{config.rewards.fn}`. The whole configuration:\n\n```json\n{config.to_json(indent=2, sort_keys=True)}\n```\n'
  )


def hub_name(name: str) -> str:
  """config.model where it is a name of the hub, else ''. Source: none."""
  return name if '/' in name and not os.path.exists(name) else ''


def _raw(model: Model, dtype: str) -> dict[str, Any]:
  """config.json: that of the model's own folder, or one made of its ModelConfig."""
  own = read_json(model.name, 'config.json') if os.path.isdir(model.name) else {}
  if isinstance(
    own.get('text_config'), dict
  ):  # of a model of text and images the decoder alone is kept
    own = own['text_config'] | dict(model_type='gemma3_text')
  raw = own or hugging_face_config(model.config)
  kind = raw['model_type']
  # Older readers look for torch_dtype.
  return raw | dict(architectures=[_ARCHITECTURES[kind]], dtype=dtype, torch_dtype=dtype)


def hugging_face_config(config: ModelConfig) -> dict[str, Any]:
  """What config.json says of such a model, for families that differ from Llama by flags alone. Source: none."""
  c, kind = config, config.family
  raw = dict(
    model_type=kind,
    vocab_size=c.vocab,
    hidden_size=c.width,
    num_hidden_layers=c.layers,
    num_attention_heads=c.heads,
    num_key_value_heads=c.kv_heads,
    head_dim=c.head_dim,
    intermediate_size=c.mlp,
    max_position_embeddings=c.max_tokens,
    rope_theta=c.rope_theta,
    rms_norm_eps=c.norm_eps,
    hidden_act='silu',
    tie_word_embeddings=c.tied,
  )
  raw |= dict(rope_scaling=dict(c.rope_scaling)) if c.rope_scaling else {}
  if kind == 'llama':
    raw |= dict(attention_bias=c.qkv_bias, mlp_bias=c.mlp_bias)
  if kind == 'qwen3':
    raw |= dict(attention_bias=c.qkv_bias)
  if families.read(raw, 'export') != config:
    raise UserError(
      f'a model of family {kind!r} that was not read from a Hugging Face folder cannot be written as one; load it '
      'from its folder.'
    )
  return raw


def named_tensors(model: Model) -> Iterator[tuple[str, np.ndarray]]:
  """Every tensor by its name in Hugging Face's files, matrices [out, in]. Source: none."""
  for path, leaf in jax.tree_util.tree_leaves_with_path(model.params):
    ours = '/'.join(str(k.key) for k in path)
    theirs = huggingface.hugging_face_name(ours, model.config)
    value = np.asarray(leaf)
    if ours.endswith('scale'):
      value = value - np.float32(families.norm_offset(model.config))
    if ours.endswith('kernel'):
      value = value.swapaxes(-1, -2)
    if '{}' in theirs:
      yield from ((theirs.format(e), expert) for e, expert in enumerate(value))
    else:
      yield theirs, value


def _weights(folder: str, model: Model, dtype: str, shard_bytes: int) -> None:
  groups, room = [], 0
  for name, value in named_tensors(model):
    size = value.size * jnp.dtype(dtype).itemsize
    if not groups or size > room:
      groups.append([])
      room = shard_bytes
    groups[-1].append((name, value))
    room -= size
  where, total = {}, 0
  for index, group in enumerate(groups):
    file = 'model.safetensors'
    if len(groups) > 1:
      file = f'model-{index + 1:05}-of-{len(groups):05}.safetensors'
    cast = {name: jnp.asarray(value, dtype) for name, value in group}
    safetensors.flax.save_file(cast, os.path.join(folder, file), metadata=dict(format='pt'))
    where |= dict.fromkeys(cast, file)
    total += sum(x.nbytes for x in cast.values())
  if len(groups) > 1:
    index = dict(metadata=dict(total_size=total), weight_map=where)
    write_json(folder, 'model.safetensors.index.json', index)


def _tokenizer(folder: str, model: Model) -> None:
  if os.path.isdir(model.name):
    for name in _TOKENIZER:
      if os.path.exists(os.path.join(model.name, name)):
        shutil.copyfile(os.path.join(model.name, name), os.path.join(folder, name))
    return
  words = model.tokenizer
  words.backend.save(os.path.join(folder, 'tokenizer.json'))
  text = words.backend.id_to_token
  settings = dict(
    tokenizer_class='PreTrainedTokenizerFast',
    bos_token=words.bos_token or None,
    eos_token=words.eos_token or text(words.end_ids[0]),
    pad_token=text(words.pad_id),
    chat_template=words.template,
    clean_up_tokenization_spaces=False,
  )
  write_json(folder, 'tokenizer_config.json', {k: v for k, v in settings.items() if v is not None})
  ends = dict(eos_token_id=list(words.end_ids), pad_token_id=words.pad_id)
  write_json(folder, 'generation_config.json', ends)


def write_json(folder: str, name: str, value: Any) -> None:
  """A JSON file. Source: none."""
  with open(os.path.join(folder, name), 'w', encoding='utf-8') as file:
    json.dump(value, file, indent=2, ensure_ascii=False)

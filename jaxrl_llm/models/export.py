"""Writes a model as a Hugging Face folder, which transformers and inference servers load."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.flax

from jaxrl_llm.checkpointing import safe_files
from jaxrl_llm.models import families, tensor_layout
from jaxrl_llm.models.model_folder import read_json
from jaxrl_llm.types import JsonObject, JsonValue, Model, ModelConfig, UserError

DTYPES = ('bfloat16', 'float16', 'float32')
SHARD_BYTES = 5 * 10**9  # of a safetensors file
# Copied from the folder that the model was loaded from, where they exist.
_TOKENIZER_FILES = (
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
  shard_bytes: int = SHARD_BYTES,
) -> str:
  """Write config.json, safetensors of at most `shard_bytes` each, the tokenizer and README.md; returns `folder`.

  Raises UserError as `staged_folder` does.
  """
  with staged_folder(folder, dtype, card) as part:
    write_json(part, 'config.json', config_json(model, dtype))
    write_weights(part, named_tensors(model), dtype, shard_bytes)
    write_tokenizer(part, model)
  return folder


@contextlib.contextmanager
def staged_folder(folder: str, dtype: str, card: str) -> Iterator[str]:
  """Yield `folder`.part to write into; at exit it gets a README.md and is renamed to `folder`.

  Raises UserError for an unknown dtype, and unless `folder` is empty or can be created.
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
  for name in os.listdir(part):  # safetensors writes files that only their owner can read
    shutil.copymode(readme, os.path.join(part, name))
  if os.path.isdir(folder):
    os.rmdir(folder)
  os.rename(part, folder)


def config_json(model: Model, dtype: str) -> JsonObject:
  """The config.json of the model's own folder, or one derived from its ModelConfig."""
  raw = read_json(model.name, 'config.json') if os.path.isdir(model.name) else {}
  if isinstance(raw.get('text_config'), dict):  # a multimodal model is exported as its text decoder
    raw = dict(model_type='gemma3_text') | raw['text_config']
    raw |= dict(tie_word_embeddings=model.config.tied)
  raw = raw or hugging_face_config(model.config)
  raw.pop('quantization_config', None)  # weights are written in full
  raw.pop('auto_map', None)  # names files of code, which are not copied
  kind = raw['model_type']
  # Older readers use torch_dtype.
  return raw | dict(
    architectures=[families.FAMILIES[kind].architecture], dtype=dtype, torch_dtype=dtype
  )


def hugging_face_config(config: ModelConfig) -> JsonObject:
  """The config.json of a model whose family differs from Llama by flags alone. Raises UserError for others."""
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
  """Every tensor with its name in Hugging Face's files, matrices as [out, in]."""
  leaves = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(model.params):
    leaves['/'.join(str(k.key) for k in path)] = leaf
  offset = np.float32(families.norm_offset(model.config))
  for tensor in tensor_layout.stored_tensors(model.config):
    parts = [np.asarray(leaves[path]) for path in tensor.paths]
    value = tensor.join([x - offset for x in parts] if tensor.paths[0].endswith('scale') else parts)
    if tensor.experts:
      yield from ((tensor.name.format(e), expert) for e, expert in enumerate(value))
    else:
      yield tensor.name, value


def write_weights(
  folder: str, tensors: Iterable[tuple[str, np.ndarray]], dtype: str, shard_bytes: int = SHARD_BYTES
) -> None:
  """Write named tensors as safetensors of at most `shard_bytes` each, with an index where there are several."""
  shards, room_bytes = [], 0
  for name, value in tensors:
    size_bytes = value.size * jnp.dtype(dtype).itemsize
    if not shards or size_bytes > room_bytes:
      shards.append([])
      room_bytes = shard_bytes
    shards[-1].append((name, value))
    room_bytes -= size_bytes
  weight_map, total_bytes = {}, 0
  for index, shard in enumerate(shards):
    file = 'model.safetensors'
    if len(shards) > 1:
      file = f'model-{index + 1:05}-of-{len(shards):05}.safetensors'
    tensors = {name: jnp.asarray(value, dtype) for name, value in shard}
    safetensors.flax.save_file(tensors, os.path.join(folder, file), metadata=dict(format='pt'))
    weight_map |= dict.fromkeys(tensors, file)
    total_bytes += sum(x.nbytes for x in tensors.values())
  if len(shards) > 1:
    index = dict(metadata=dict(total_size=total_bytes), weight_map=weight_map)
    write_json(folder, 'model.safetensors.index.json', index)


def write_tokenizer(folder: str, model: Model) -> None:
  """Copy the tokenizer's files of the model's own folder, or write those of a tokenizer without one."""
  if os.path.isdir(model.name):
    for name in _TOKENIZER_FILES:
      if os.path.exists(os.path.join(model.name, name)):
        shutil.copyfile(os.path.join(model.name, name), os.path.join(folder, name))
    return
  tokenizer = model.tokenizer
  tokenizer.backend.save(os.path.join(folder, 'tokenizer.json'))
  token_text = tokenizer.backend.id_to_token
  settings = dict(
    tokenizer_class='PreTrainedTokenizerFast',
    bos_token=tokenizer.bos_token or None,
    eos_token=tokenizer.eos_token or token_text(tokenizer.end_ids[0]),
    pad_token=token_text(tokenizer.pad_id),
    chat_template=tokenizer.template,
    clean_up_tokenization_spaces=False,
  )
  write_json(folder, 'tokenizer_config.json', {k: v for k, v in settings.items() if v is not None})
  generation = dict(eos_token_id=list(tokenizer.end_ids), pad_token_id=tokenizer.pad_id)
  write_json(folder, 'generation_config.json', generation)


def write_json(folder: str, name: str, value: JsonValue) -> None:
  """Write `value` as the JSON file folder/name."""
  with open(os.path.join(folder, name), 'w', encoding='utf-8') as file:
    json.dump(value, file, indent=2, ensure_ascii=False)

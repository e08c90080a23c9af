"""An adapter as a folder of PEFT's: adapter_config.json and adapter_model.safetensors, which its users load."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors.flax

from jaxrl_llm.models import decoder, export, huggingface
from jaxrl_llm.models.model_folder import read_json
from jaxrl_llm.types import Model, ModelConfig, UserError

_CONFIG, _WEIGHTS = 'adapter_config.json', 'adapter_model.safetensors'
# What PEFT's LoraConfig can say besides, that would make another function of the same tensors.
_PLAIN = dict(use_rslora=False, use_dora=False, lora_bias=False, fan_in_fan_out=False, bias='none')
_EMPTY = ('rank_pattern', 'alpha_pattern', 'modules_to_save', 'layers_to_transform')


def save(
  folder: str, model: Model, settings: Any, *, dtype: str = 'bfloat16', card: str = ''
) -> str:
  """Writes the adapter `model.params`, {'layers': {0: {'q': {'a': A, 'b': B}, …}, …}}; returns `folder`.

  `settings` holds rank, alpha and names. Raises UserError as `export.staged_folder` does. Source: none.
  """
  alpha = settings.alpha
  written = dict(
    peft_type='LORA',
    task_type='CAUSAL_LM',
    base_model_name_or_path=model.name,
    r=settings.rank,
    # A whole number where it is one: some readers ask for that.
    lora_alpha=int(alpha) if alpha == int(alpha) else alpha,
    lora_dropout=0.0,
    target_modules=[_module(0, name, model.config).split('.')[-1] for name in settings.names],
    inference_mode=True,
    **_PLAIN,
  )
  with export.staged_folder(folder, dtype, card) as part:
    export.write_json(part, _CONFIG, written)
    cast = {name: jnp.asarray(value, dtype) for name, value in tensors(model.config, model.params)}
    safetensors.flax.save_file(cast, os.path.join(part, _WEIGHTS), metadata=dict(format='pt'))
  return folder


def tensors(config: ModelConfig, adapter: Any) -> Iterator[tuple[str, np.ndarray]]:
  """Every tensor by its name in PEFT's files: lora_A [r, in], lora_B [out, r]. Source: none."""
  for i, layer in adapter['layers'].items():
    for name, ab in layer.items():
      for part, value in ab.items():
        yield _name(i, name, part, config), np.ascontiguousarray(np.asarray(value).T)


def load(folder: str, config: ModelConfig, settings: Any) -> Any:
  """The adapter in `folder`, float32 on the host, as `save` takes it.

  Raises UserError where a file is missing or broken, or is of another rank, alpha, targets or kind. Source: none.
  """
  where = f'config.lora.init={folder!r}'
  if not os.path.exists(os.path.join(folder, _WEIGHTS)):
    raise UserError(f'{where} holds no {_WEIGHTS}; name a folder that PEFT wrote.')
  try:
    raw = read_json(folder, _CONFIG)
    _check(where, raw, config, settings)
    opened: dict[str, Any] = {}
    file = os.path.join(folder, _WEIGHTS)
    kernels = decoder.abstract_params(config)['layers']

    def one(i, name, part):
      D, F = kernels[i][name]['kernel'].shape
      shape = (settings.rank, D) if part == 'a' else (F, settings.rank)
      value = huggingface.read_tensor(opened, file, _name(i, name, part, config), shape)
      return np.ascontiguousarray(np.asarray(value).T, np.float32)

    layers = {
      i: {name: {part: one(i, name, part) for part in 'ab'} for name in settings.names}
      for i in kernels
    }
    adapter = dict(layers=layers)
    extra = set(opened[file].keys()) - {name for name, _ in tensors(config, adapter)}
  except UserError as error:
    raise UserError(str(error).replace('config.model', 'config.lora.init')) from error
  if extra:
    raise UserError(
      f'{where} holds {min(extra)!r} ({len(extra)} such), which config.lora does not ask for; change '
      'config.lora.targets.'
    )
  return adapter


def _check(where: str, raw: dict[str, Any], config: ModelConfig, settings: Any) -> None:
  wanted = dict(r=settings.rank, lora_alpha=settings.alpha)
  for key, ours in (('r', 'rank'), ('lora_alpha', 'alpha')):
    if raw.get(key) != wanted[key]:
      raise UserError(
        f'{where} has {key}={raw.get(key)!r}; set config.lora.{ours}, which is {wanted[key]}, to that.'
      )
  odd = [key for key, plain in _PLAIN.items() if raw.get(key, plain) != plain]
  odd += [key for key in _EMPTY if raw.get(key)]
  if odd:
    raise UserError(
      f'{where} has {odd[0]}={json.dumps(raw[odd[0]])}, which is not supported; give an adapter of plain LoRA.'
    )


def _name(layer: int, name: str, part: str, config: ModelConfig) -> str:
  return f'base_model.model.{_module(layer, name, config)}.lora_{part.upper()}.weight'


def _module(layer: int, name: str, config: ModelConfig) -> str:
  """(3, 'q') → 'model.layers.3.self_attn.q_proj'."""
  return huggingface.hugging_face_name(f'layers/{layer}/{name}/kernel', config).removesuffix('.weight')

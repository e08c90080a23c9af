"""LoRA adapters in PEFT's format: a folder with adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Protocol

import jax.numpy as jnp
import numpy as np
import safetensors.flax

from jaxrl_llm.models import decoder, export, huggingface, tensor_layout
from jaxrl_llm.models.model_folder import read_json
from jaxrl_llm.types import JsonObject, Model, ModelConfig, Params, UserError

_CONFIG, _WEIGHTS = 'adapter_config.json', 'adapter_model.safetensors'
# Fields of PEFT's LoraConfig that change the function computed from the same tensors, at their neutral values.
_PLAIN = dict(use_rslora=False, use_dora=False, lora_bias=False, fan_in_fan_out=False, bias='none')
_EMPTY = ('rank_pattern', 'alpha_pattern', 'modules_to_save', 'layers_to_transform')


class AdapterSettings(Protocol):
  """The shape of an adapter: `learner.lora.LoraSettings`."""

  @property
  def rank(self) -> int: ...

  @property
  def alpha(self) -> float: ...

  @property
  def names(self) -> tuple[str, ...]: ...  # of a layer's adapted matrices


def save(
  folder: str, model: Model, settings: AdapterSettings, *, dtype: str = 'bfloat16', card: str = ''
) -> str:
  """Write the adapter `model.params`, {'layers': {0: {'q': {'a': A, 'b': B}, …}, …}}; returns `folder`.

  Raises UserError as `export.staged_folder` does.
  """
  _check_names(f'--to={folder!r}', model.config, settings)
  alpha = settings.alpha
  raw = dict(
    peft_type='LORA',
    task_type='CAUSAL_LM',
    base_model_name_or_path=model.name,
    r=settings.rank,
    # An integer where possible: some readers require one.
    lora_alpha=int(alpha) if alpha == int(alpha) else alpha,
    lora_dropout=0.0,
    target_modules=[_module(0, name, model.config).split('.')[-1] for name in settings.names],
    inference_mode=True,
    **_PLAIN,
  )
  with export.staged_folder(folder, dtype, card) as part:
    export.write_json(part, _CONFIG, raw)
    tensors = {
      name: jnp.asarray(value, dtype) for name, value in named_tensors(model.config, model.params)
    }
    safetensors.flax.save_file(tensors, os.path.join(part, _WEIGHTS), metadata=dict(format='pt'))
  return folder


def named_tensors(config: ModelConfig, adapter: Params) -> Iterator[tuple[str, np.ndarray]]:
  """Every tensor with its name in PEFT's files: lora_A [r, in], lora_B [out, r]."""
  for i, layer in adapter['layers'].items():
    for name, parts in layer.items():
      for part, value in parts.items():
        yield _tensor_name(i, name, part, config), np.ascontiguousarray(np.asarray(value).T)


def load(folder: str, config: ModelConfig, settings: AdapterSettings) -> Params:
  """The adapter in `folder`, float32 on the host, in the form that `save` takes.

  Raises UserError for a missing or broken file, and for another rank, alpha, target or kind of adapter.
  """
  where = f'config.lora.init={folder!r}'
  if not os.path.exists(os.path.join(folder, _WEIGHTS)):
    raise UserError(f'{where} holds no {_WEIGHTS}; name a folder that PEFT wrote.')
  try:
    _check_names(where, config, settings)
    raw = read_json(folder, _CONFIG)
    _check(where, raw, config, settings)
    opened: huggingface.OpenFiles = {}
    file = os.path.join(folder, _WEIGHTS)
    kernels = decoder.abstract_params(config)['layers']

    def read(i, name, part):
      D, F = kernels[i][name]['kernel'].shape
      shape = (settings.rank, D) if part == 'a' else (F, settings.rank)
      value = huggingface.read_tensor(opened, file, _tensor_name(i, name, part, config), shape)
      return np.ascontiguousarray(np.asarray(value).T, np.float32)

    layers = {
      i: {name: {part: read(i, name, part) for part in 'ab'} for name in settings.names}
      for i in kernels
    }
    adapter = dict(layers=layers)
    extra = set(opened[file].keys()) - {name for name, _ in named_tensors(config, adapter)}
  except UserError as error:
    raise UserError(str(error).replace('config.model', 'config.lora.init')) from error
  if extra:
    raise UserError(
      f'{where} holds {min(extra)!r} ({len(extra)} such), which config.lora.targets does not select; change it.'
    )
  return adapter


def _check_names(where: str, config: ModelConfig, settings: AdapterSettings) -> None:
  """Raises UserError for matrices that files hold in one tensor: PEFT gives them one A, and here each has its own."""
  joined = tensor_layout.joined_names(config)
  if fused := [name for name in settings.names if name in joined]:
    raise UserError(
      f'{where} cannot be an adapter of {fused[0]!r}, which files of {config.family} hold in one matrix with others; '
      'export the merged model instead, or choose others by config.lora.targets, such as ^(o|down)$.'
    )


def _check(where: str, raw: JsonObject, config: ModelConfig, settings: AdapterSettings) -> None:
  expected = dict(r=settings.rank, lora_alpha=settings.alpha)
  for key, field in (('r', 'rank'), ('lora_alpha', 'alpha')):
    if raw.get(key) != expected[key]:
      raise UserError(
        f'{where} has {key}={raw.get(key)!r}; set config.lora.{field}, which is {expected[key]}, to that.'
      )
  unsupported = [key for key, plain in _PLAIN.items() if raw.get(key, plain) != plain]
  unsupported += [key for key in _EMPTY if raw.get(key)]
  if unsupported:
    key = unsupported[0]
    raise UserError(
      f'{where} has {key}={json.dumps(raw[key])}, which is not supported; give an adapter of plain LoRA.'
    )


def _tensor_name(layer: int, name: str, part: str, config: ModelConfig) -> str:
  return f'base_model.model.{_module(layer, name, config)}.lora_{part.upper()}.weight'


def _module(layer: int, name: str, config: ModelConfig) -> str:
  """(3, 'q') → 'model.layers.3.self_attn.q_proj'."""
  return tensor_layout.hugging_face_name(f'layers/{layer}/{name}/kernel', config).removesuffix(
    '.weight'
  )

"""Which kernels compute attention in the update and while decoding: what a configuration names, or what suits."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax

from jaxrl_llm.config import compatibility
from jaxrl_llm.config.conditions import value_of
from jaxrl_llm.config.schema import Config, replace
from jaxrl_llm.models import decode_attention, splash
from jaxrl_llm.types import JsonObject, ModelConfig, UserError

# Tokens from which scores of all pairs would fill the memory, and from which the rest of a ring is most of what
# decoding reads; by counting, not measured.
_LONG_COMPLETION = 2048
_LANES = 128  # a TPU stores the last dimension of an array in multiples of it
_UPDATE, _DECODING = 'learner.attention', 'rollout.attention'
_KERNELS = {_UPDATE: ('splash', splash.attend), _DECODING: ('ragged', decode_attention.attend)}


def choose(
  config: Config, model: ModelConfig, mesh: jax.sharding.Mesh, facts: JsonObject
) -> Config:
  """The config with 'auto' decided: kernels on TPUs for long rows, where they go with the rest."""
  tokens = config.completion_tokens
  suited = {
    # A group shares its prompt in XLA's attention, which pays where prompts are the longer part.
    _UPDATE: tokens >= max(_LONG_COMPLETION, config.prompt_tokens),
    # The kernel reads keys as they are stored, and narrower heads would be stored in twice the memory.
    _DECODING: tokens >= _LONG_COMPLETION
    and all(model.of_layers(slides).head_dim % _LANES == 0 for slides in model.slides),
  }
  on_tpu = mesh.devices.flat[0].platform == 'tpu'
  for field, suits in suited.items():
    if value_of(field, config, {}) == 'auto':
      kernel = replace(config, {field: _KERNELS[field][0]})
      takes = on_tpu and suits and _goes_with_the_rest(kernel, facts)
      config = kernel if takes else replace(config, {field: 'xla'})
  return config


def of_update(config: Config, mesh: jax.sharding.Mesh) -> Callable[..., jax.Array] | None:
  """The kernel of the update; None for XLA's attention. Raises UserError for one that these devices cannot run."""
  return _kernel(config, mesh, _UPDATE)


def of_decoding(config: Config, mesh: jax.sharding.Mesh) -> Callable[..., jax.Array] | None:
  """As `of_update`, while decoding."""
  return _kernel(config, mesh, _DECODING)


def _kernel(config: Config, mesh: jax.sharding.Mesh, field: str) -> Callable[..., jax.Array] | None:
  name, platform = value_of(field, config, {}), mesh.devices.flat[0].platform
  known, attend = _KERNELS[field]
  if name == 'xla':
    return None
  if name != known:
    raise UserError(f'config.{field}={name!r} is unknown; choose one of: auto, xla, {known}.')
  if platform not in ('tpu', 'cpu'):
    raise UserError(
      f"config.{field}={name!r} is a kernel for TPUs, and this is a {platform}; set it to 'xla'."
    )
  return functools.partial(attend, interpret=platform == 'cpu')


def _goes_with_the_rest(config: Config, facts: JsonObject) -> bool:
  try:
    compatibility.check(config, facts)
  except UserError:
    return False
  return True

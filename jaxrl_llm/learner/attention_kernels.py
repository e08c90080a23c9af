"""Which kernels compute attention in the update and while decoding: what a configuration names, or what suits."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax

from jaxrl_llm.config import compatibility
from jaxrl_llm.config.conditions import value_of
from jaxrl_llm.config.schema import Config, replace
from jaxrl_llm.models import cudnn_attention, decode_attention, gpu_decode_attention, splash
from jaxrl_llm.types import JsonObject, ModelConfig, UserError

# Tokens from which scores of all pairs would fill the memory, and from which the rest of a ring is most of what
# decoding reads; by counting, not measured.
_LONG_COMPLETION = 2048
# On one H200, updates of rows of 1,536 tokens take 0.45 to 0.6 of the seconds of XLA's attention.
_LONG_ROW = 256
# On GPUs, where blocks are short and no head is stored in more memory than it has: tokens from which a ring is most of
# what attention reads, and half of it is empty in the mean. On one H200, rollouts of 1,024 tokens take 0.75 of the
# seconds of XLA's attention; shorter ones were not measured.
_LONG_ON_GPUS = 256
_LANES = 128  # a TPU stores the last dimension of an array in multiples of it
_UPDATE, _DECODING = 'learner.attention', 'rollout.attention'


# By field and name, the functions of the platforms that have such a kernel; on CPUs the first is interpreted.
KERNELS: dict[str, dict[str, dict[str, Callable[..., jax.Array]]]] = {
  _UPDATE: {'splash': {'tpu': splash.attend}, 'cudnn': {'gpu': cudnn_attention.attend}},
  _DECODING: {'ragged': {'tpu': decode_attention.attend, 'gpu': gpu_decode_attention.attend}},
}


def choose(
  config: Config, model: ModelConfig, mesh: jax.sharding.Mesh, facts: JsonObject
) -> Config:
  """The config with 'auto' decided: kernels on TPUs and GPUs for long rows, where they go with the rest."""
  platform = mesh.devices.flat[0].platform
  suited = {
    _UPDATE: _suits_update(config, model, platform),
    _DECODING: _suits_decoding(config, model, platform),
  }
  for field, suits in suited.items():
    if value_of(field, config, {}) == 'auto':
      names = [name for name, kernels in KERNELS[field].items() if platform in kernels]
      chosen = replace(config, {field: names[0] if names and suits else 'xla'})
      plain = replace(config, {field: 'xla'})
      config = chosen if _goes_with_the_rest(chosen, facts) else plain
  return config


def _suits_update(config: Config, model: ModelConfig, platform: str) -> bool:
  tokens = config.completion_tokens
  if platform == 'gpu':
    sizes = {model.of_layers(slides).head_dim for slides in model.slides}
    fits = all(size % 8 == 0 and size <= cudnn_attention.LARGEST_HEAD for size in sizes)
    return fits and config.prompt_tokens + tokens >= _LONG_ROW
  # A group shares its prompt in XLA's attention, which pays where prompts are the longer part.
  return tokens >= max(_LONG_COMPLETION, config.prompt_tokens)


def _suits_decoding(config: Config, model: ModelConfig, platform: str) -> bool:
  tokens = config.completion_tokens
  if platform == 'gpu':
    return tokens >= _LONG_ON_GPUS
  # The kernel reads keys as they are stored, and narrower heads would be stored in twice the memory.
  fits = all(model.of_layers(slides).head_dim % _LANES == 0 for slides in model.slides)
  return tokens >= _LONG_COMPLETION and fits


def of_update(config: Config, mesh: jax.sharding.Mesh) -> Callable[..., jax.Array] | None:
  """The kernel of the update; None for XLA's attention. Raises UserError for one that these devices cannot run."""
  return _kernel(config, mesh, _UPDATE)


def of_decoding(config: Config, mesh: jax.sharding.Mesh) -> Callable[..., jax.Array] | None:
  """As `of_update`, while decoding."""
  return _kernel(config, mesh, _DECODING)


def _kernel(config: Config, mesh: jax.sharding.Mesh, field: str) -> Callable[..., jax.Array] | None:
  name, platform = value_of(field, config, {}), mesh.devices.flat[0].platform
  known = KERNELS[field]
  if name == 'xla':
    return None
  if name not in known:
    choices = ', '.join(('auto', 'xla', *known))
    raise UserError(f'config.{field}={name!r} is unknown; choose one of: {choices}.')
  kernels = known[name]
  if platform not in (*kernels, 'cpu'):
    platforms = ' and '.join(f'{each.upper()}s' for each in kernels)
    raise UserError(
      f"config.{field}={name!r} is a kernel for {platforms}, and this is a {platform}; set it to 'xla'."
    )
  attend = kernels.get(platform, next(iter(kernels.values())))
  return functools.partial(attend, interpret=platform == 'cpu')


def _goes_with_the_rest(config: Config, facts: JsonObject) -> bool:
  try:
    compatibility.check(config, facts)
  except UserError:
    return False
  return True

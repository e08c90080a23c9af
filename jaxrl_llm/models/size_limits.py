"""Checks of a model's sizes before anything is allocated: they come from files that may be untrusted."""

from __future__ import annotations

import math
import os

import numpy as np

from jaxrl_llm.models import positions
from jaxrl_llm.types import JsonValue, ModelConfig, UserError

# Far beyond any existing model, and small enough for arithmetic on them.
_LIMITS = dict(
  vocab=2**24, width=2**20, layers=2**10, heads=2**14, kv_heads=2**14, head_dim=2**14, mlp=2**22,
  max_tokens=2**30,
)  # fmt: skip


# Fields that are 0 where a model has no such part.
_NUMBERS = (
  'query_scale', 'attention_cap', 'logit_cap', 'sliding_rope_theta', 'embed_scale', 'residual_scale', 'logit_scale',
  'position_scale', 'position_span', 'gate_gain', 'gate_limit', 'weight_scale',
)  # fmt: skip


def positive_int(value: JsonValue, where: str, limit: int = 2**31) -> int:
  """`value` itself. Raises UserError that begins with `where` unless it is an integer from 1 to `limit`."""
  if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limit:
    raise UserError(
      f'{where}={value!r} must be a whole number from 1 to {limit}; fetch the file again.'
    )
  return value


def positive_float(value: JsonValue, where: str) -> float:
  """`value` as a float. Raises UserError that begins with `where` unless it is a finite number above 0."""
  is_number = isinstance(value, int | float) and not isinstance(value, bool)
  if not is_number or not 0 < value < 1e30:
    raise UserError(f'{where}={value!r} must be a number above 0; fetch the file again.')
  return float(value)


def validated(config: ModelConfig, where: str) -> ModelConfig:
  """The config itself. Raises UserError that begins with `where` if no decoder can have its sizes."""
  for name, limit in _LIMITS.items():
    positive_int(getattr(config, name), f'{where}: {name}', limit)
  if config.heads % config.kv_heads:
    raise UserError(
      f'{where}: {config.heads} heads cannot share {config.kv_heads} key-value heads; fetch it again.'
    )
  for name in ('sliding', 'unrotated', 'dense_layers', 'recurrent_layers'):
    flags = getattr(config, name)
    if flags and len(flags) != config.layers:
      raise UserError(
        f'{where}: {len(flags)} flags of {name} layers for {config.layers} layers; fetch it again.'
      )
  if config.sliding:
    positive_int(config.window, f'{where}: sliding_window', _LIMITS['max_tokens'])
  if config.experts != 0:
    positive_int(config.experts, f'{where}: num_experts', 2**16)
    positive_int(config.experts_per_token, f'{where}: num_experts_per_tok', config.experts)
    groups = positive_int(config.expert_groups, f'{where}: n_group', config.experts)
    positive_int(config.chosen_groups, f'{where}: topk_group', groups)
    # The best two experts of a group decide whether it is chosen, and k are chosen from these groups.
    group_size = config.experts // groups
    reached = group_size * config.chosen_groups
    if (
      config.experts % groups
      or (groups > 1 and group_size < 2)
      or reached < config.experts_per_token
    ):
      raise UserError(
        f'{where}: {config.experts} experts in {groups} groups, of which {config.chosen_groups} are chosen, cannot '
        f'give {config.experts_per_token} to a token; fetch it again.'
      )
    if config.mixtures == 0:
      raise UserError(
        f'{where}: no layer has experts, and there are {config.experts}; fetch it again.'
      )
  _check_latent(config, where)
  _check_delta(config, where)
  for name in ('dense_mlp', 'shared_mlp'):
    if (value := getattr(config, name)) != 0:
      positive_int(value, f'{where}: {name}', _LIMITS['mlp'])
  for name in _NUMBERS:
    if (value := getattr(config, name)) != 0:
      positive_float(value, f'{where}: {name}')
  for name in ('head_dim', 'rotary_dim'):
    value = getattr(config, name)
    if not isinstance(value, int) or value % 2 or value > config.head_dim or value < 0:
      raise UserError(
        f'{where}: {name}={value!r} must be even, and at most {config.head_dim}; fetch it again.'
      )
  _check_rotary(config, where)
  _check_global(config, where)
  _check_readers(config, where)
  _check_layer_input(config, where)
  return config


def _check_readers(config: ModelConfig, where: str) -> None:
  """Raises UserError for layers that attend to keys and values of others, where no such layer exists."""
  if config.kv_readers == 0:
    return
  name = f'{where}: num_kv_shared_layers'
  own = config.layers - positive_int(config.kv_readers, name, _LIMITS['layers'])
  if own < 1 or not {*config.slides[own:]} <= {*config.slides[:own]}:
    raise UserError(
      f'{name}={config.kv_readers} of {config.layers} layers attend to keys and values of an earlier layer of the same '
      'layer_types, and there is none for some of them; fetch it again.'
    )


def _check_layer_input(config: ModelConfig, where: str) -> None:
  """Raises UserError for a table of layers' inputs that lacks tokens."""
  if config.layer_input == 0:
    return
  positive_int(config.layer_input, f'{where}: hidden_size_per_layer_input', _LIMITS['width'])
  name = f'{where}: vocab_size_per_layer_input'
  if positive_int(config.layer_input_vocab, name, _LIMITS['vocab']) < config.vocab:
    raise UserError(
      f'{name}={config.layer_input_vocab} must be at least vocab_size={config.vocab}, since any token may be sampled; '
      'fetch it again.'
    )


def _check_global(config: ModelConfig, where: str) -> None:
  if config.global_sizes is not None:
    validated(config.of_layers(slides=False), f'{where}: full_attention')


def _check_latent(config: ModelConfig, where: str) -> None:
  """Raises UserError for sizes of attention with a latent that no decoder can have."""
  if config.latent == 0:
    return
  for name in ('latent', 'value_dim', 'rotary_dim'):
    positive_int(getattr(config, name), f'{where}: {name}', _LIMITS['width'])
  if config.query_latent != 0:
    positive_int(config.query_latent, f'{where}: query_latent', _LIMITS['width'])
  if config.rotary_dim >= config.head_dim:
    raise UserError(
      f'{where}: qk_nope_head_dim={config.head_dim - config.rotary_dim} must be a whole number above 0; fetch it again.'
    )


def _check_delta(config: ModelConfig, where: str) -> None:
  """Raises UserError for sizes of recurrent layers that no decoder can have."""
  if not config.is_recurrent:
    return
  for name in ('key_heads', 'value_heads', 'key_dim', 'value_dim'):
    positive_int(getattr(config, f'delta_{name}'), f'{where}: linear {name}', 2**14)
  window = positive_int(config.delta_window, f'{where}: linear_conv_kernel_dim', 2**10)
  if config.delta_value_heads % config.delta_key_heads or window < 2:
    raise UserError(
      f'{where}: {config.delta_value_heads} value heads of recurrent layers must be a multiple of '
      f'{config.delta_key_heads} key heads, and linear_conv_kernel_dim={window} at least 2; fetch it again.'
    )


def _check_rotary(config: ModelConfig, where: str) -> None:
  try:
    with np.errstate(all='ignore'):
      variants = config, positions.for_context(config, 2**40)
      tables = [positions.frequencies(c, sliding) for c in variants for sliding in (False, True)]
    is_finite = all(
      np.isfinite(inverse).all() and math.isfinite(factor) for inverse, factor in tables
    )
  except UserError as error:
    raise UserError(f'{where}: {error}') from error
  except (KeyError, TypeError, ValueError, ArithmeticError) as error:
    raise UserError(
      f'{where}: its rotary embedding lacks or misstates a setting ({type(error).__name__}: {error}); fetch it again.'
    ) from error
  if not is_finite:
    raise UserError(
      f'{where}: the frequencies of its rotary embedding are not finite; fetch it again.'
    )


def check_memory(config: ModelConfig, where: str) -> None:
  """Raise UserError if the float32 weights alone exceed the machine's memory."""
  c = config
  sizes, own = map(c.of_layers, c.slides), c.layers - c.kv_readers
  heads = (x.head_dim * (2 * c.heads + 2 * x.kv_heads * (i < own)) for i, x in enumerate(sizes))
  attention = c.width * sum(heads) // c.layers
  if c.latent:
    query_in = c.query_latent or c.width
    attention = c.width * (c.query_latent + c.latent + c.rotary_dim + c.heads * c.value_dim)
    attention += c.heads * (
      query_in * c.head_dim + c.latent * (c.head_dim - c.rotary_dim + c.value_dim)
    )
  attention *= c.layers
  if c.is_recurrent:
    keys, values = c.delta_key_heads * c.delta_key_dim, c.delta_value_heads * c.delta_value_dim
    recurrent = c.width * (2 * keys + 3 * values + 2 * c.delta_value_heads)
    count = sum(c.recurrent_layers)
    attention = attention // c.layers * (c.layers - count) + recurrent * count
  dense = 3 * (c.dense_mlp or c.mlp)
  mixture = 3 * (c.mlp * c.experts + c.shared_mlp) + c.experts
  mlp = c.mixtures * mixture + (c.layers - c.mixtures) * dense
  mlp += c.kv_readers * (c.kv_reader_mlp - 1) * (3 * c.shared_mlp if c.experts else dense)
  attention += c.layers * c.layer_input * (c.layer_input_vocab + 3 * c.width)
  count = c.vocab * c.width * (1 if c.tied else 2) + attention + c.width * mlp
  memory = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
  if 4 * count > memory:
    raise UserError(
      f'{where} has {count:.3g} weights, {4 * count / 2**30:.1f} GiB in float32, and this machine has '
      f'{memory / 2**30:.1f} GiB of memory; choose a smaller model.'
    )

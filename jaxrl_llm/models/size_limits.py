"""What the sizes of a model may be, before anything is made of them: they come from files that may be anybody's."""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np

from jaxrl_llm.models import rotary
from jaxrl_llm.types import ModelConfig, UserError

# Far beyond any model there is, and small enough to compute with.
_MOST = dict(
  vocab=2**24, width=2**20, layers=2**10, heads=2**14, kv_heads=2**14, head_dim=2**14, mlp=2**22,
  max_tokens=2**30,
)  # fmt: skip


def positive_int(value: Any, where: str, most: int = 2**31) -> int:
  """`value`, where it is a whole number from 1 to `most`; else UserError with `where`. Source: none."""
  if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
    raise UserError(
      f'{where}={value!r} must be a whole number from 1 to {most}; fetch the file again.'
    )
  return value


def positive_float(value: Any, where: str) -> float:
  """`value` as a float, where it is a finite number above 0; else UserError with `where`. Source: none."""
  real = isinstance(value, int | float) and not isinstance(value, bool)
  if not real or not 0 < value < 1e30:
    raise UserError(f'{where}={value!r} must be a number above 0; fetch the file again.')
  return float(value)


def validated(config: ModelConfig, where: str) -> ModelConfig:
  """The config itself, if a decoder of that shape can be. Raises UserError that begins with `where`.

  Source: none.
  """
  for name, most in _MOST.items():
    positive_int(getattr(config, name), f'{where}: {name}', most)
  if config.heads % config.kv_heads:
    raise UserError(
      f'{where}: {config.heads} heads cannot share {config.kv_heads} key-value heads; fetch it again.'
    )
  for name in ('sliding', 'unrotated'):
    told = getattr(config, name)
    if told and len(told) != config.layers:
      raise UserError(
        f'{where}: {len(told)} layers are told to be {name}, of {config.layers}; fetch it again.'
      )
  if config.sliding:
    positive_int(config.window, f'{where}: sliding_window', _MOST['max_tokens'])
  if config.experts:
    positive_int(config.experts, f'{where}: num_experts', 2**16)
    positive_int(config.experts_per_token, f'{where}: num_experts_per_tok', config.experts)
  for name in ('query_scale', 'attention_cap', 'logit_cap', 'sliding_rope_theta'):
    if (told := getattr(config, name)) != 0:
      positive_float(told, f'{where}: {name}')
  if config.head_dim % 2:
    raise UserError(f'{where}: head_dim={config.head_dim} must be even; fetch it again.')
  try:
    with np.errstate(all='ignore'):
      turns = [rotary.frequencies(config, sliding) for sliding in (False, True)]
    good = all(np.isfinite(speed).all() and math.isfinite(factor) for speed, factor in turns)
  except UserError as error:
    raise UserError(f'{where}: {error}') from error
  except (KeyError, TypeError, ValueError, ArithmeticError) as error:
    raise UserError(
      f'{where}: its rotary embedding lacks or misstates a setting ({type(error).__name__}: {error}); fetch it again.'
    ) from error
  if not good:
    raise UserError(f'{where}: its rotary embedding turns at no finite speed; fetch it again.')
  return config


def check_memory(config: ModelConfig, where: str) -> None:
  """Raises UserError where the float32 weights alone are more than the machine's memory. Source: none."""
  c = config
  attention = c.head_dim * (2 * c.heads + 2 * c.kv_heads)
  mlp = 3 * c.mlp * (c.experts or 1) + c.experts
  count = c.vocab * c.width * (1 if c.tied else 2) + c.layers * c.width * (attention + mlp)
  memory = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
  if 4 * count > memory:
    raise UserError(
      f'{where} has {count:.3g} weights, {4 * count / 2**30:.1f} GiB in float32, and this machine has '
      f'{memory / 2**30:.1f} GiB of memory; choose a smaller model.'
    )

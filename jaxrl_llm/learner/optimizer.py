"""The optimizer by name with a learning-rate schedule and a bound on the global gradient norm, from optax."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import optax

from jaxrl_llm.config import stages, user_code
from jaxrl_llm.config.schema import OptimizerConfig
from jaxrl_llm.learner import rounded_adam
from jaxrl_llm.models import linear
from jaxrl_llm.types import Params, UserError

DECAYS = ('constant', 'cosine', 'linear')
NAMES = ('adafactor', 'adamw', 'lion', 'muon')
# Settings of adamw, which a function of the user's may name, too.
_ADAM = ('b1', 'b2', 'eps', 'moments_dtype')

Schedule = Callable[[Any], Any]  # optimizer step → learning rate, traced or not


def make_optimizer(
  config: OptimizerConfig, steps: int, learning_rate: float | None = None, seed: int = 0
) -> tuple[optax.GradientTransformation, Schedule]:
  """The optimizer `config.fn` on gradients clipped to `clip_norm`, and its schedule over `steps` optimizer steps.

  `learning_rate` replaces that of the config; `seed` keys the rounding of moments in bfloat16. Weight decay applies to
  matrices only. Raises UserError as `check`.
  arXiv:1711.05101 (AdamW).
  """
  rate = config.learning_rate if learning_rate is None else learning_rate
  schedule = _schedule(config, rate, steps)
  clip = optax.clip_by_global_norm(config.clip_norm)
  return optax.chain(clip, _named(config, schedule, seed)), schedule


def check(config: OptimizerConfig) -> None:
  """Raises UserError for an unknown function or decay, a user's function that fails, and settings of another one."""
  make_optimizer(config, 1)
  changed = [name for name in _ADAM if config[name] != OptimizerConfig()[name]]
  if config.fn in NAMES and config.fn != 'adamw' and changed:
    raise UserError(
      f"config.optimizer.{changed[0]}={config[changed[0]]!r} is a setting of 'adamw', and config.optimizer.fn="
      f"{config.fn!r} has its own; leave it out, or name a function of yours: 'package.module:function'."
    )


def _named(config: OptimizerConfig, schedule: Schedule, seed: int) -> optax.GradientTransformation:
  decay = config.weight_decay
  if config.fn == 'adamw':
    b1, b2, eps = config.b1, config.b2, config.eps
    if config.moments_dtype == 'bfloat16':
      return optax.chain(
        rounded_adam.scale_by_adam(b1, b2, eps, seed),
        optax.add_decayed_weights(decay, linear.matrices),
        optax.scale_by_learning_rate(schedule),
      )
    return optax.adamw(schedule, b1, b2, eps, weight_decay=decay, mask=linear.matrices)
  if config.fn == 'lion':
    return optax.lion(schedule, weight_decay=decay, mask=linear.matrices)
  if config.fn == 'adafactor':
    return optax.adafactor(
      schedule, weight_decay_rate=decay or None, weight_decay_mask=linear.matrices
    )
  if config.fn == 'muon':
    return optax.contrib.muon(
      schedule,
      weight_decay=decay,
      weight_decay_mask=linear.matrices,
      muon_weight_dimension_numbers=_in_layers,
    )
  return _users_own(config, schedule)


def _users_own(config: OptimizerConfig, schedule: Schedule) -> optax.GradientTransformation:
  where = f'config.optimizer.fn={config.fn!r}'
  if ':' not in config.fn:
    raise UserError(
      f'{where} is unknown; choose one of: {", ".join(NAMES)}, or your own function as '
      "'package.module:function'."
    )
  make = stages.imported(config.fn, where)
  named = inspect.signature(make).parameters
  if config.moments_dtype != OptimizerConfig().moments_dtype and 'moments_dtype' not in named:
    raise UserError(
      f'config.optimizer.moments_dtype={config.moments_dtype!r} changes nothing with {where}, which takes no such '
      'argument; leave it out, or add the argument to the function.'
    )
  settings = {name: config[name] for name in ('weight_decay', *_ADAM) if name in named}
  optimizer = user_code.guarded(make, where)(schedule, **settings)
  if not all(callable(getattr(optimizer, name, None)) for name in ('init', 'update')):
    raise UserError(
      f'{where} returns {type(optimizer).__name__}, which has no init(params) and update(grads, state, params); '
      'return a gradient transformation of optax.'
    )
  return optimizer


def _in_layers(params: Params) -> Params:
  """Muon's matrices: those of the layers. Embedding and head are not orthogonalized."""

  def numbers(path: tuple, x: jax.Array) -> optax.contrib.MuonDimensionNumbers | None:
    in_layer = any(getattr(key, 'key', None) == 'layers' for key in path)
    in_layer = in_layer and linear.is_matrix(path, x)
    return optax.contrib.MuonDimensionNumbers() if in_layer and x.ndim == 2 else None

  return jax.tree_util.tree_map_with_path(numbers, params)


def _schedule(config: OptimizerConfig, rate: float, steps: int) -> Schedule:
  warmup = config.warmup_steps
  after = max(steps - warmup, 1)
  if config.decay not in DECAYS:
    raise UserError(
      f'config.optimizer.decay={config.decay!r} is unknown; choose one of: {", ".join(DECAYS)}.'
    )
  main = {
    'constant': lambda: optax.constant_schedule(rate),
    'cosine': lambda: optax.cosine_decay_schedule(rate, after),
    'linear': lambda: optax.linear_schedule(rate, 0.0, after),
  }[config.decay]()
  if not warmup:
    return main
  # The ramp starts at rate / warmup, not at 0, so that the first step moves the weights.
  ramp = optax.linear_schedule(rate / warmup, rate, max(warmup - 1, 1))
  return optax.join_schedules([ramp, main], [warmup])

"""AdamW with a learning-rate schedule and a bound on the global gradient norm, from optax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax

from jaxrl_llm.config.schema import OptimizerConfig
from jaxrl_llm.types import UserError

DECAYS = ('constant', 'cosine', 'linear')

Schedule = Callable[[Any], Any]  # optimizer step → learning rate, traced or not


def make_optimizer(
  config: OptimizerConfig, steps: int, learning_rate: float | None = None
) -> tuple[optax.GradientTransformation, Schedule]:
  """AdamW on gradients clipped to `clip_norm`, and its schedule over `steps` optimizer steps.

  `learning_rate` replaces that of the config. Weight decay applies to matrices only. Raises UserError for an unknown
  decay. arXiv:1711.05101 (AdamW).
  """
  rate = config.learning_rate if learning_rate is None else learning_rate
  schedule = _schedule(config, rate, steps)
  matrices = lambda params: jax.tree.map(lambda x: x.ndim > 1, params)  # noqa: E731
  adamw = optax.adamw(
    schedule,
    b1=config.b1,
    b2=config.b2,
    eps=config.eps,
    weight_decay=config.weight_decay,
    mask=matrices,
  )
  return optax.chain(optax.clip_by_global_norm(config.clip_norm), adamw), schedule


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

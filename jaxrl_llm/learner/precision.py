"""Which number types a step samples and learns with, and that its objective counts what they differ by."""

from __future__ import annotations

from typing import Any

from absl import logging

from jaxrl_llm.types import UserError

# Bytes of a number; those of one byte are scaled by channel.
TYPES = dict(float32=4, bfloat16=2, int8=1, float8_e4m3fn=1)
_REMEDY = (
  "set config.objective.importance_correction.fn='token_truncate' (truncated importance sampling), or "
  'config.learner.quantize=True'
)


def compute(config: Any, on_cpu: bool) -> str:
  """The type of products, in the update and while sampling. Source: none."""
  return ('float32' if on_cpu else 'bfloat16') if config.dtype == 'auto' else config.dtype


def weights(config: Any, dtype: str) -> str:
  """The type of the sampler's kernels, where `dtype` is that of compute.

  Raises UserError for a wider one, and for an update that is to round as a sampler does that does not. Source: none.
  """
  told = config.rollout.weights_dtype
  if told == 'auto' or TYPES[told] == TYPES[dtype]:
    if config.learner.quantize:
      raise UserError(
        'config.learner.quantize=True rounds weights as the sampler does, and with '
        f'config.rollout.weights_dtype={told!r} that rounds none; set that to int8 or float8_e4m3fn.'
      )
    return dtype
  if TYPES[told] > TYPES[dtype]:
    raise UserError(
      f'config.rollout.weights_dtype={told!r} is wider than {dtype}, in which weights are multiplied: more bytes for '
      'the same numbers; set it to auto.'
    )
  return told


def check(config: Any, dtype: str, recomputes: bool) -> None:
  """Raises UserError where nothing counts that the sampler's weights are rounded and the update's are not.

  `recomputes`: ratios begin at log-probabilities that the update worked out. Ratios that begin at the recorded ones,
  or leave them out of account by way of a correction, are unbiased; others take what the rounded policy said for what
  the other would have said. Source: none.
  """
  own = config.objective
  if (
    weights(config, dtype) == dtype
    or config.learner.quantize
    or own.importance_correction.fn != 'none'
  ):
    return
  asks = (
    f'config.rollout.weights_dtype={config.rollout.weights_dtype!r} samples from rounded weights'
  )
  if not own.ratio.fn.startswith('direct') and (recomputes or own.ratio.fn == 'one'):
    why = (
      f'config.objective.ratio.fn={own.ratio.fn!r}'
      if own.ratio.fn == 'one'
      else f'config.objective.old_policy.fn={own.old_policy.fn!r}'
    )
    raise UserError(f'{asks}, and with {why} nothing in the objective counts that; {_REMEDY}.')
  logging.warning(
    '%s: ratios count that beside what was learned, so that a trust region clips rounding, too; to keep them apart, %s.',
    asks,
    _REMEDY,
  )

"""Number types of a step: of compute, and of the kernels while sampling."""

from __future__ import annotations

from absl import logging

from jaxrl_llm.config.schema import Config
from jaxrl_llm.models import exact
from jaxrl_llm.types import UserError

# Bytes of a number. Types of one byte have a scale for each channel.
TYPES = dict(float32=4, bfloat16=2, int8=1, float8_e4m3fn=1)
_REMEDY = (
  "set config.objective.importance_correction.fn='token_truncate' (truncated importance sampling), or "
  'config.learner.quantize=True'
)


def compute_dtype(config: Config, on_cpu: bool) -> str:
  """The type of matrix products, in the update and while sampling."""
  return ('float32' if on_cpu else 'bfloat16') if config.dtype == 'auto' else config.dtype


def sampling_dtype(config: Config, dtype: str) -> str:
  """The type of the kernels while sampling, where `dtype` is that of compute.

  Raises UserError for a wider type, and for an update that rounds kernels where sampling does not.
  """
  requested = config.rollout.weights_dtype
  if requested == 'auto' or TYPES[requested] == TYPES[dtype]:
    if config.learner.quantize:
      raise UserError(
        'config.learner.quantize=True rounds weights as the sampler does, and with '
        f'config.rollout.weights_dtype={requested!r} that rounds none; set that to int8 or float8_e4m3fn.'
      )
    return dtype
  if TYPES[requested] > TYPES[dtype]:
    raise UserError(
      f'config.rollout.weights_dtype={requested!r} is wider than {dtype}, in which weights are multiplied: more bytes '
      'for the same numbers; set it to auto.'
    )
  return requested


def is_exact(config: Config, dtype: str, on_cpu: bool) -> bool:
  """Whether log-probs of sampling and update have the same bits.

  Raises UserError for an unknown value, and for a type or a device whose products are not known to allow it.
  """
  name = config.learner.agreement
  if name not in ('off', 'exact'):
    raise UserError(f'config.learner.agreement={name!r} is unknown; choose one of: off, exact.')
  if name == 'off':
    return False
  off = 'or set --config.learner.agreement=off'
  if dtype != 'bfloat16' or not on_cpu:
    where = 'CPUs' if on_cpu else 'devices other than CPUs'
    raise UserError(
      f"config.learner.agreement='exact' needs products whose bits do not depend on the number of rows, and those of "
      f'{dtype} on {where} do, or are not known not to; set --config.dtype=bfloat16 on a CPU, {off}.'
    )
  if not exact.has_exact_products():
    raise UserError(
      "config.learner.agreement='exact' needs products whose bits do not depend on the number of rows, and those of "
      f'bfloat16 on this CPU do; take one with instructions for bfloat16 (AVX512_BF16), {off}.'
    )
  return True


def check(config: Config, dtype: str, recomputes_old: bool) -> None:
  """Raises UserError where only sampling rounds the weights, and nothing in the objective accounts for it.

  Ratios to recorded log-probs, and importance corrections, account for it. With `recomputes_old`, ratios start at
  log-probs that the update computes with its own weights, and do not.
  """
  objective = config.objective
  if (
    sampling_dtype(config, dtype) == dtype
    or config.learner.quantize
    or objective.importance_correction.fn != 'none'
  ):
    return
  flag = (
    f'config.rollout.weights_dtype={config.rollout.weights_dtype!r} samples from rounded weights'
  )
  no_ratio = objective.ratio.fn == 'one'
  if not objective.ratio.fn.startswith('direct') and (recomputes_old or no_ratio):
    cause = (
      f'config.objective.ratio.fn={objective.ratio.fn!r}'
      if no_ratio
      else f'config.objective.old_policy.fn={objective.old_policy.fn!r}'
    )
    raise UserError(f'{flag}, and with {cause} nothing in the objective counts that; {_REMEDY}.')
  logging.warning(
    '%s: ratios contain the rounding beside the updates, so that a trust region clips rounding, too; to '
    'separate them, %s.',
    flag,
    _REMEDY,
  )

"""Checks of a configuration alone, before anything is loaded: complete, of the right types, in range."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import ml_collections

from jaxrl_llm.config.loading import check_plain, near, of_type
from jaxrl_llm.config.schema import (
  Config,
  LoraConfig,
  MeshConfig,
  SamplingConfig,
  Section,
  default,
  is_stage,
  replace,
  typed,
)
from jaxrl_llm.types import UserError

ConfigLike: TypeAlias = Config | ml_collections.ConfigDict
_SECTIONS = (ml_collections.ConfigDict, Section)
_TINY = 1e-30  # smallest divisor in float32


def sized(config: ConfigLike, devices: Sequence[Any]) -> Config:
  """The typed configuration, with automatic fields set for these devices: `prompts`."""
  complete(config)
  config = typed(config)
  if config.prompts:
    return config
  shards = max(len(devices) // max(config.mesh.tensor, 1), 1)  # devices of `tensor` share rows
  wanted = 4 if devices[0].platform == 'cpu' else 64
  return replace(config, {'prompts': math.ceil(wanted / shards) * shards})


def silent_s(config: ConfigLike) -> float:
  """config.processes.silent_s, checked: it is needed before this process has joined the others."""
  complete(config)
  value = config.processes.silent_s
  if not 1 <= value <= 86400:
    raise UserError(f'config.processes.silent_s={value!r} must be from 1 to 86400 seconds.')
  return value


def complete(config: ConfigLike) -> None:
  """Raises UserError for a field that is missing, unknown or of another type."""
  _complete(config, default(), 'config')


def check(config: ConfigLike) -> None:
  """Raises UserError for a field that is missing, unknown, of another type or out of range.

  Names of functions, and what depends on devices, data or the model, are checked elsewhere.
  """
  silent_s(config)
  for names, least in _WHOLE_NUMBERS:
    for name in names:
      _whole(config, name, least)
  for name in _POSITIVE:
    _positive(config, name)
  for name, options in _ONE_OF.items():
    if _value(config, name) not in options:
      text = ', '.join(map(str, options))
      raise UserError(f'config.{name}={_value(config, name)!r} must be one of: {text}.')
  _check_numbers(config)
  _check_32_bits(config, 'config')
  _check_settings(config, default(), 'config')
  _check_sampling(config.evaluation.sampling)
  _check_batch(config)
  _check_targets(config.lora)
  _check_mesh(config.mesh)


# (fields, least value)
_WHOLE_NUMBERS = (
  (('prompt_tokens', 'rollouts', 'learner.minibatches', 'learner.passes'), 1),
  (('monitoring.rollouts_every',), 1),
  (('steps', 'prompts', 'seed', 'learner.microbatch_tokens', 'monitoring.rollouts_tokens'), 0),
  (('completion_tokens',), 2),
  (
    tuple(
      f'scratch.{name}'
      for name in (
        *('experts_per_token', 'heads', 'kv_heads', 'layers'),
        *('max_tokens', 'mlp', 'width'),
      )
    ),
    1,
  ),
  (('scratch.experts', 'rollout.slots', 'rollout.ngram.draft', 'optimizer.warmup_steps'), 0),
  (('objective.head_chunk_tokens', 'rollout.max_age', 'rollout.windows', 'lag_steps'), 1),
  (('rollout.test_every', 'rollout.draft_memory_mb', 'rollout.ngram.match'), 1),
  (('curriculum.slots_per_prompt', 'optimizer.max_skipped'), 1),
  (('data.size', 'data.seed', 'evaluation.every', 'evaluation.prompts', 'evaluation.samples'), 0),
  (('checkpoint.every', 'checkpoint.keep', 'sft.prompts'), 1),
  (('processes.same_every', 'lora.rank', 'sft.steps', 'mesh.slices'), 0),
)
_POSITIVE = (
  *('temperature', 'optimizer.learning_rate', 'optimizer.clip_norm', 'optimizer.eps'),
  *('lora.alpha', 'sft.learning_rate'),
)
_ONE_OF: dict[str, tuple[bool | str, ...]] = {
  'dtype': ('auto', 'float32', 'bfloat16'),
  'optimizer.moments_dtype': ('float32', 'bfloat16'),
  'lora.base_dtype': ('auto', 'int8', 'nf4'),
  'rollout.cache_dtype': ('auto', 'float32', 'bfloat16', 'int8'),
  'mode': ('fused', 'lag', 'split'),
  'learner.remat': ('auto', True, False),
}


def _value(config: ConfigLike, name: str) -> Any:
  value: Any = config
  for part in name.split('.'):
    value = value[part]
  return value


def _whole(config: ConfigLike, name: str, least: int) -> None:
  value = _value(config, name)
  if value < least:
    raise UserError(f'config.{name}={value!r} must be a whole number of at least {least}.')


def _positive(config: ConfigLike, name: str) -> None:
  value = _value(config, name)
  if not (value > _TINY and math.isfinite(value)):
    raise UserError(f'config.{name}={value!r} must be a finite number above 0.')


def _check_numbers(c: ConfigLike) -> None:
  """Ranges of single fields that are neither counts nor positive."""
  every_s = c.monitoring.report_every_s
  if not (every_s >= 0 and math.isfinite(every_s)):
    raise UserError(
      f'config.monitoring.report_every_s={every_s!r} must be a finite number from 0 up.'
    )
  for name in ('b1', 'b2'):
    value = c.optimizer[name]
    if not 0 <= value < 1:
      raise UserError(f'config.optimizer.{name}={value!r} must be from 0 to 1, 1 not included.')
  if not 0 <= c.curriculum.kind_decay <= 1:
    raise UserError(
      f'config.curriculum.kind_decay={c.curriculum.kind_decay!r} must be from 0 to 1.'
    )
  if c.optimizer.weight_decay < 0:
    raise UserError(
      f'config.optimizer.weight_decay={c.optimizer.weight_decay} must not be below 0.'
    )
  if not c.reward_model.center_rewards_coefficient >= 0:
    raise UserError(
      f'config.reward_model.center_rewards_coefficient={c.reward_model.center_rewards_coefficient} must be a number '
      'from 0 up.'
    )
  if c.seed >= 2**31:
    raise UserError(f'config.seed={c.seed} must be below 2**31.')
  if c.lag_steps > 1 and c.mode != 'lag':
    raise UserError(
      f"config.lag_steps={c.lag_steps} needs config.mode='lag', not {c.mode!r}; set --config.mode=lag, or leave it 1."
    )
  if c.rollout.ngram.draft >= c.completion_tokens:
    raise UserError(
      f'config.rollout.ngram.draft={c.rollout.ngram.draft} must be below '
      f'config.completion_tokens={c.completion_tokens}; 4 is a good start.'
    )


def _complete(part: Any, reference: ml_collections.ConfigDict, field: str) -> None:
  """All fields of the defaults, with their types, and no others; for stages see `stages.pick`."""
  if not isinstance(part, _SECTIONS):
    raise UserError(f'{field}={part!r} must be a dict of: {", ".join(reference.keys())}.')
  for key, old in reference.items():
    where = f'{field}.{key}'
    if key not in part or part[key] is None:
      example = '' if isinstance(old, ml_collections.ConfigDict) else f' such as {old!r}'
      raise UserError(f'{where} is missing; give it a value{example}.')
    if isinstance(old, ml_collections.ConfigDict):
      (_named if is_stage(old, where) else _complete)(part[key], old, where)
    else:
      of_type(part[key], old, where)
  for key in part:
    if key not in reference:
      raise UserError(f'{field}.{key} is unknown; {near(key, reference.keys())}.')


def _named(part: Any, reference: ml_collections.ConfigDict, field: str) -> None:
  """A stage and the stages in it; its settings are checked by `stages.pick`."""
  if not isinstance(part, _SECTIONS) or 'fn' not in part:
    raise UserError(f'{field}.fn is missing; give it a value such as {reference.fn!r}.')
  if not isinstance(part['fn'], str):
    raise UserError(f'{field}.fn={part["fn"]!r} must be a name, such as {reference.fn!r}.')
  check_plain(part, field)
  for key, old in reference.items():
    inner, where = part.get(key), f'{field}.{key}'
    if isinstance(old, ml_collections.ConfigDict) and 'fn' in old:
      _named(inner, old, where)
    elif isinstance(old, ml_collections.ConfigDict) and not isinstance(inner, _SECTIONS):
      raise UserError(f'{where}={inner!r} must be a dict of: {", ".join(old.keys())}.')


# (range, test, settings of named functions): by name, or by 'function.name' where functions differ. Other settings may
# be any finite number, or are checked where they are used.
_RANGES: tuple[tuple[str, Callable[[float], bool], tuple[str, ...]], ...] = (
  (
    'above 0',
    lambda x: x > _TINY,
    (
      *('eps', 'temperature', 'temperature_negative', 'learning_rate', 'delta', 'budget', 'most'),
      *('strength', 'deviations', 'clip', 'per_row', 'slope', 'scale', 'balanced_clip.target'),
    ),
  ),
  (
    'of at least 0',
    lambda x: x >= 0,
    (
      *('low', 'high', 'outer_low', 'outer_high', 'coef', 'factor', 'weight', 'lenience'),
      *('power', 'power_negative', 'decay_negative', 'gamma.decay', 'length_rate', 'wait'),
      *('warmup', 'chord.decay', 'warmup_steps', 'least_tokens', 'uncertain.entropy'),
      'marginal.right',
    ),
  ),
  (
    'from 0 to 1',
    lambda x: 0 <= x <= 1,
    (
      *('share', 'discount', 'trace', 'decay', 'mastered', 'adora.weak', 'start', 'deadline'),
      'adora.right',  # config.rewards.right is in the units of the reward function
      *('abort', 'margin', 'absolute', 'relative', 'suffix', 'rouge', 'edit'),
    ),
  ),
  ('above 0 and at most 1', lambda x: 0 < x <= 1, ('fraction',)),
  (
    'of at least 1',
    lambda x: x >= 1,
    (
      *('buffer_tokens', 'tail', 'max_tokens', 'every', 'period', 'times', 'streak', 'count'),
      'prompt_tokens',
      *('keep', 'depth', 'cosine.low'),
    ),
  ),
  (
    'finite',  # logarithms and covariances
    lambda x: True,
    (
      *('suffix_weighted.low', 'suffix_weighted.high'),
      *('covariance_clip.low', 'covariance_clip.high'),
    ),
  ),
)
_RANGE_OF = {name: (text, fits) for text, fits, names in _RANGES for name in names}


def _check_settings(part: Any, reference: ml_collections.ConfigDict, field: str) -> None:
  """Settings of named functions are within `_RANGES`; their types are checked by `stages.pick`."""
  for key, old in reference.items():
    if isinstance(old, ml_collections.ConfigDict):
      _check_settings(part[key], old, f'{field}.{key}')
  for key, value in part.items() if is_stage(reference, field) else ():
    bound = _RANGE_OF.get(f'{part.fn}.{key}') or _RANGE_OF.get(key)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if bound and number and not bound[1](value):
      raise UserError(f'{field}.{key}={value!r} of {part.fn!r} must be a number {bound[0]}.')


def _check_32_bits(part: Any, field: str) -> None:
  """Integers fit in int32 and floats in float32; settings of single data sources are exempt."""
  for key, value in part.items():
    if isinstance(value, (*_SECTIONS, dict)):
      _check_32_bits(value, f'{field}.{key}')
    elif isinstance(value, int) and not -(2**31) <= value < 2**31:
      raise UserError(f'{field}.{key}={value!r} must be below 2**31.')
    elif isinstance(value, float) and abs(value) > 3.4e38:
      raise UserError(f'{field}.{key}={value!r} is no number of float32; give one below 3.4e38.')


def _check_sampling(sampling: SamplingConfig | ml_collections.ConfigDict) -> None:
  where = 'config.evaluation.sampling'
  if sampling.top_k < 0:
    raise UserError(f'{where}.top_k={sampling.top_k!r} must be a whole number of at least 0.')
  bounds = dict(temperature=(0, math.inf), top_p=(1e-6, 1), min_p=(0, 1))
  for name, (low, high) in bounds.items():
    value = getattr(sampling, name)
    if not low <= value <= high:
      raise UserError(f'{where}.{name}={value} must be from {low} to {high}.')


def _check_batch(c: ConfigLike) -> None:
  """Minibatches divide the prompts, and a microbatch has room for the longest row."""
  if c.prompts % c.learner.minibatches:
    raise UserError(
      f'config.learner.minibatches={c.learner.minibatches} does not divide '
      f'config.prompts={c.prompts}; choose a divisor.'
    )
  tokens, longest = c.learner.microbatch_tokens, c.prompt_tokens + c.completion_tokens - 1
  if tokens and tokens < longest:
    raise UserError(
      f'config.learner.microbatch_tokens={tokens} is less than the longest row, config.prompt_tokens='
      f'{c.prompt_tokens} + config.completion_tokens={c.completion_tokens} - 1; set it to at least {longest}, or to 0.'
    )


def _check_targets(lora: LoraConfig | ml_collections.ConfigDict) -> None:
  """config.lora.targets is a regular expression; whether a matrix matches depends on the model."""
  try:
    re.compile(lora.targets)
  except (re.error, OverflowError, RecursionError) as error:
    raise UserError(
      f'config.lora.targets={lora.targets!r} is no regular expression ({error}); give one such as (q|k|v|o)$.'
    ) from error


def _check_mesh(mesh: MeshConfig | ml_collections.ConfigDict) -> None:
  axes = (axis for axis in mesh.keys() if axis not in ('preset', 'rules', 'slices'))
  sizes = {axis: getattr(mesh, axis) for axis in axes}
  for axis, size in sizes.items():
    if not (size == -1 or size >= 1):
      raise UserError(f'config.mesh.{axis}={size} must be at least 1, or -1 for all that is left.')
  rest = [axis for axis, size in sizes.items() if size == -1]
  if len(rest) > 1:
    raise UserError(
      f'config.mesh.{rest[0]} and config.mesh.{rest[1]} are both -1; one axis can take all that is '
      'left.'
    )

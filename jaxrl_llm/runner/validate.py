"""What a configuration must be before anything is loaded: complete, of the right types, in range."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import ml_collections

from jaxrl_llm.config.loading import check_plain, default, near, of_type
from jaxrl_llm.distributed.hardware import SLICES
from jaxrl_llm.learner.precision import TYPES
from jaxrl_llm.monitoring import console, trace_window, trackers
from jaxrl_llm.types import UserError


def sized(config: ml_collections.ConfigDict, devices: Sequence[Any]) -> ml_collections.ConfigDict:
  """A copy whose automatic fields are set for these devices: `prompts`. Source: none."""
  _complete(config, default(), 'config')
  config = config.copy_and_resolve_references()
  if config.prompts == 0:
    shards = max(len(devices) // max(config.mesh.tensor, 1), 1)  # tensor: devices that share rows
    wanted = 4 if devices[0].platform == 'cpu' else 64
    config.prompts = math.ceil(wanted / shards) * shards
  return config


def silent_s(config: ml_collections.ConfigDict) -> float:
  """config.processes.silent_s, checked: it is needed before this process has joined the others. Source: none."""
  _complete(config, default(), 'config')
  value = config.processes.silent_s
  if not 1 <= value <= 86400:
    raise UserError(f'config.processes.silent_s={value!r} must be from 1 to 86400 seconds.')
  return value


# Advantages that say nothing of a lone row.
OF_A_GROUP = (
  'group_normalized',
  'group_centered',
  'group_whitened',
  'leave_one_out',
  'batch_normalized',
  'mean_relative',
  'median_centered',
  'shifted',
  'log_mean_exp',
  'length_weighted',
  'adora',
  'least_variance',
  'equal_treatment',
  'hardness_weighted',
  'decoupled',
  'nudged',
)


def validate(config: ml_collections.ConfigDict) -> None:
  """Raises UserError for a field missing, unknown, of another type or out of range. Source: none.

  It runs before anything is loaded, so that what depends on devices, data or the model, and the
  names of functions, are checked elsewhere.
  """
  c = config
  silent_s(c)
  _whole(c, 'config', 1, 'prompt_tokens', 'rollouts')
  _whole(c.learner, 'config.learner', 1, 'minibatches')
  _whole(c.monitoring, 'config.monitoring', 1, 'rollouts_every')
  _whole(c, 'config', 0, 'steps')
  _whole(c, 'config', 2, 'completion_tokens')
  _whole(c, 'config', 0, 'prompts', 'seed')
  _whole(c.learner, 'config.learner', 0, 'microbatch_rollouts')
  _whole(c.monitoring, 'config.monitoring', 0, 'rollouts_tokens')
  _whole(c.scratch, 'config.scratch', 1, *(name for name in c.scratch if name != 'experts'))
  _whole(c.scratch, 'config.scratch', 0, 'experts')
  _whole(c.objective, 'config.objective', 1, 'head_chunk_tokens')
  _whole(c.rollout, 'config.rollout', 0, 'slots')
  _whole(c.rollout, 'config.rollout', 1, 'max_age', 'windows', 'test_every', 'draft_memory_mb')
  _whole(c.rollout.ngram, 'config.rollout.ngram', 0, 'draft')
  _whole(c.rollout.ngram, 'config.rollout.ngram', 1, 'match')
  _whole(c.curriculum, 'config.curriculum', 1, 'slots_per_prompt')
  _whole(c.optimizer, 'config.optimizer', 0, 'warmup_steps')
  _whole(c.optimizer, 'config.optimizer', 1, 'max_skipped')
  _whole(c.data, 'config.data', 0, 'size', 'seed')
  _whole(c.evaluation, 'config.evaluation', 0, 'every', 'prompts', 'samples')
  _whole(c.checkpoint, 'config.checkpoint', 1, 'every', 'keep')
  _whole(c.processes, 'config.processes', 0, 'same_every')
  _whole(c.lora, 'config.lora', 0, 'rank')
  _whole(c.sft, 'config.sft', 0, 'steps', 'pack_tokens')
  _whole(c.sft, 'config.sft', 1, 'prompts')
  if not c.steps and not c.sft.steps:
    raise UserError(
      'config.steps=0 trains nothing without a supervised start; raise it, or config.sft.steps.'
    )
  _positive(c, 'config', 'temperature')
  if not (c.monitoring.report_every_s >= 0 and math.isfinite(c.monitoring.report_every_s)):
    raise UserError(
      f'config.monitoring.report_every_s={c.monitoring.report_every_s!r} must be a finite number from 0 up.'
    )
  _positive(c.optimizer, 'config.optimizer', 'learning_rate', 'clip_norm', 'eps')
  _positive(c.lora, 'config.lora', 'alpha')
  _positive(c.sft, 'config.sft', 'learning_rate')
  _share(c.optimizer, 'config.optimizer', 'b1', 'b2')
  _share(c.curriculum, 'config.curriculum', 'kind_decay', last=True)
  if c.optimizer.weight_decay < 0:
    raise UserError(
      f'config.optimizer.weight_decay={c.optimizer.weight_decay} must not be below 0.'
    )
  if c.seed >= 2**31:
    raise UserError(f'config.seed={c.seed} must be below 2**31.')
  if c.dtype not in ('auto', 'float32', 'bfloat16'):
    raise UserError(f'config.dtype={c.dtype!r} must be one of: auto, float32, bfloat16.')
  cache_dtypes = ('auto', 'float32', 'bfloat16', 'int8')
  if c.rollout.cache_dtype not in cache_dtypes:
    raise UserError(
      f'config.rollout.cache_dtype={c.rollout.cache_dtype!r} must be one of: {", ".join(cache_dtypes)}.'
    )
  weights_dtypes = ('auto', *TYPES)
  if c.rollout.weights_dtype not in weights_dtypes:
    raise UserError(
      f'config.rollout.weights_dtype={c.rollout.weights_dtype!r} must be one of: {", ".join(weights_dtypes)}.'
    )
  if c.mode not in ('fused', 'lag', 'split'):
    raise UserError(f'config.mode={c.mode!r} must be one of: fused, lag, split.')
  if c.learner.remat not in ('auto', True, False):
    raise UserError(f'config.learner.remat={c.learner.remat!r} must be one of: auto, True, False.')
  if c.rollout.ngram.draft >= c.completion_tokens:
    raise UserError(
      f'config.rollout.ngram.draft={c.rollout.ngram.draft} must be below '
      f'config.completion_tokens={c.completion_tokens}; 4 is a good start.'
    )
  _check_sizes(c, 'config')
  _check_settings(c, default(), 'config')
  _check_sampling(c.evaluation.sampling)
  _check_batch(c)
  _check_teacher(c.objective)
  _check_lora(c)
  _check_mesh(c.mesh)
  if c.monitoring.console not in console.KINDS:
    raise UserError(
      f'config.monitoring.console={c.monitoring.console!r} must be one of: {", ".join(console.KINDS)}.'
    )
  trackers.check(c.monitoring.trackers)
  trace_window.window(c.monitoring.profile.steps)


def _complete(part: Any, reference: ml_collections.ConfigDict, field: str) -> None:
  """Every field of the defaults is there, with their types, and no other. Parts with fn: see pick."""
  if not isinstance(part, ml_collections.ConfigDict):
    raise UserError(f'{field}={part!r} must be a dict of: {", ".join(reference.keys())}.')
  for key, old in reference.items():
    where, whole = f'{field}.{key}', isinstance(old, ml_collections.ConfigDict)
    if key not in part or part[key] is None:
      such = '' if whole else f' such as {old!r}'
      raise UserError(f'{where} is missing; give it a value{such}.')
    if not whole:
      of_type(part[key], old, where)
    else:
      (_named if 'fn' in old else _complete)(part[key], old, where)
  for key in part:
    if key not in reference:
      raise UserError(f'{field}.{key} is unknown; {near(key, reference.keys())}.')


# What a setting of a named function must be, by its name, or by 'function.name' where that says more. What is not here
# may be any finite number, or is checked where it is used.
_TINY = 1e-30  # what a float32 can be divided by
_RANGES = (
  (
    'above 0',
    lambda x: x > _TINY,
    *('eps', 'temperature', 'temperature_negative', 'learning_rate', 'delta', 'budget', 'most'),
    *('strength', 'deviations', 'clip', 'per_row', 'slope', 'scale', 'balanced_clip.target'),
  ),
  (
    'of at least 0',
    lambda x: x >= 0,
    *('low', 'high', 'outer_low', 'outer_high', 'coef', 'factor', 'weight', 'lenience'),
    *('power', 'power_negative', 'decay_negative', 'gamma.decay', 'length_rate', 'wait', 'warmup'),
    *('chord.decay', 'warmup_steps', 'least_tokens', 'uncertain.entropy', 'marginal.right'),
  ),
  (
    'from 0 to 1',
    lambda x: 0 <= x <= 1,
    *(
      'share',
      'discount',
      'trace',
      'decay',
      'mastered',
      'adora.weak',
      'adora.right',  # config.rewards.right is in the units of the grader
      'start',
      'deadline',
    ),
    *('abort', 'margin', 'absolute', 'relative', 'suffix', 'rouge', 'edit'),
  ),
  ('above 0 and at most 1', lambda x: 0 < x <= 1, 'fraction'),
  (
    'of at least 1',
    lambda x: x >= 1,
    *('buffer_tokens', 'tail', 'max_tokens', 'every', 'period', 'times', 'streak', 'count', 'keep'),
    *('depth', 'cosine.low'),
  ),
  (
    'finite',  # logarithms and covariances
    lambda x: True,
    *('suffix_weighted.low', 'suffix_weighted.high', 'covariance_clip.low', 'covariance_clip.high'),
  ),
)
_RANGE_OF = {name: (told, fits) for told, fits, *names in _RANGES for name in names}


def _named(part: Any, reference: ml_collections.ConfigDict, field: str) -> None:
  """A part that names a function, and parts in it; what else it holds is for pick."""
  if not isinstance(part, ml_collections.ConfigDict) or 'fn' not in part:
    raise UserError(f'{field}.fn is missing; give it a value such as {reference.fn!r}.')
  if not isinstance(part.fn, str):
    raise UserError(f'{field}.fn={part.fn!r} must be a name, such as {reference.fn!r}.')
  check_plain(part, field)
  for key, old in reference.items():
    inner, where = part.get(key), f'{field}.{key}'
    if isinstance(old, ml_collections.ConfigDict) and 'fn' in old:
      _named(inner, old, where)
    elif isinstance(old, ml_collections.ConfigDict) and not isinstance(inner, type(old)):
      raise UserError(f'{where}={inner!r} must be a dict of: {", ".join(old.keys())}.')


def _check_settings(part: Any, reference: ml_collections.ConfigDict, field: str) -> None:
  """The settings of every named function lie where `_RANGES` says; their types are for `pick`."""
  for key, old in reference.items():
    if isinstance(old, ml_collections.ConfigDict):
      _check_settings(part[key], old, f'{field}.{key}')
  for key, value in part.items() if 'fn' in reference else ():
    told, fits = _RANGE_OF.get(f'{part.fn}.{key}') or _RANGE_OF.get(key) or ('', None)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if fits and number and not fits(value):
      raise UserError(f'{field}.{key}={value!r} of {part.fn!r} must be a number {told}.')


def _check_sizes(part: Any, field: str) -> None:
  """Counts go through 32 bits and numbers through float32; rows' own settings (config.data.tasks) do not."""
  for key, value in part.items():
    if isinstance(value, ml_collections.ConfigDict):
      _check_sizes(value, f'{field}.{key}')
    elif isinstance(value, int) and not -(2**31) <= value < 2**31:
      raise UserError(f'{field}.{key}={value!r} must be below 2**31.')
    elif isinstance(value, float) and abs(value) > 3.4e38:
      raise UserError(f'{field}.{key}={value!r} is no number of float32; give one below 3.4e38.')


def _check_sampling(sampling: ml_collections.ConfigDict) -> None:
  where = 'config.evaluation.sampling'
  _whole(sampling, where, 0, 'top_k')
  bounds = dict(temperature=(0, math.inf), top_p=(1e-6, 1), min_p=(0, 1))
  for name, (low, high) in bounds.items():
    if not low <= sampling[name] <= high:
      raise UserError(f'{where}.{name}={sampling[name]} must be from {low} to {high}.')


def _check_batch(c: ml_collections.ConfigDict) -> None:
  if c.rollouts < 2 and c.objective.advantage.fn in OF_A_GROUP:
    raise UserError(
      f'config.rollouts={c.rollouts} leaves nothing to compare in a group for '
      f'config.objective.advantage.fn={c.objective.advantage.fn!r}; give at least 2.'
    )
  if c.rollouts < 2 and c.objective.auxiliary_model.fn == 'preference':
    raise UserError(
      f'config.rollouts={c.rollouts} leaves no pair of rows for '
      "config.objective.auxiliary_model.fn='preference'; give at least 2."
    )
  if c.prompts % c.learner.minibatches:
    raise UserError(
      f'config.learner.minibatches={c.learner.minibatches} does not divide '
      f'config.prompts={c.prompts}; choose a divisor.'
    )
  replayed = c.replay.reuse.get(
    'count', 0
  )  # these rows are learned, too; what is no number is for `pick`
  group = c.rollouts + (replayed if isinstance(replayed, int) else 0)
  rows, slice_rows = c.prompts * group // c.learner.minibatches, c.learner.microbatch_rollouts
  if slice_rows and (
    rows % slice_rows or (slice_rows % group and group % slice_rows)
  ):  # prompts = 0, rows = 0: `sized` has not chosen yet, and only the second can be checked
    raise UserError(
      f'config.learner.microbatch_rollouts={slice_rows} must divide the {rows} rows of a minibatch, and be '
      f'a multiple or a divisor of {_rows_of(c)}; 0 takes all rows at once.'
    )


def _check_teacher(objective: ml_collections.ConfigDict) -> None:
  named, used = objective.teacher, objective.distillation.fn
  if used != 'none' and not named:
    raise UserError(
      f"config.objective.teacher='' is empty and config.objective.distillation.fn={used!r} needs one; name a "
      'model as config.model does.'
    )
  if named and used == 'none':
    raise UserError(
      f'config.objective.teacher={named!r} teaches nothing; set config.objective.distillation.fn=on_policy, or '
      'leave it empty.'
    )


def _check_lora(c: ml_collections.ConfigDict) -> None:
  """Which matrices there are to match, the model says: see `lora.settings`."""
  try:
    re.compile(c.lora.targets)
  except (re.error, OverflowError, RecursionError) as error:
    raise UserError(
      f'config.lora.targets={c.lora.targets!r} is no regular expression ({error}); give one such as (q|k|v|o)$.'
    ) from error
  if c.lora.init and not c.lora.rank:
    raise UserError(
      f'config.lora.init={c.lora.init!r} is an adapter and config.lora.rank=0 trains none; set rank to that of '
      'the adapter, or leave init empty.'
    )
  if c.lora.rank and c.sft.steps:
    raise UserError(
      f'config.lora.rank={c.lora.rank} keeps the weights as they were loaded, and config.sft.steps={c.sft.steps} '
      'changes them first; set one of them to 0.'
    )
  if c.lora.rank and c.objective.auxiliary_model.fn != 'none':
    raise UserError(
      f'config.lora.rank={c.lora.rank} spares the memory of training all weights, and config.objective.auxiliary_model.fn='
      f'{c.objective.auxiliary_model.fn!r} trains those of a second model; set rank=0, or fn=none.'
    )


def _rows_of(c: ml_collections.ConfigDict) -> str:
  more = f' + config.replay.reuse.count={c.replay.reuse.count}' if 'count' in c.replay.reuse else ''
  return f'config.rollouts={c.rollouts}{more}'


def _check_mesh(mesh: ml_collections.ConfigDict) -> None:
  sizes = {axis: size for axis, size in mesh.items() if axis not in ('preset', 'rules')}
  if mesh.preset and mesh.preset not in SLICES:
    raise UserError(
      f'config.mesh.preset={mesh.preset!r} is unknown; choose one of: {", ".join(SLICES)}, or set the axes.'
    )
  if mesh.preset and (mesh.data, mesh.fsdp) != (1, -1):
    raise UserError(
      f'config.mesh.preset={mesh.preset!r} says what data and fsdp are, and config.mesh.data={mesh.data}, fsdp='
      f'{mesh.fsdp} say it again; leave one of them at its default.'
    )
  for axis, size in sizes.items():
    if not (size == -1 or size >= 1):
      raise UserError(f'config.mesh.{axis}={size} must be at least 1, or -1 for all that is left.')
  rest = [axis for axis, size in sizes.items() if size == -1]
  if len(rest) > 1:
    raise UserError(
      f'config.mesh.{rest[0]} and config.mesh.{rest[1]} are both -1; one axis can take all that is '
      'left.'
    )


def _whole(part: Any, field: str, least: int, *names: str) -> None:
  for name in names:
    if part[name] < least:
      raise UserError(f'{field}.{name}={part[name]!r} must be a whole number of at least {least}.')


def _positive(part: Any, field: str, *names: str) -> None:
  for name in names:
    if not (part[name] > _TINY and math.isfinite(part[name])):
      raise UserError(f'{field}.{name}={part[name]!r} must be a finite number above 0.')


def _share(part: Any, field: str, *names: str, last: bool = False) -> None:
  for name in names:
    if not (0 <= part[name] < 1 or (last and part[name] == 1)):
      raise UserError(
        f'{field}.{name}={part[name]!r} must be from 0 to 1{"" if last else ", 1 not included"}.'
      )

"""The configuration: its defaults, how a file and overrides are laid over them, and `pick`."""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.util
import inspect
import math
import os
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

import ml_collections

from jaxrl_llm.types import UserError


def default() -> ml_collections.ConfigDict:
  """Returns every field with its default; a file of configs/ names only what it changes. Source: none."""
  c = ml_collections.ConfigDict()
  c.model = 'smollm2-135m'  # that name, a folder, a .gguf file, a wheel, or a hub name
  # for model='scratch': a character-level decoder drawn at random
  c.scratch = dict(width=128, layers=5, heads=4, kv_heads=4, mlp=512, max_tokens=128)
  c.dtype = 'auto'  # of compute; auto = bfloat16 on TPU and GPU, float32 on CPU
  c.seed = 0
  c.steps = 60
  c.prompts = (
    0  # P: prompts per step; 0 = 4 on a CPU, 64 on accelerators, a multiple of what cuts the batch
  )
  c.rollouts = 8  # G: rollouts per prompt
  c.prompt_tokens = 64  # L: longer prompts are dropped, and counted
  c.completion_tokens = 16  # T: the cap on a rollout
  c.temperature = 1.0
  c.updates_per_rollout = 1  # minibatches (optimizer steps) per batch; 1 = strictly on-policy
  c.microbatch_rollouts = 0  # rows per gradient-accumulation slice; 0 = the whole minibatch
  c.remat = (
    'auto'  # recompute layer activations in the backward pass: auto = not on CPU; or True, False
  )
  c.objective = dict(
    advantage=dict(fn='group_normalized', eps=1e-6),
    ratio=dict(fn='token'),
    trust=dict(fn='clip', low=0.2, high=0.2),
    aggregate=dict(fn='sequence_mean'),
    shape=dict(fn='none'),  # changes rewards by length, before advantages
    zero_variance=dict(fn='keep'),  # keep | mask: do all-equal groups count in the denominator
    head_chunk_tokens=512,  # rows of logits that exist at once
  )
  c.optimizer = dict(
    learning_rate=1e-5,
    warmup_steps=0,
    decay='constant',  # constant | cosine | linear, over the steps after warm-up
    weight_decay=0.0,
    b1=0.9,
    b2=0.95,
    eps=1e-8,
    clip_norm=1.0,
    max_skipped=5,  # stop after so many non-finite gradients in a row
  )
  c.curriculum = dict(
    candidates=dict(fn='everything'),
    forget=dict(fn='visit', decay=0.25),
    share=dict(fn='kind', strength=2.0),
    kind_decay=0.9,  # of a kind's evidence, per visit to one of its prompts
    value=dict(fn='mean'),
    utility=dict(fn='mixed_group'),
    pick=dict(fn='softmax', temperature=0.05),
    gate=dict(fn='audit', share=0.05),
  )
  c.data = dict(
    source='gym',  # gym | jsonl | digits
    path='',  # for jsonl
    eval_path='',  # for jsonl: held-out rows; '' = a seeded split of `path`
    # for gym: each task is a reasoning-gym generator, how many rows, and its settings
    tasks=(),
    size=0,  # rows of the training set; 0 = all (jsonl), 1024 (gym, digits)
    seed=0,
    system='',  # a system message in front of every prompt
    template='{question}',  # how a question becomes the user's message
    chat=True,  # wrap in the model's chat template
  )
  c.grade = dict(fn='exact', workers=2, deadline_s=10.0)
  c.eval = dict(
    every=0, prompts=200, samples=4
  )  # every: steps between evaluations; 0 = before and after only
  c.checkpoint = dict(every=20, keep=2)
  c.rollouts_every = 1  # steps between rollout files
  c.mesh = dict(data=1, fsdp=-1, tensor=1)  # -1 = all devices that are left
  c.sft = dict(
    steps=0, learning_rate=3e-3, prompts=64
  )  # supervised warm start through the same update
  return c


def pick(module: ModuleType, spec: Any, field: str = '') -> Callable:
  """Resolves `dict(fn='name', **keywords)` to `partial(module.name, **keywords)`. Source: none.

  Only public functions defined in `module` count, and only keyword-only parameters may be set.
  Raises UserError that lists the valid names.
  """
  spec = dict(spec)
  name = spec.pop('fn', None)
  field = field or module.__name__.rsplit('.', 1)[-1]
  valid = choices(module)
  if name not in valid:
    raise UserError(
      f'config.{field}.fn={name!r} is unknown; choose one of: {", ".join(sorted(valid))}.'
    )
  fn = valid[name]
  allowed = [p.name for p in inspect.signature(fn).parameters.values() if p.kind == p.KEYWORD_ONLY]
  for key in spec:
    if key not in allowed:
      raise UserError(
        f'config.{field}.{key}={spec[key]!r} is not a setting of {name!r}, which takes: '
        f'{", ".join(allowed) or "none"}.'
      )
  required = [
    p.name
    for p in inspect.signature(fn).parameters.values()
    if p.kind == p.KEYWORD_ONLY and p.default is p.empty and p.name not in spec
  ]
  if required:
    raise UserError(f'config.{field}.{required[0]} is missing; {name!r} needs it.')
  return functools.partial(fn, **spec)


def choices(module: ModuleType) -> dict[str, Callable]:
  """The public functions that a config may name in `module`. Source: none."""
  return {
    name: fn
    for name, fn in vars(module).items()
    if inspect.isfunction(fn) and fn.__module__ == module.__name__ and not name.startswith('_')
  }


def load(path: str = '', overrides: Sequence[str] = ()) -> ml_collections.ConfigDict:
  """Lays a file of configs/ over the defaults, then overrides such as `--config.a.b=v`. Source: none.

  The file's `get_config()` names only what it changes. A part with an `fn` replaces the default part
  whole. Raises UserError for a missing file and for unknown fields, with the nearest valid name.
  """
  config = default()
  if path:
    _merge(config, _read(path), 'config')
  for override in overrides:
    _override(config, override)
  return config


def _read(path: str) -> dict:
  if not os.path.isfile(path):
    raise UserError(f'--config={path} does not exist; give a file such as configs/dapo.py.')
  spec = importlib.util.spec_from_file_location('jaxrl_llm_user_config', path)
  if spec is None:
    raise UserError(f'--config={path} is not a Python file; give one such as configs/dapo.py.')
  module = importlib.util.module_from_spec(spec)
  try:
    spec.loader.exec_module(module)
    told = module.get_config()
  except Exception as error:  # the file is the user's program: anything may come
    raise UserError(f'--config={path} fails ({type(error).__name__}: {error}); mend it.') from error
  return told.to_dict() if isinstance(told, ml_collections.ConfigDict) else dict(told)


def _merge(config: ml_collections.ConfigDict, changes: dict, field: str) -> None:
  for key, value in changes.items():
    if key not in config:
      raise UserError(f'{field}.{key} is unknown; {_near(key, config.keys())}.')
    old = config[key]
    if isinstance(old, ml_collections.ConfigDict) and 'fn' not in old:
      if not isinstance(value, dict):
        raise UserError(f'{field}.{key}={value!r} must be a dict of: {", ".join(old.keys())}.')
      _merge(old, value, f'{field}.{key}')
    else:
      _set(config, key, value, f'{field}.{key}')


def _override(config: ml_collections.ConfigDict, text: str) -> None:
  name, equals, raw = text.removeprefix('--config.').partition('=')
  *parents, leaf = name.split('.')
  part, field = config, 'config'
  for parent in parents:
    if parent not in part or not isinstance(part[parent], ml_collections.ConfigDict):
      raise UserError(f'--{field}.{parent} is unknown; {_near(parent, part.keys())}.')
    part, field = part[parent], f'{field}.{parent}'
  if not equals:
    raise UserError(f'{text} has no value; write --config.{name}=VALUE.')
  if leaf not in part:
    if 'fn' not in part:
      raise UserError(f'--{field}.{leaf} is unknown; {_near(leaf, part.keys())}.')
    part[leaf] = _literal(raw)  # a setting of the function: pick checks its name
    return
  if leaf == 'fn' and raw != part['fn']:
    part.clear()  # settings of another function would be stale
    part['fn'] = raw
    return
  value = raw if isinstance(part[leaf], str) and leaf not in _MIXED else _literal(raw)
  _set(part, leaf, value, f'{field}.{leaf}')


_MIXED = ('remat',)  # 'auto' or a bool


def _set(part: ml_collections.ConfigDict, key: str, value: Any, field: str) -> None:
  """Assigns with the type of what was there; an int may stand for a float."""
  old = part[key]
  if value is None:
    raise UserError(f'{field} is missing; give it a value such as {old!r}.')
  if isinstance(value, dict):
    value = ml_collections.ConfigDict(value)
  if isinstance(old, float) and isinstance(value, int) and not isinstance(value, bool):
    value = float(value)
  if isinstance(old, tuple) and isinstance(value, list):
    value = tuple(value)
  if key not in _MIXED and type(value) is not type(old):
    raise UserError(f'{field}={value!r} must be of type {type(old).__name__}, such as {old!r}.')
  with part.ignore_type():
    part[key] = value


def _literal(raw: str) -> Any:
  try:
    return ast.literal_eval({'true': 'True', 'false': 'False'}.get(raw, raw))
  except (ValueError, SyntaxError):
    return raw


def _near(name: str, valid: Iterable[str]) -> str:
  close = difflib.get_close_matches(name, list(valid), n=1)
  return f'did you mean {close[0]}?'.rstrip('?') if close else f'valid: {", ".join(sorted(valid))}'


def sized(config: ml_collections.ConfigDict, devices: Sequence[Any]) -> ml_collections.ConfigDict:
  """A copy whose automatic fields are set for these devices: `prompts`. Source: none."""
  config = config.copy_and_resolve_references()
  if config.prompts == 0:
    tensor = max(config.mesh.tensor, 1)
    shards = max(len(devices) // tensor, 1)
    wanted = 4 if devices[0].platform == 'cpu' else 64
    config.prompts = math.ceil(wanted / shards) * shards
  return config


def validate(config: ml_collections.ConfigDict) -> None:
  """Raises UserError for a value out of range, before anything is loaded. Source: none."""
  c = config
  _whole(c, 'config', 1, 'prompts', 'prompt_tokens', 'rollouts', 'updates_per_rollout')
  _whole(c, 'config', 1, 'steps', 'rollouts_every')
  _whole(c, 'config', 2, 'completion_tokens')
  _whole(c, 'config', 0, 'microbatch_rollouts', 'seed')
  _whole(c.objective, 'config.objective', 1, 'head_chunk_tokens')
  _whole(c.optimizer, 'config.optimizer', 0, 'warmup_steps')
  _whole(c.optimizer, 'config.optimizer', 1, 'max_skipped')
  _whole(c.eval, 'config.eval', 0, 'every', 'prompts', 'samples')
  _whole(c.checkpoint, 'config.checkpoint', 1, 'every', 'keep')
  _whole(c.sft, 'config.sft', 0, 'steps')
  for part, name, value in (
    ('config', 'temperature', c.temperature),
    ('config.optimizer', 'learning_rate', c.optimizer.learning_rate),
    ('config.optimizer', 'clip_norm', c.optimizer.clip_norm),
  ):
    if not (value > 0 and math.isfinite(value)):
      raise UserError(f'{part}.{name}={value} must be a finite number above 0.')
  if c.dtype not in ('auto', 'float32', 'bfloat16'):
    raise UserError(f'config.dtype={c.dtype!r} must be one of: auto, float32, bfloat16.')
  if c.remat not in ('auto', True, False):
    raise UserError(f'config.remat={c.remat!r} must be one of: auto, True, False.')
  if c.prompts % c.updates_per_rollout:
    raise UserError(
      f'config.updates_per_rollout={c.updates_per_rollout} does not divide config.prompts={c.prompts}; '
      'choose a divisor.'
    )
  rows, slice_rows = c.prompts * c.rollouts // c.updates_per_rollout, c.microbatch_rollouts
  fits = not slice_rows or (
    rows % slice_rows == 0 and (slice_rows % c.rollouts == 0 or c.rollouts % slice_rows == 0)
  )
  if not fits:
    raise UserError(
      f'config.microbatch_rollouts={slice_rows} must divide the {rows} rows of a minibatch, and be a '
      f'multiple or a divisor of config.rollouts={c.rollouts}; 0 takes all rows at once.'
    )
  for axis, size in c.mesh.items():
    if not (size == -1 or size >= 1):
      raise UserError(f'config.mesh.{axis}={size} must be at least 1, or -1 for all that is left.')


def _whole(part: Any, field: str, least: int, *names: str) -> None:
  for name in names:
    if not isinstance(part[name], int) or part[name] < least:
      raise UserError(f'{field}.{name}={part[name]!r} must be a whole number of at least {least}.')

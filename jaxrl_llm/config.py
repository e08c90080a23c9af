"""The configuration: its defaults, how a file and overrides are laid over them, and `pick`."""

from __future__ import annotations

import difflib
import functools
import importlib.util
import inspect
import os
from collections.abc import Callable
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
  c.prompts = 0  # P: prompts per step; 0 = 4 on a CPU, 64 on accelerators, a multiple of what cuts the batch
  c.rollouts = 8  # G: rollouts per prompt
  c.prompt_tokens = 64  # L: longer prompts are dropped, and counted
  c.completion_tokens = 16  # T: the cap on a rollout
  c.temperature = 1.0
  c.updates_per_rollout = 1  # minibatches (optimizer steps) per batch; 1 = strictly on-policy
  c.microbatch_rollouts = 0  # rows per gradient-accumulation slice; 0 = the whole minibatch
  c.remat = 'auto'  # recompute layer activations in the backward pass: auto = not on CPU; or True, False
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
    forget=dict(fn='visit', decay=0.5),
    share=dict(fn='none'),
    value=dict(fn='mean'),
    utility=dict(fn='mixed_group'),
    pick=dict(fn='top'),
    gate=dict(fn='audit', share=0.05),
  )
  c.data = dict(
    source='gym',  # gym | jsonl | digits
    path='',  # for jsonl
    # for gym: each task is a reasoning-gym generator, how many rows, and its settings
    tasks=(),
    size=0,  # rows of the training set; 0 = all (jsonl), 1024 (gym, digits)
    seed=0,
    system='',  # a system message in front of every prompt
    template='{question}',  # how a question becomes the user's message
    chat=True,  # wrap in the model's chat template
  )
  c.grade = dict(fn='exact', workers=2, deadline_s=10.0)
  c.eval = dict(every=0, prompts=200, samples=4)  # every: steps between evaluations; 0 = before and after only
  c.checkpoint = dict(every=20, keep=2)
  c.rollouts_every = 1  # steps between rollout files
  c.mesh = dict(data=1, fsdp=-1, tensor=1)  # -1 = all devices that are left
  c.sft = dict(steps=0, learning_rate=3e-3, prompts=64)  # supervised warm start through the same update
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
    raise UserError(f'config.{field}.fn={name!r} is unknown; choose one of: {", ".join(sorted(valid))}.')
  fn = valid[name]
  allowed = [
    p.name for p in inspect.signature(fn).parameters.values() if p.kind == p.KEYWORD_ONLY
  ]
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

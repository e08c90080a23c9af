"""The configuration: its defaults, how a file and overrides are laid over them, and `pick`."""

from __future__ import annotations

import ast
import difflib
import functools
import inspect
import math
import os
import runpy
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
  # fused | lag: grade while the next step runs, and learn one update late | split: two programs, quick to compile
  c.mode = 'fused'
  c.steps = 60
  # P: prompts per step; 0 = 4 on a CPU, 64 on accelerators, a multiple of what cuts the batch
  c.prompts = 0
  c.rollouts = 8  # G: rollouts per prompt
  c.prompt_tokens = 64  # L: longer prompts are dropped, and counted
  c.completion_tokens = 16  # T: the cap on a rollout
  c.temperature = 1.0
  c.updates_per_rollout = 1  # minibatches (optimizer steps) per batch; 1 = strictly on-policy
  c.microbatch_rollouts = 0  # rows per gradient-accumulation slice; 0 = the whole minibatch
  # recompute layer activations in the backward pass: auto = not on CPU; or True, False
  c.remat = 'auto'
  c.generate = dict(
    slots=0,  # rows decoded at once; 0 = all of them. A finished row hands its slot to a waiting one
    order=dict(fn='fifo'),  # which waiting row goes next
    cap=dict(fn='constant'),  # tokens a row may take, by step
    stop=dict(fn='none'),  # when to go on to the update although rows still run
    draft=dict(fn='none'),  # begin from a prompt's last answers: lenient(lenience), coupled
    exit=dict(fn='none'),  # end a row early: repetition, entropy, marker
    prune=dict(fn='none'),  # begin more rollouts than are learnt from: quality, uniform
    cache_dtype='auto',  # float32, bfloat16 or int8; auto = that of compute
    windows=1,  # widths of the cache, each twice the one before: attention pays for the rows there are
    test_every=1,  # tokens between two looks at whether the loop may end
    # guess tokens from what the group has said: those that hold save rounds, none changes a token
    ngram=dict(match=3, draft=0),  # longest context looked for; tokens guessed a round, 0 = off
    tree=dict(fn='none'),  # rollouts of a group fork from one another: latr, echo
    lockstep=True,  # all devices' loops run equally often; False lets each end by itself
    max_age=4,  # steps over which an unfinished rollout may be continued
    carry_cache=False,  # hand on the keys and values of unfinished rollouts, instead of encoding them again
  )
  c.objective = dict(
    advantage=dict(fn='group_normalized', eps=1e-6),
    credit=dict(fn='row'),  # how a row's advantage is laid over its tokens: gae, process, steps
    # a second model for that credit, which begins as a copy of the policy: critic, outcome, preference
    companion=dict(fn='none'),
    correction=dict(fn='none'),  # for a sampler that is not the old policy; recomputes log-probs
    proximal=dict(fn='auto'),  # the old policy: recorded, before, average(decay), interpolated
    ratio=dict(fn='token'),
    tilt=dict(fn='none'),  # how sure the policy is of a token changes its advantage: unsure
    trust=dict(fn='clip', low=0.2, high=0.2),
    emphasis=dict(fn='none'),  # which tokens count for more or not at all
    # what holds the policy back; k1, k2, k3: a frozen copy of the first weights
    kl=dict(fn='none'),
    aggregate=dict(fn='sequence_mean'),
    lr_scale=dict(fn='none'),  # what a batch is worth: effective_sample_size
    # demonstrations beside rollouts, or instead: chord, replace, likelihood, one_token_rollouts, suffix_weighted
    auxiliary=dict(fn='none'),
    distill=dict(fn='none'),  # a teacher's word instead of rewards: on_policy
    teacher='',  # a model named as config.model is, of the same vocabulary; '' = none
    # changes rewards by length and by how right the group is, before advantages
    shape=dict(fn='none'),
    zero_variance=dict(fn='keep'),  # keep | mask: do all-equal groups count in the denominator
    perturb=dict(fn='none'),  # noise in the update's forward pass: layerwise(sigma, learning_rate)
    weigh_rows=True,  # rows that were kept by chance count 1 / their probability
    head_chunk_tokens=512,  # rows of logits that exist at once
  )
  c.optimizer = dict(
    learning_rate=1e-5,
    warmup_steps=0,
    decay='constant',  # constant | cosine | linear, over the optimizer steps after warm-up
    weight_decay=0.0,
    b1=0.9,
    b2=0.95,
    eps=1e-8,
    clip_norm=1.0,
    max_skipped=5,  # stop after so many non-finite gradients in a row
    # slow_fast: several steps on one minibatch, part of the way back, one more
    outer=dict(fn='none'),
  )
  c.curriculum = dict(
    candidates=dict(fn='everything'),  # or a window of a shuffled stream: stream
    forget=dict(fn='visit', decay=0.25),  # how evidence ages: none, visit, step, two_scale, reset
    # what prompts learn of each other: none, kind, anchors (other models' pass rates), kernel (features)
    share=dict(fn='kind', strength=2.0),
    kind_decay=0.9,  # of a kind's evidence, per visit to one of its prompts
    value=dict(fn='mean'),  # or a draw: thompson
    # uniform, mopps, bots, vade, information, mixed_group, per_token, per_root_token
    utility=dict(fn='mixed_group'),
    pick=dict(fn='softmax', temperature=0.2),  # top, softmax, skip
    # who is struck out, and how many slots audit beliefs: none, audit, retire, streaks
    gate=dict(fn='audit', share=0.05),
    # slots of config.rollouts that a prompt gets on average, and who gets more: neyman, xrpo, marginal
    each=1,
    allocate=dict(fn='equal'),
    domain=dict(fn='none'),  # shares of the slots by source: mix(targets)
    truncated='count',  # count | ignore: rollouts cut off before they were right, as wrong or as no evidence
  )
  c.data = dict(
    source='gym',  # gym | jsonl | files | digits
    path='',  # for jsonl
    # for files: each dict(path=, weight=, source=); .parquet, JSON lines, a saved data set's folder, or hub:owner/name
    files=(),
    eval_path='',  # for jsonl and files: held-out rows; '' = a seeded split
    # columns of files, where they have other names than usual; a.b is b inside a
    columns=dict(question='', answer='', source=''),
    answers=True,  # every row must have one; False where the grader needs none
    answer_after='',  # an answer is what stands after the last of these marks, such as '####'
    # for gym: each task is a reasoning-gym generator, how many rows, and its settings
    tasks=(),
    size=0,  # rows of the training set; 0 = all (jsonl, files), 1024 (gym, digits)
    seed=0,
    system='',  # a system message in front of every prompt
    template='{question}',  # how a question becomes the user's message
    chat=True,  # wrap in the model's chat template
  )
  # fn's score says what is right: from `right` up. parts are rewarded beside it, each dict(fn=, weight=1.0, …)
  c.grade = dict(
    fn='exact',
    right=1.0,
    parts=(),
    workers=2,  # processes, for graders whose time is not bounded
    deadline_s=10.0,  # of the clock for one answer; a worker that is late is killed and replaced
    cpu_s=10.0,  # the same of its processors: tells more than the clock where graders start threads
    memory_mb=2048,  # what an answer may take in a worker, beyond what that began with
    # an answer that could not be graded: score (it gets `value`) or drop (as if it had not been generated); the run
    # stops where more than stop_share of the rollouts of stop_steps steps failed
    failed=dict(
      timeout='score', crash='drop', error='drop', value=0.0, stop_share=0.5, stop_steps=3
    ),
  )
  # majority: a group's most frequent answer is the right one, labels are not learnt from
  c.vote = dict(fn='none')
  # majority_refined: a label that the groups' majority contradicts more and more gives way; suspects are listed
  c.labels = dict(fn='none')
  # outliers: the longest of an all-right group are cut, and graded again
  c.truncate = dict(fn='none')
  # what a prompt is told of a known answer: prefix, item_response, by_difficulty (the reply begins with it), guide,
  # exemplars (the question tells it)
  c.hint = dict(fn='none')
  # what of the landed groups is learnt from, and when: mixed (dynamic sampling), dars (more rollouts for the hard)
  c.collect = dict(fn='none')
  # successes(count): right rollouts of earlier visits, beside the fresh ones
  c.replay = dict(fn='none')
  c.eval = dict(
    every=0,  # steps between evaluations; 0 = before and after only
    prompts=200,
    samples=4,  # per prompt, besides the greedy answer
    # of the samples, and of --mode=generate; training samples the policy as it is
    sampling=dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0),
  )
  c.checkpoint = dict(every=20, keep=2)
  # alarms, each told once when it begins; `stop` names those that end the run
  c.health = dict(
    steps=10,  # in a row, before what is only bad when it lasts is told
    entropy=0.01,  # nats a token: below, the policy has collapsed
    # mean gap in probability between sampler and trainer, where there should be none; 0 = 1e-4 in float32, else 1e-2
    probs_gap=0.0,
    truncated=0.95,  # share of the rollouts cut off: above
    failed=0.1,  # share of the rollouts that could not be graded: above
    stop=(),  # non_finite, probs_gap, grading, still, entropy, all_wrong, all_right, same_reward, truncated
  )
  c.rollouts_every = 1  # steps between rollout files
  c.mesh = dict(data=1, fsdp=-1, tensor=1)  # -1 = all devices that are left
  # supervised warm start through the same update
  c.sft = dict(steps=0, learning_rate=3e-3, prompts=64)
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
  if not isinstance(name, str) or name not in valid:
    raise UserError(
      f'config.{field}.fn={name!r} is unknown; choose one of: {", ".join(sorted(valid))}.'
    )
  fn = valid[name]
  allowed = _settings(fn)
  for key, value in spec.items():
    if key not in allowed:
      raise UserError(
        f'config.{field}.{key}={value!r} is not a setting of {name!r}, which takes: '
        f'{", ".join(allowed) or "none"}.'
      )
    kind = allowed[key].annotation
    if kind in _KINDS and not _KINDS[kind](value):
      raise UserError(f'config.{field}.{key}={value!r} of {name!r} must be {_TOLD[kind]}.')
  for key, setting in allowed.items():
    if setting.default is setting.empty and key not in spec:
      raise UserError(f'config.{field}.{key} is missing; {name!r} needs it.')
  return functools.partial(fn, **spec)


def _settings(fn: Callable) -> dict[str, inspect.Parameter]:
  """The keyword-only parameters that a config can write: those without a type, or with a plain one."""
  own = inspect.signature(fn).parameters.values()
  return {
    p.name: p
    for p in own
    if p.kind == p.KEYWORD_ONLY and (p.annotation is p.empty or p.annotation in _KINDS)
  }


def _whole(value: Any) -> bool:
  return isinstance(value, int) and not isinstance(value, bool)


def _number(value: Any) -> bool:
  return _whole(value) or isinstance(value, float)


def _each(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
  return lambda value: isinstance(value, list | tuple) and all(map(check, value))


# Of the types that a setting may be declared with (they are strings here): whether a value is one, and its name.
_KINDS = {
  'bool': lambda value: isinstance(value, bool),
  'int': _whole,
  'float': _number,
  'str': lambda value: isinstance(value, str),
  'tuple[int, ...]': _each(_whole),
  'tuple[str, ...]': _each(lambda value: isinstance(value, str)),
  'Sequence[int]': _each(_whole),
  'Sequence[float]': _each(_number),
  'Mapping[str, float]': lambda value: (
    hasattr(value, 'values') and all(map(_number, value.values()))
  ),
}
_TOLD = {
  'bool': 'True or False',
  'int': 'a whole number',
  'float': 'a number',
  'str': 'text',
  'tuple[int, ...]': 'a list of whole numbers',
  'tuple[str, ...]': 'a list of texts',
  'Sequence[int]': 'a list of whole numbers',
  'Sequence[float]': 'a list of numbers',
  'Mapping[str, float]': 'a dict of numbers',
}


def choices(module: ModuleType) -> dict[str, Callable]:
  """The public functions that a config may name in `module`. Source: none."""
  return {
    name: fn
    for name, fn in vars(module).items()
    if inspect.isfunction(fn) and fn.__module__ == module.__name__ and not name.startswith('_')
  }


def load(path: str = '', overrides: Sequence[str] = ()) -> ml_collections.ConfigDict:
  """Lays a file of configs/ over the defaults, then overrides such as `--config.a.b=v`. Source: none.

  The file's `get_config()` names only what it changes; with `base='other.py'`, a file beside it is laid
  first. A part with an `fn` replaces the default part whole; one without changes settings of the
  default function. Raises UserError for a file that is missing or fails, for unknown fields, with the
  nearest valid name, and for values of another type.
  """
  config = default()
  for told in _chain(path) if path else ():
    _merge(config, told, 'config')
  # Functions first: choosing one drops the settings of another, but not those typed before it.
  for override in sorted(overrides, key=lambda text: not text.partition('=')[0].endswith('.fn')):
    _override(config, override)
  return config


def _chain(path: str) -> list[dict]:
  """What a file says, after what the files it stands on say."""
  told, seen = [], []
  while path:
    if os.path.realpath(path) in map(os.path.realpath, seen):
      raise UserError(
        f'--config={seen[0]}: its base is in the end {path} again; name another base.'
      )
    seen.append(path)
    changes = dict(_read(path))
    base = changes.pop('base', '')
    if not isinstance(base, str):
      raise UserError(f'--config={path}: base={base!r} must be the name of a file beside it.')
    told.insert(0, changes)
    path = os.path.join(os.path.dirname(path), base) if base else ''
  return told


_PLAIN = (bool, int, float, str)
_MIXED = ('remat',)  # 'auto' or a bool
# Not of the function, but of what runs it, or is done with its rewards.
_KEPT = {
  'config.grade': ('right', 'parts', 'workers', 'deadline_s', 'cpu_s', 'memory_mb', 'failed')
}


def _read(path: str) -> dict:
  if not os.path.isfile(path):
    raise UserError(f'--config={path} does not exist; give a file such as configs/dapo.py.')
  try:
    # Not an import, which would look a file changed within a second up in its bytecode cache.
    get_config = runpy.run_path(path).get('get_config')
    told = get_config() if callable(get_config) else None
  except (Exception, SystemExit) as error:  # the file is the user's program: anything may come
    raise UserError(f'--config={path} fails ({type(error).__name__}: {error}); mend it.') from error
  if not callable(get_config):
    raise UserError(f'--config={path} has no function get_config(); see configs/dapo.py.')
  if not isinstance(told, dict | ml_collections.ConfigDict):
    raise UserError(
      f'--config={path}: get_config() returns {type(told).__name__}, not a dict; see configs/dapo.py.'
    )
  return told


def _override(config: ml_collections.ConfigDict, text: str) -> None:
  name, equals, raw = text.removeprefix('--config.').partition('=')
  *parents, leaf = name.split('.')
  part, field = config, 'config'
  for parent in parents:
    if parent not in part:
      raise UserError(f'{field}.{parent} is unknown; {near(parent, part.keys())}.')
    part, field = part[parent], f'{field}.{parent}'
    if not isinstance(part, ml_collections.ConfigDict):
      raise UserError(f'{text} asks for a part of {field}={part!r}; write --{field}=VALUE.')
  if not equals:
    raise UserError(f'{text} has no value; write --config.{name}=VALUE.')
  old = part.get(leaf)
  if leaf == 'fn' and raw == old:
    return
  value = raw if isinstance(old, str) and leaf not in _MIXED else _literal(raw)
  _merge(part, {leaf: value}, field)


def _merge(part: ml_collections.ConfigDict, changes: Any, field: str) -> None:
  """Lays `changes` over `part`; see `load`. `field` is where that is, such as 'config.data'."""
  old = dict(part.items())
  if 'fn' in old and 'fn' in changes:
    for key in old.keys() - {'fn', *_KEPT.get(field, ())}:
      del part[key]  # of another function, or left out on purpose
  same = changes.get('fn', old.get('fn')) == old.get('fn')
  for key, value in changes.items():
    where, was = f'{field}.{key}', old.get(key)
    _check_name(key, field)
    if key not in old and 'fn' not in old:
      raise UserError(f'{where} is unknown; {near(key, old)}.')
    if isinstance(was, ml_collections.ConfigDict):
      if not isinstance(value, dict | ml_collections.ConfigDict):
        raise UserError(f'{where}={value!r} must be a dict of: {", ".join(was.keys())}.')
      _merge(was, value, where)
    else:
      with part.ignore_type():
        # The settings of another function, or of none here, are checked by `pick`.
        part[key] = typed(value, was if same or key in part else None, where)


def typed(value: Any, old: Any, field: str) -> Any:
  """`value` with the type of `old`, where there is one; an int may stand for a float.

  Raises UserError for another type, or what cannot be written to config.json. Source: none.
  """
  if value is None:
    such = '' if old is None else f' such as {old!r}'
    raise UserError(f'{field} is missing; give it a value{such}.')
  if isinstance(old, float) and isinstance(value, int) and not isinstance(value, bool):
    value = float(value)
  if isinstance(old, tuple) and isinstance(value, list):
    value = tuple(value)
  mixed = field.rpartition('.')[2] in _MIXED
  if mixed and not isinstance(value, bool | str):
    raise UserError(f'{field}={value!r} must be True, False, or text such as {old!r}.')
  if old is not None and not mixed and type(value) is not type(old):
    raise UserError(f'{field}={value!r} must be of type {type(old).__name__}, such as {old!r}.')
  check_plain(value, field)
  return value


def check_plain(value: Any, field: str) -> None:
  """A config is written to config.json and compared: strings, finite numbers and bools only, else UserError.

  Source: none.
  """
  if isinstance(value, dict | ml_collections.ConfigDict):
    for key, item in value.items():
      _check_name(key, field)
      check_plain(item, f'{field}.{key}')
  elif isinstance(value, list | tuple):
    for index, item in enumerate(value):
      check_plain(item, f'{field}[{index}]')
  elif not isinstance(value, _PLAIN) or (isinstance(value, float) and not math.isfinite(value)):
    raise UserError(
      f'{field}={value!r} must be a string, a finite number, a bool, or a list or dict of them.'
    )
  elif isinstance(value, str) and not value.isascii():
    try:
      value.encode()
    except UnicodeEncodeError as error:
      raise UserError(f'{field}={value!r} must be Unicode text ({error.reason}).') from error


def _check_name(key: Any, field: str) -> None:
  if not isinstance(key, str) or not key or '.' in key:
    raise UserError(f'{field} has the field {key!r}; a name is text without dots.')


def _literal(raw: str) -> Any:
  try:
    return ast.literal_eval({'true': 'True', 'false': 'False'}.get(raw, raw))
  except (ValueError, SyntaxError, MemoryError, RecursionError):
    return raw


def near(name: str, valid: Iterable[str]) -> str:
  """The valid name that is meant, or all of them, for an error message. Source: none."""
  close = difflib.get_close_matches(name, list(valid), n=1)
  return f'did you mean {close[0]}' if close else f'valid: {", ".join(sorted(valid))}'

"""The tiny job of tests/bench/methods.py: any method's settings on one character model, with equal rollouts."""

from __future__ import annotations

import functools
import hashlib
import json

from jaxrl_llm.config import loading
from tests.bench.lib import smoke

# Methods that the job cannot train, with the reason.
EXCLUDED = {
  'bro_rl': 'a group is twice as large as a batch of the tiny job',
  'at_grpo': 'credit to the turns of two agents; the tiny job has one turn',
  'comas': 'credit to the turns of a discussion; the tiny job has one turn',
  'gigpo': 'credit between the turns of an episode; the tiny job has one turn',
  'seeupo': 'updates turn by turn; the tiny job has one turn',
  'openrs': 'needs a judge, a language model behind an HTTP endpoint',
  'stepwiser': 'needs a judge, a language model behind an HTTP endpoint',
}
ROLLOUTS = 256  # completions of a step
STEPS = 60  # with ROLLOUTS completions each
START_STEPS = 80  # supervised, before all methods
TEACHER_STEPS = 400  # supervised, of the model that methods of distillation learn from
# As tests/bench/curves.py: four optimizer steps a batch, so that ratios and trust regions matter.
JOB = (
  'completion_tokens=7',
  'sft.steps=0',
  'learner.minibatches=4',
  'optimizer.learning_rate=1e-4',
  'monitoring.rollouts_every=1000',
  'mode=split',  # methods that sample alike share a compiled program
)
TASKS = tuple(dict(name=name, min_length=1, max_length=5) for name in ('rev', 'sort'))
HINTED_TOKENS = 96  # of a prompt and its hint, in characters
# Settings in tokens, scaled from the default job's cap of 16 to 7: answers have at most 6. A rule replaces a judge.
SCALED = {
  'arrol': {'rollout.pruning.at_tokens': 3},
  'branch_grpo': {'rollout.tree.splits': (0, 1, 2, 4)},
  'latr': {'rollout.tree.ages': (1, 2, 4)},
  'siri': {'rollout.length_schedule.low': 4},
  'scope': {
    'rewards.parts': (dict(fn='matching_start', weight=0.0),),
    'curriculum.hint.part': 'matching_start',
    'curriculum.hint.guided': False,  # a model of characters reads no guidance
  },
  # Characters, and a policy that writes digits alone.
  'hill': {
    'curriculum.hint.instruction': '{question}{attempt}{solution}',
    'curriculum.hint.tag': '',
  },
}
SMOKE_STEPS = 2


def start(seed: int, steps: int, is_smoke: bool):
  """The configuration of a supervised start alone."""
  own = (f'seed={seed}', 'steps=0', 'completion_tokens=7', 'checkpoint.every=1')
  config = _load('tiny', own + (smoke.TINY if is_smoke else ()))
  config.sft.steps = 2 if is_smoke else steps
  config.data.tasks = TASKS
  return config


def job(method: str, seed: int, model: str = '', teacher: str = '', is_smoke: bool = False):
  """The configuration of one run: `model` is the folder of the supervised start, `teacher` that of a better one."""
  own, base = loading.load(method), loading.load('sums')
  config = _load('tiny', (f'seed={seed}', *JOB))
  config.model, config.data.tasks = model, TASKS
  if is_smoke:
    config.evaluation.prompts = 8
  minibatches = config.learner.minibatches
  for section in ('objective', 'learner', 'rollout', 'curriculum', 'replay', 'lora'):
    config[section] = own[section]
  # A group in several slots must not be cut: one update a batch instead of four.
  in_slots = own.curriculum.slots_per_prompt > 1 or own.replay.collect.fn == 'dars'
  config.learner.minibatches = 1 if in_slots else minibatches
  config.optimizer.outer = own.optimizer.outer
  config.optimizer.learning_rate *= own.optimizer.learning_rate / base.optimizer.learning_rate
  for stage in ('parts', 'vote', 'truncate'):
    config.rewards[stage] = own.rewards[stage]
  if 'buffer_tokens' in config.objective.reward_shaping:
    config.objective.reward_shaping.buffer_tokens = 1
  if config.objective.teacher:
    config.objective.teacher = teacher
  if config.curriculum.hint.fn != 'none':
    config.prompt_tokens = HINTED_TOKENS
  config.update_from_flattened_dict(SCALED.get(method, {}))
  _equal_rollouts(config, own, is_smoke)
  return config


def _load(name: str, overrides: tuple[str, ...]):
  return loading.load(name, [f'--config.{override}' for override in overrides])


def _equal_rollouts(config, own, is_smoke: bool) -> None:
  """The method's rollouts a prompt, and as many prompts and steps as make the rollouts of GRPO."""
  rollouts, steps = (16, SMOKE_STEPS) if is_smoke else (ROLLOUTS, STEPS)
  config.rollouts = own.rollouts
  groups = rollouts // config.rollouts
  # A batch of four minibatches whose groups may fill several slots.
  unit = config.learner.minibatches * config.curriculum.slots_per_prompt
  groups = max(groups // unit, 1) * unit
  config.steps = max(round(steps * rollouts / (groups * config.rollouts)), SMOKE_STEPS)
  stop = config.rollout.stop
  config.prompts = round(groups / stop.fraction) if stop.fn == 'groups' else groups
  config.evaluation.every = config.checkpoint.every = config.steps


def needs_teacher(method: str) -> bool:
  """Whether a method learns from another model."""
  return bool(loading.load(method).objective.teacher)


def completions(config) -> int:
  """Completions that a run samples to their end: unfinished ones of a stop rule count in the step that ends them."""
  stop = config.rollout.stop
  groups = config.prompts * (stop.fraction if stop.fn == 'groups' else 1)
  return round(groups * config.rollouts * config.steps)


def active(settings):
  """Settings without those that are off, so that a new feature that a method does not use leaves its rows valid."""
  if not isinstance(settings, dict):
    return settings
  if settings.get('fn') == 'none':
    return {}
  inner = {name: active(value) for name, value in settings.items()}
  return {name: value for name, value in inner.items() if value and value != 'none'}


@functools.cache
def fingerprint(method: str, is_smoke: bool) -> str:
  """A hash of a method's settings on the job: rows of other settings are not reused."""
  settings = active(job(method, 0, is_smoke=is_smoke).to_dict())
  settings |= dict(start=START_STEPS, taught=TEACHER_STEPS)
  text = json.dumps(settings, sort_keys=True, default=str)
  return hashlib.sha256(text.encode()).hexdigest()[:12]

"""Every config really runs: its own program and the host's turn, on a model of one layer and planted rewards.

Update and generation are compiled apart: most configs share the generation, which is then traced and compiled once.
That both in one program are the same is told by tests/test_step.py.
"""

from __future__ import annotations

import functools
import pathlib

import jax
import numpy as np
import pytest

from jaxrl_llm import models, rewards
from jaxrl_llm.config import loading as configs
from jaxrl_llm.config import schema
from jaxrl_llm.distributed import sharding
from jaxrl_llm.learner import compile as programs
from jaxrl_llm.learner import empty_records, generate
from jaxrl_llm.learner import state as train_state
from jaxrl_llm.learner.step_spec import StepSpec
from jaxrl_llm.runner import host_step, multi_turn, setup

FILES = {p.stem: p for p in sorted((pathlib.Path(__file__).parents[1] / 'configs').rglob('*.py'))}
P, G, T = 4, 4, 8

# What shows in a row of metrics that a config's own part took part; any of the rows will do.
WITNESS = dict(
  april=lambda row: row['generate/unfinished_groups'] > 0,
  echo=lambda row: row['generate/tree_forks'] > 0,
  latr=lambda row: row['generate/tree_forks'] > 0,
  spec_rl=lambda row: row['generate/draft_tokens_kept'] > 0,
  rlep=lambda row: row['replay/rows'] > 0,
  gdpo=lambda row: row['critic/score/bare_number'] == 1 / G,
  stepwiser=lambda row: row['critic/score/steps'] == 1 / G,
  openrs=lambda row: row['critic/score/pairwise'] == row['critic/score/bare_number'] == 1 / G,
  ttrl=lambda row: 0 < row['critic/vote_share'] < 1,
  chord=lambda row: row['actor/sft_loss'] > 0 and row['actor/sft_share'] > 0,
  otr=lambda row: row['actor/sft_loss'] > 0,
  pear=lambda row: row['actor/sft_loss'] > 0,
  hpt=lambda row: row['actor/sft_loss'] > 0 and row['actor/sft_share'] > 0,
  dynamic_sampling=lambda row: row['collect/short'] > 0,
  dars_top_ups=lambda row: row['collect/lacking'] > 0,
  prefix_rl=lambda row: row['hint/groups'] > 0,
  guide=lambda row: row['hint/groups'] > 0,
  seele=lambda row: row['hint/groups'] > 0,
  ad_hint=lambda row: row['hint/groups'] > 0,
  nudge_rl=lambda row: 0 < row['hint/groups'] < P,
  guess=lambda row: row['environment/observation_tokens'] > 0,
  gigpo=lambda row: row['environment/turns'] > 1,
  seeupo=lambda row: row['actor/turns'] > 1,
  calculator=lambda row: row['critic/score/environment'] == 0 and row['environment/turns'] >= 1,
  olr=lambda row: 'labels/replaced' in row,
)
# All rewards of one group are equal: 1, so that an outlier may be cut, or 0, so that its demonstration counts.
ALIKE = dict(hpt=0.0, dars_top_ups=0.0, prefix_rl=0.0, guide=0.0, ad_hint=0.0)


class Planted:
  """Stands for the grading pool: every other answer to a prompt is right, all to the first are alike.

  Further rewards go to the first answer of each.
  """

  def __init__(self, alike: float, parts: int):
    self.alike, self.parts = alike, parts

  def score(self, rows, texts):
    seen: dict[str, int] = {}
    parts_BxK = np.zeros((len(texts), self.parts), np.float32)
    for b, row in enumerate(rows):
      seen[row.id] = seen.get(row.id, -1) + 1
      parts_BxK[b, 0] = self.alike if len(seen) == 1 else 1 - seen[row.id] % 2
      parts_BxK[b, 1:] = seen[row.id] == 0
    counts = dict.fromkeys(('grade/timeouts', 'grade/crashes', 'grade/errors'), 0)
    return rewards.Scores(parts_BxK, np.zeros(len(texts), np.int8), counts, '')


def small(name: str, folder: pathlib.Path):
  """The config with the smallest sizes, and as many prompts as the data holds, so that each comes back."""
  c = configs.load(str(FILES[name]))
  c.model = 'scratch'
  c.scratch.update(width=16, layers=1, heads=2, kv_heads=1, mlp=32, max_tokens=64, experts=0)
  if c.learner.replay_experts:
    c.scratch.update(experts=4, experts_per_token=2)
  c.prompts, c.rollouts, c.prompt_tokens, c.completion_tokens = P, min(c.rollouts, G), 12, T
  c.learner.microbatch_rollouts = 0
  if c.rewards.vote.fn != 'none':
    c.rewards.vote.learn_from = 3
  if c.objective.teacher:
    c.objective.teacher = 'scratch'
  if c.rollout.stop.fn != 'none':
    c.rollout.slots = 5  # so that groups end one after the other
  # To a fresh model all characters are nearly alike: none is likely, and no entropy rises.
  if c.rollout.tree.fn == 'echo':
    c.rollout.tree.update(rise=-1.0)
  if c.rollout.tree.fn == 'latr':
    c.rollout.tree.update(absolute=0.01)
  c.curriculum.slots_per_prompt = min(c.curriculum.slots_per_prompt, P // 2)
  if c.curriculum.hint.fn != 'none':
    c.prompt_tokens = 48  # room for what is told
  c.sft.steps = c.evaluation.prompts = 0
  c.steps = c.steps or 2  # of a supervised start alone
  if c.environment.fn != 'none':
    c.completion_tokens = 3 * T  # room for a second turn
  cache = dict(cache=str(folder / 'judge.sqlite'))
  parts = tuple(dict(part) | (cache if 'cache' in part else {}) for part in c.rewards.parts)
  kept = {name: c.rewards[name] for name in schema.FIXED_FIELDS['config.rewards']}
  c.rewards = configs.default().rewards  # exact, without the settings of another grader
  c.rewards.update(kept | dict(parts=parts))
  c.environment.judge = 'rewards'
  played = c.data.source == 'games'  # its rows are levels of an environment
  c.data.chat, c.data.template = False, '{question}'
  c.prompt_tokens = 32 if played else c.prompt_tokens  # room for what is shown first
  c.data.source, c.data.size = 'games' if played else 'digits', P
  if c.replay.collect.fn != 'none':
    c.replay.collect.patience = 1  # every call learns something
  if c.replay.collect.fn == 'dars':
    c.data.size = 3 * P
  if not played:
    c.data.tasks = (dict(name='copy', min_length=1, max_length=3),)
  return c


# Generation gets these fields of the spec and no others: programs that sample alike are compiled once.
SAMPLED = dict(
  model=('config', 'lora', 'dtype', 'weights_dtype', 'head_chunk_tokens'),
  rollout=('decode', 'drafts', 'pruning', 'tree', 'carried_calls', 'lockstep'),
  layout=('mesh', 'rules'),
)
HELD = ('params', 'base', 'correctness_head', 'seed', 'step', 'carried')


def only(told, names):
  return told._replace(**{name: None for name in told._fields if name not in names})


def sampled_fields(spec: StepSpec) -> StepSpec:
  parts = {name: only(getattr(spec, name), fields) for name, fields in SAMPLED.items()}
  return only(spec, SAMPLED)._replace(**parts)


@functools.cache
def sampling(spec: StepSpec):
  """One program for all configs that sample alike."""
  return jax.jit(functools.partial(generate.generate, spec))


def compiled(spec: StepSpec):
  """What `programs.compile_split` returns."""
  learn, sample = programs.compile_update(spec), sampling(sampled_fields(spec))

  def call(state, batch, *asked):
    state, metrics = learn(state, batch)
    drawn, sampled, left = sample(only(state, HELD), *asked)
    return state._replace(carried=left), drawn, metrics | sampled

  return call


def changed(one, other) -> bool:
  return any(
    not np.array_equal(x, y) for x, y in zip(*map(jax.tree.leaves, (one, other)), strict=True)
  )


@pytest.mark.parametrize('name', FILES)
def test_every_config_takes_two_steps(name, tmp_path):
  c = small(name, tmp_path)
  context = setup.build_context(c, sharding.make_mesh(c.mesh, jax.devices()[:1]))
  if context.models.teacher is not None:  # as loaded it is the policy itself, which has nothing to teach
    teacher = models.load('scratch', scratch=c.scratch, seed=1)
    context = context._replace(models=context.models._replace(teacher=teacher))
  teacher = context.models.teacher
  graded = len([part for part in context.grading.rewards if part.grader is not None])
  spec, pool = context.spec, Planted(ALIKE.get(name, 1.0), graded)
  state = train_state.init_state(
    spec, context.models.policy.params, teacher and teacher.params
  )
  before, batch = jax.device_get(state), empty_records.empty_batch(spec)
  split = context.episodes is None
  call, rows = compiled(spec) if split else multi_turn.compile_call(context), []
  for index in range(3):  # the first has nothing to learn from yet
    prompts, *more = host_step.propose(context, index)
    state, drawn, metrics = call(state, batch, prompts, *more)
    taken = int(state.step)
    landed = host_step.land(context, pool, host_step.PendingStep(index, prompts, drawn, metrics))
    batch = landed.batch
    rows.append(landed.row)
    # Of turns there may be fewer than the most.
    most = (
      index
      * spec.update.minibatches
      * (spec.update.inner_steps.max_steps(c.environment.turns) if spec.update.inner_steps else 1)
    )
    assert index <= taken <= most if c.optimizer.outer.fn == 'last_turn_first' else taken == most
  after = jax.device_get(state)
  assert all(np.isfinite(v) for row in rows for v in row.values())
  assert rows[0]['actor/grad_norm'] == 0
  for row in rows[1:]:
    assert row['actor/grad_norm'] > 0 and row['training/trained_tokens'] > 0
    assert row['actor/skipped_updates'] == 0 and row['perf/rollouts'] > 0
  for part in (
    'params',
    'opt_state',
    'auxiliary_model',
    'average',
    'correctness_head',
    'activation_noise',
    'inner_steps',
  ):
    assert getattr(before, part) is None or changed(*(getattr(x, part) for x in (before, after))), (
      part
    )
  for part in ('reference', 'teacher', 'base'):
    assert not changed(*(getattr(x, part) for x in (before, after))), part
  assert name not in WITNESS or any(WITNESS[name](row) for row in rows)
  method = spec.objective.method
  assert (after.reference is None) == (not method.needs_reference)
  assert (after.average is None) == (not method.needs_average)
  assert (after.teacher is None) == (not method.needs_teacher)
  assert (after.base is None) == (spec.model.lora is None)
  assert (after.auxiliary_model is None) == (method.auxiliary_model is None)
  assert ('actor/sft_loss' in rows[0]) == method.needs_demo

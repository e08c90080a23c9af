"""Every config takes two real steps: its own program and the host's part, with a model of one layer and planted
rewards.

Update and generation are compiled separately: most configs share the generation, which is then compiled once.
tests/test_step.py shows that the fused program gives the same.
"""

from __future__ import annotations

import functools
import pathlib

import jax
import numpy as np
import pytest
import small_episodes

from jaxrl_llm import models, replay, rewards
from jaxrl_llm.config import loading as configs
from jaxrl_llm.config import schema
from jaxrl_llm.distributed import sharding
from jaxrl_llm.learner import compile as programs
from jaxrl_llm.learner import empty_records, generate
from jaxrl_llm.learner import state as train_state
from jaxrl_llm.learner.step_spec import StepSpec
from jaxrl_llm.monitoring import update_metrics
from jaxrl_llm.replay.shared_rollouts import Completion, SharedGroup
from jaxrl_llm.runner import (
  endpoint,
  hint_reliance,
  host_step,
  multi_turn,
  prompt_encoding,
  setup,
)
from jaxrl_llm.runner.context import PendingStep
from jaxrl_llm.types import Row

FILES = {p.stem: p for p in sorted((pathlib.Path(__file__).parents[1] / 'configs').rglob('*.py'))}
P, G, T = 4, 4, 8

# Evidence in the metrics that the feature of a config was active; one of the steps must show it.
WITNESS = dict(
  aipo=lambda row: row['generate/unfinished_groups'] > 0,
  april=lambda row: row['generate/unfinished_groups'] > 0,
  areal=lambda row: row['generate/unfinished_groups'] > 0,
  echo=lambda row: row['generate/tree_forks'] > 0,
  latr=lambda row: row['generate/tree_forks'] > 0,
  branch_grpo=lambda row: row['generate/tree_forks'] > 0,
  spec_rl=lambda row: row['generate/draft_tokens_kept'] > 0,
  aurora=lambda row: row['draft_head/kl'] > 0,
  lenvm=lambda row: row['length_head/error_tokens'] > row['length_head/constant_error_tokens'] > 0,
  rlep=lambda row: row['replay/rows'] > 0,
  swarm=lambda row: row['replay/rows'] > 0,
  dots_replay=lambda row: row['replay/rows'] > 0,
  shuffle_r1=lambda row: row['replay/rows'] > 0,
  sol_rl=lambda row: row['replay/rows'] == P * 2,
  remix=lambda row: row['replay/rows'] > 0,
  spear=lambda row: row['replay/rows'] > 0,
  rorecomp=lambda row: row['replay/rows'] > 0 and row['replay/priority_rows'] > 0,
  gdpo=lambda row: row['critic/score/bare_number'] == 1 / G,
  stepwiser=lambda row: row['critic/score/steps'] == 1 / G,
  rlfr=lambda row: row['companion/loss'] >= 0,
  score_centering=lambda row: row['actor/score_centering'] != 0,
  a_star_po=lambda row: row['actor/kl_loss'] > 0,
  oapl=lambda row: row['actor/kl_loss'] > 0,
  gkd=lambda row: abs(row['actor/divergence']) < 1e-4,  # its teacher has the same weights
  gkd_top_k=lambda row: abs(row['actor/divergence']) < 1e-4,
  sdpo=lambda row: row['distillation/solved'] > 0,
  opsd=lambda row: row['distillation/solved'] > 0,
  cross_tokenizer=lambda row: row['distillation/aligned'] > 0.5,
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
  bepa=lambda row: row['replay/rows'] > 0,
  scope=lambda row: row['hint/groups'] > 0,
  seele=lambda row: row['hint/groups'] > 0,
  ad_hint=lambda row: row['hint/groups'] > 0,
  nudge_rl=lambda row: 0 < row['hint/groups'] < P,
  clpo=lambda row: 0 < row['hint/groups'] < P and row['actor/kl_loss'] >= 0,
  r3l=lambda row: row['hint/requests'] > 0 and row['actor/kl_loss'] >= 0,
  hill=lambda row: row['hint/groups'] > 0,
  guess=lambda row: row['environment/observation_tokens'] > 0,
  harness=lambda row: row['environment/requests'] >= P * G,
  gigpo=lambda row: row['environment/turns'] > 1,
  at_grpo=lambda row: row['environment/turns'] > 1,
  comas=lambda row: row['environment/turns'] > 1,
  seeupo=lambda row: row['actor/turns'] > 1,
  calculator=lambda row: row['critic/score/environment'] == 0 and row['environment/turns'] >= 1,
  hidden_state=lambda row: row['curriculum/encoded'] == 1,
  answer_odds=lambda row: row['curriculum/encoded'] == row['curriculum/with_odds'] == 0,  # no words
  olr=lambda row: 'labels/replaced' in row,
  entropy_bonus=lambda row: row['actor/entropy_coef'] > 0,
  skywork_or1=lambda row: row['actor/entropy_coef'] > 0,
  reward_kl=lambda row: abs(row['critic/reward_kl']) > 1e-6,
  reinforce_pp_kl=lambda row: abs(row['critic/reward_kl']) > 1e-6,
)
# The rewards of the first group are equal: 1, so that an outlier may be cut, or 0, so that its demonstration counts.
EQUAL_REWARD = dict.fromkeys(
  ('hpt', 'dars_top_ups', 'prefix_rl', 'guide', 'ad_hint', 'clpo', 'hill', 'bepa', 'scope'), 0.0
)

# The reward of the parts of a config, where it is that of all completions.
PART = dict(scope=0.5)


class Planted:
  """In place of the grading pool: every other completion is right; those of the first prompt have equal rewards.

  Further rewards are `part` for all, or 1 for the first completion of each prompt alone.
  """

  def __init__(self, equal_reward: float, parts: int, part: float | None = None):
    self.equal_reward, self.parts, self.part = equal_reward, parts, part

  def score(self, rows, texts):
    counts: dict[str, int] = {}
    parts_BxK = np.zeros((len(texts), self.parts), np.float32)
    for b, row in enumerate(rows):
      counts[row.id] = counts.get(row.id, -1) + 1
      parts_BxK[b, 0] = self.equal_reward if len(counts) == 1 else 1 - counts[row.id] % 2
      parts_BxK[b, 1:] = counts[row.id] == 0 if self.part is None else self.part
    failures = dict.fromkeys(('grade/timeouts', 'grade/crashes', 'grade/errors'), 0)
    return rewards.Scores(parts_BxK, np.zeros(len(texts), np.int8), failures, '')


def small(name: str, folder: pathlib.Path):
  """The config with the smallest sizes, and as many prompts as the data holds, so that each is sampled again."""
  c = configs.load(name)
  c.model = 'scratch'
  c.scratch.update(width=16, layers=1, heads=2, kv_heads=1, mlp=32, max_tokens=64, experts=0)
  if c.learner.replay_experts:
    c.scratch.update(experts=4, experts_per_token=2)
  c.prompts, c.rollouts, c.prompt_tokens, c.completion_tokens = P, min(c.rollouts, G), 12, T
  c.learner.microbatch_tokens = c.sft.steps = c.evaluation.prompts = 0
  c.steps = c.steps or 2  # 0: only the supervised start
  c.curriculum.slots_per_prompt = min(c.curriculum.slots_per_prompt, P // 2)
  if c.objective.teacher:
    c.objective.teacher = 'scratch'
  if c.rewards.vote.fn != 'none':
    c.rewards.vote.learn_from = 3
  shrink_objective(c)
  shrink_rollout(c)
  shrink_rewards(c, folder)
  shrink_data(c)
  if c.replay.reuse.fn == 'shared':
    c.replay.reuse.folder = str(folder / 'shared')
    publish_groups(c.replay.reuse.folder)
  return c


def publish_groups(folder: str) -> None:
  """Groups of another run; `Planted` grades all but one as mixed."""
  completions = tuple(Completion(str(number), True) for number in range(G))
  rows = [Row(f'other {number}', 'copy 12=', (), '12', 'digits', {}) for number in range(P)]
  groups = [SharedGroup(row, completions) for row in rows]
  replay.SharedRollouts(folder, 0.5, 4, 64).publish(groups, 0)


def shrink_objective(c) -> None:
  """Makes stages of the objective act in a few steps on small groups."""
  if c.objective.advantage.fn == 'pass_at_k':
    c.objective.advantage.k = 2  # two of four answers are wrong
  if c.objective.advantage.fn == 'best_margin':
    c.rollouts = 2  # so that one answer is the best
  if c.objective.reward_kl.fn != 'none':
    c.objective.reward_kl.coef = 1.0
  if c.objective.entropy_bonus.fn == 'adaptive':
    c.objective.entropy_bonus.target = 9.0  # above that of an untrained model
  if c.objective.reference.fn == 'refreshed':
    c.objective.reference.every = 1
  if 'prompt_tokens' in c.objective.distillation:
    c.scratch.max_tokens, c.objective.distillation.prompt_tokens = 128, 100  # of characters
  if c.objective.distillation.fn == 'on_policy_spans':
    # The teacher is one of characters, too.
    c.objective.distillation.update(teacher_prompt_tokens=12, teacher_completion_tokens=2 * T)
  if c.objective.reference.fn == 'reincarnated':
    c.objective.reference.after = 1


def shrink_rollout(c) -> None:
  """Makes rules of sampling act on short completions."""
  c.rollout.slots = min(c.rollout.slots, P * G // 2)
  if c.rollout.stop.fn != 'none':
    c.rollout.slots = 5  # so that groups end one after the other
  # An untrained model gives nearly equal probabilities: none is large, and no entropy rises.
  if c.rollout.tree.fn == 'echo':
    c.rollout.tree.update(rise=-1.0)
  if c.rollout.tree.fn == 'latr':
    c.rollout.tree.update(absolute=0.01)
  if c.curriculum.hint.fn != 'none':
    c.prompt_tokens = 48  # room for the hint
  if (
    c.curriculum.hint.fn == 'rewritten'
  ):  # of prompts that are all wrong, with replies of any length
    how = dict(simplify='{question}!', vary='{question}?', least_chars=1)
    c.curriculum.hint.update(how, hard=0.0, medium=0.0)
  if c.curriculum.hint.fn == 'reflected':
    c.curriculum.hint.update(request='{question}?{attempt}', guidance='{question}!{report}')
  if c.curriculum.hint.fn == 'written':  # a reply of any form is a hint
    c.curriculum.hint.update(instruction='{question}{attempt}!', tag='')
  if c.environment.fn != 'none':
    c.completion_tokens = 3 * T  # room for a second turn


def shrink_rewards(c, folder: pathlib.Path) -> None:
  """Makes exact matches the main reward; further rewards stay, with caches in `folder`."""
  cache = dict(cache=str(folder / 'judge.sqlite'))
  parts = tuple(dict(part) | (cache if 'cache' in part else {}) for part in c.rewards.parts)
  fixed = {name: c.rewards[name] for name in schema.FIXED_FIELDS['config.rewards']}
  c.rewards = configs.default().rewards  # exact, without the settings of another function
  c.rewards.update(fixed | dict(parts=parts))
  c.environment.judge = 'rewards'


def shrink_data(c) -> None:
  """Short strings to copy; the games of an environment stay."""
  c.data.chat, c.data.template, c.data.size = False, '{question}', P
  if c.data.source == 'games':  # rows are levels of an environment
    c.prompt_tokens = 32  # room for the first observation
  else:
    c.data.source, c.data.path = 'digits', ''
    c.data.tasks = (dict(name='copy', min_length=1, max_length=3),)
    if c.data.keep.fn != 'none':
      c.data.keep, c.data.size = dict(fn='in_range', column='length', above=1.0), 3 * P
  if c.replay.collect.fn != 'none':
    c.replay.collect.patience = 1  # every step has a batch
  if c.replay.collect.fn == 'dars':
    c.data.size = 3 * P
  if c.replay.reuse.fn in ('mixed_groups', 'self_imitation', 'recomposed'):
    c.data.size = 3 * P  # a prompt of a step is not replayed in it
  if c.replay.reuse.fn == 'extremes':
    c.replay.reuse.update(best=1, worst=1)
  if c.replay.reuse.fn == 'self_imitation':
    c.replay.reuse.fill = 0.0  # the second step replays


# The fields of the spec that generation reads: configs with equal ones share a compiled program.
GENERATION_FIELDS = dict(
  model=('config', 'lora', 'dtype', 'weights_dtype', 'head_chunk_tokens'),
  rollout=(
    *('decode', 'drafts', 'pruning', 'length_head', 'tree', 'carried_calls', 'lockstep'),
    'greedy_first',
  ),
  layout=('mesh', 'rules', 'prefix_tokens'),
)
STATE_FIELDS = ('params', 'base', 'rollout_head', 'seed', 'step', 'carried')


def only(record, names):
  """A record whose other fields are None."""
  return record._replace(**{name: None for name in record._fields if name not in names})


def sampled_fields(spec: StepSpec) -> StepSpec:
  parts = {name: only(getattr(spec, name), fields) for name, fields in GENERATION_FIELDS.items()}
  return only(spec, GENERATION_FIELDS)._replace(**parts)


@functools.cache
def sampling(spec: StepSpec):
  """The compiled generation of all configs with this spec."""
  return jax.jit(functools.partial(generate.generate, spec))


def compiled(spec: StepSpec):
  """As `programs.compile_split`, with shared generation."""
  learn, sample = programs.compile_update(spec), sampling(sampled_fields(spec))

  def call(state, batch, *inputs):
    state, metrics = learn(state, batch)
    rollout, counts, carried = sample(only(state, STATE_FIELDS), *inputs)
    return state._replace(carried=carried), rollout, metrics | counts

  return call


def step_of(context):
  """The step as `train` takes it."""
  if isinstance(context.episodes, endpoint.HarnessEpisodes):
    return endpoint.compile_call(context)
  return compiled(context.spec) if context.episodes is None else multi_turn.compile_call(context)


def changed(one, other) -> bool:
  return any(
    not np.array_equal(x, y) for x, y in zip(*map(jax.tree.leaves, (one, other)), strict=True)
  )


def take_steps(name: str, c, context, count: int):
  """The states before and after `count` steps, and the metrics of each."""
  spec, models_ = context.spec, context.models
  graded = len([part for part in context.grading.rewards if part.grader is not None])
  pool = Planted(EQUAL_REWARD.get(name, 1.0), graded, PART.get(name))
  teacher = models_.teacher and models_.teacher.params
  state = train_state.init_state(spec, models_.policy.params, teacher)
  before, batch = jax.device_get(state), empty_records.empty_batch(spec)
  call, encode = step_of(context), prompt_encoding.compile_call(context)
  measure = hint_reliance.compile_call(context)
  loop, rows = spec.update.inner_steps, []
  steps_per_batch = spec.update.minibatches * (loop.max_steps(c.environment.turns) if loop else 1)
  for index in range(count):  # the first batch is empty
    prompts, *inputs = host_step.build_inputs(context, index)
    state, rollout, metrics = call(state, batch, prompts, *inputs)
    taken, most = int(state.step), index * steps_per_batch
    if context.episodes is not None:
      prompts = context.episodes.prompts_of(prompts)
    encoded = encode and encode(index, state, prompts.index_P)
    reliance_B = measure and measure(state, prompts, rollout)
    pending = PendingStep(index, prompts, rollout, metrics, encoded=encoded, reliance_B=reliance_B)
    landed = host_step.land(context, pool, pending)
    batch = landed.batch
    rows.append(landed.metrics)
    # An episode may end before its last turn, and a minibatch of requests or hinted groups is not learned.
    least = index if c.optimizer.outer.fn == 'last_turn_first' else most
    least = 0 if c.curriculum.hint.fn in ('rewritten', 'reflected', 'written') else least
    assert least <= taken <= most
  return before, jax.device_get(state), rows


def check_state(method, spec: StepSpec, before, after) -> None:
  """Trained parts change, frozen parts do not, and only those that the method needs exist."""
  trained = ('params', 'opt_state', 'auxiliary_model', 'average', 'rollout_head')
  for part in (*trained, 'activation_noise', 'inner_steps', 'entropy_bonus'):
    pair = [getattr(state, part) for state in (before, after)]
    assert pair[0] is None or changed(*pair), part
  for part in ('reference', 'teacher', 'base'):
    moves = part == 'reference' and spec.objective.refresh is not None
    assert changed(*(getattr(state, part) for state in (before, after))) == moves, part
  assert spec.rollout.greedy_first == method.needs_greedy
  assert (after.reference is None) == (not method.needs_reference)
  assert (after.average is None) == (not method.needs_average)
  distills = method.needs_teacher or spec.objective.divergence is not None
  assert (after.teacher is None) == (not distills)
  assert (after.base is None) == (spec.model.lora is None)
  assert (after.auxiliary_model is None) == (method.auxiliary_model is None)


@pytest.mark.parametrize('name', FILES)
def test_every_config_takes_two_steps(name, tmp_path):
  c = small(name, tmp_path)
  context = setup.build_context(c, sharding.make_mesh(c.mesh, jax.devices()[:1]))
  if context.models.teacher is not None:  # as loaded it equals the policy
    teacher = models.load('scratch', scratch=c.scratch, seed=1)
    context = context._replace(models=context.models._replace(teacher=teacher))
  if c.environment.fn == 'discussion':  # its first turn would fill a row of an untrained model
    context = small_episodes.with_ends(context)
  before, after, rows = take_steps(name, c, context, 3)
  if context.episodes is not None:
    context.episodes.close()
  assert all(np.isfinite(v) for row in rows for v in row.values())
  assert rows[0]['actor/grad_norm'] == 0
  for row in rows[1:]:
    assert row['actor/grad_norm'] > 0 and update_metrics.learned_tokens(row) > 0
    assert row['actor/skipped_updates'] == 0 and row['perf/rollouts'] > 0
  method = context.spec.objective.method
  check_state(method, context.spec, before, after)
  assert name not in WITNESS or any(WITNESS[name](row) for row in rows)
  assert ('actor/sft_loss' in rows[0]) == method.needs_demo

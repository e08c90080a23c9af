"""Every row of the compatibility table: each side alone is accepted, both together are refused with reason and
remedy."""

from __future__ import annotations

import pathlib

import pytest

from jaxrl_llm import objective
from jaxrl_llm.config import compatibility, loading, schema
from jaxrl_llm.config.compatibility import ROWS
from jaxrl_llm.config.conditions import Condition
from jaxrl_llm.types import UserError

ROOT = pathlib.Path(__file__).parents[2]
EPISODES = ('environment.fn=calculator', 'mode=split')
CENTERED = ('objective.ratio.fn=one', 'objective.trust_region.fn=none')
ENDPOINT = ('environment.fn=endpoint', 'mode=split', 'evaluation.prompts=0')

# Field and operation of a condition → the override that meets it, then those that it needs to be accepted alone.
EXAMPLES: dict[tuple[str, str], tuple[str, ...]] = {
  ('curriculum.allocation', 'not in'): (
    'curriculum.allocation.fn=neyman',
    'curriculum.slots_per_prompt=2',
  ),
  ('curriculum.hint', 'in'): ('curriculum.hint.fn=guide',),
  ('curriculum.hint', 'not in'): ('curriculum.hint.fn=none',),
  ('curriculum.hint', 'used'): ('curriculum.hint.fn=prefix',),
  ('curriculum.labels', 'used'): ('curriculum.labels.fn=majority_refined',),
  ('curriculum.prior_pooling', 'in'): ('curriculum.prior_pooling.fn=hidden_state',),
  ('curriculum.slots_per_prompt', 'above'): ('curriculum.slots_per_prompt=2',),
  ('curriculum.slots_per_prompt', 'below'): ('curriculum.slots_per_prompt=1',),
  ('dtype', 'in'): ('dtype=float32',),
  ('environment', 'in'): ('environment.fn=none',),
  ('environment', 'used'): EPISODES,
  ('environment.turns', 'below'): ('environment.turns=2',),
  ('environment.batching', 'in'): ('environment.batching.fn=turns', *EPISODES),
  ('environment.horizon', 'not in'): ('environment.horizon.fn=stairs', *EPISODES),
  ('environment.rounds', 'above'): ('environment.rounds=1', *EPISODES),
  ('environment.judge', 'in'): ('environment.judge=environment', *EPISODES),
  ('evaluation.prompts', 'above'): ('evaluation.prompts=4',),
  ('evaluation.benchmark', 'used'): ('evaluation.benchmark=hub:openai/gsm8k',),
  ('learner.agreement', 'in'): ('learner.agreement=exact',),
  ('learner.attention', 'in'): ('learner.attention=splash',),
  ('learner.minibatches', 'above'): ('learner.minibatches=2',),
  ('learner.passes', 'above'): ('learner.passes=2',),
  ('learner.quantize', 'used'): ('learner.quantize=True', 'rollout.weights_dtype=int8'),
  ('learner.replay_experts', 'used'): ('learner.replay_experts=True',),
  ('lora.base_dtype', 'not in'): ('lora.base_dtype=nf4', 'lora.rank=8'),
  ('lora.base_dtype', 'in'): ('lora.base_dtype=nf4', 'lora.rank=8'),
  ('lora.init', 'used'): ('lora.init=folder', 'lora.rank=8'),
  ('lora.rank', 'below'): ('lora.rank=0',),
  ('lora.rank', 'used'): ('lora.rank=8',),
  ('mesh.data', 'not in'): ('mesh.data=2',),
  ('mesh.fsdp', 'not in'): ('mesh.fsdp=4',),
  ('mesh.preset', 'used'): ('mesh.preset=v5e-16',),
  ('mode', 'not in'): ('mode=fused',),
  ('objective.advantage', 'in'): ('objective.advantage.fn=group_normalized',),
  ('objective.advantage', 'not in'): ('objective.advantage.fn=leave_one_out',),
  ('objective.aggregation', 'not in'): ('objective.aggregation.fn=sequence_mean',),
  ('objective.auxiliary_model', 'in'): ('objective.auxiliary_model.fn=preference',),
  ('objective.auxiliary_model', 'used'): ('objective.auxiliary_model.fn=critic',),
  ('objective.credit_assignment', 'not in'): ('objective.credit_assignment.fn=return_whitened',),
  ('objective.credit_assignment', 'in'): ('objective.credit_assignment.fn=gigpo', *EPISODES),
  ('objective.divergence', 'used'): (
    'objective.divergence.fn=reverse_kl',
    'objective.teacher=smollm2-135m',
  ),
  ('objective.divergence', 'in'): ('objective.divergence.fn=none',),
  ('objective.distillation', 'used'): (
    'objective.distillation.fn=on_policy',
    'objective.teacher=smollm2-135m',
  ),
  ('objective.distillation', 'in'): ('objective.distillation.fn=none',),
  ('objective.importance_correction', 'used'): ('objective.importance_correction.fn=token',),
  ('objective.advantage_modulation', 'used'): ('objective.advantage_modulation.fn=unsure',),
  ('objective.token_weighting', 'used'): ('objective.token_weighting.fn=forking',),
  ('objective.kl_scale', 'used'): ('objective.kl_scale.fn=by_difficulty', 'objective.kl.fn=k3'),
  ('objective.kl', 'in'): ('objective.kl.fn=none',),
  ('objective.ratio', 'not in'): ('objective.ratio.fn=token',),
  ('objective.trust_region', 'not in'): ('objective.trust_region.fn=total_variation',),
  ('objective.score_centering', 'used'): ('objective.score_centering.fn=top_k', *CENTERED),
  ('objective.reference', 'in'): ('objective.reference.fn=refreshed', 'objective.kl.fn=k3'),
  ('objective.teacher', 'in'): ('objective.teacher=',),
  ('objective.teacher', 'used'): (
    'objective.teacher=smollm2-135m',
    'objective.distillation.fn=on_policy',
  ),
  ('objective.weigh_rows', 'in'): ('objective.weigh_rows=False',),
  ('objective.zero_variance', 'in'): ('objective.zero_variance.fn=mask',),
  ('optimizer.outer', 'used'): ('optimizer.outer.fn=slow_fast',),
  ('optimizer.outer', 'in'): ('optimizer.outer.fn=last_turn_first', *EPISODES),
  ('replay.collect', 'in'): ('replay.collect.fn=dars',),
  ('replay.collect', 'used'): ('replay.collect.fn=mixed',),
  ('replay.reuse', 'in'): ('replay.reuse.fn=mixed_groups',),
  ('replay.reuse', 'not in'): ('replay.reuse.fn=successes',),
  ('replay.reuse', 'used'): ('replay.reuse.fn=successes',),
  ('rewards.parts', 'used'): ('rewards.parts=({"fn": "number"},)',),
  ('rewards.truncate', 'used'): ('rewards.truncate.fn=outliers',),
  ('rewards.vote', 'used'): ('rewards.vote.fn=majority',),
  ('objective.activation_noise', 'used'): ('objective.activation_noise.fn=layerwise',),
  ('rollout.attention', 'in'): ('rollout.attention=ragged',),
  ('rollout.cache_dtype', 'not in'): ('rollout.cache_dtype=int8',),
  ('rollout.cache_dtype', 'in'): ('rollout.cache_dtype=int8',),
  ('rollout.carry_cache', 'used'): ('rollout.carry_cache=True', 'rollout.stop.fn=groups'),
  ('rollout.draft', 'used'): ('rollout.draft.fn=coupled',),
  ('rollout.early_exit', 'not in'): ('rollout.early_exit.fn=repetition',),
  ('rollout.early_exit', 'used'): ('rollout.early_exit.fn=entropy',),
  ('rollout.draft_head', 'used'): ('rollout.draft_head.fn=eagle',),
  ('rollout.length_head', 'used'): ('rollout.length_head.fn=discounted_return',),
  ('rollout.length_schedule', 'not in'): ('rollout.length_schedule.fn=stairs',),
  ('rollout.lockstep', 'in'): ('rollout.lockstep=False',),
  ('rollout.ngram.draft', 'used'): ('rollout.ngram.draft=2',),
  ('rollout.pruning', 'used'): ('rollout.pruning.fn=uniform',),
  ('rollout.slots', 'above'): ('rollout.slots=1',),
  ('rollout.stop', 'in'): ('rollout.stop.fn=none',),
  ('rollout.stop', 'used'): ('rollout.stop.fn=groups',),
  ('rollout.test_every', 'above'): ('rollout.test_every=4',),
  ('rollout.tree', 'used'): ('rollout.tree.fn=latr',),
  ('rollout.weights_dtype', 'not in'): ('rollout.weights_dtype=int8',),
  ('rollout.weights_dtype', 'in'): ('rollout.weights_dtype=auto',),
  ('rollout.windows', 'above'): ('rollout.windows=2',),
  ('rollouts', 'below'): ('rollouts=1', 'objective.advantage.fn=raw'),
  ('sft.steps', 'below'): ('sft.steps=0',),
  ('sft.steps', 'used'): ('sft.steps=1',),
  ('steps', 'below'): ('steps=0', 'sft.steps=1'),
}
# What the chosen functions need → functions that need it.
NEEDS = {
  'contexts': ('objective.advantage.fn=nudged', 'curriculum.hint.fn=contexts'),
  'demo': ('objective.sft_loss.fn=likelihood',),
  'greedy': ('objective.advantage.fn=greedy_baseline',),
  'parts': ('objective.advantage.fn=decoupled',),
  'teacher': ('objective.distillation.fn=on_policy', 'objective.teacher=smollm2-135m'),
  'spans': (
    'objective.distillation.fn=on_policy_spans',
    'objective.distillation.teacher_prompt_tokens=64',
    'objective.distillation.teacher_completion_tokens=64',
    'objective.teacher=smollm2-135m',
  ),
  'solution': (
    'objective.distillation.fn=solved_by_data',
    'objective.distillation.prompt_tokens=64',
  ),
}
# Values that the configuration does not determine.
FACTS = {
  'mesh.context': 2,
  'mesh.expert': 2,
  'mesh.decode': 2,
  'mesh.tensor': 2,
  'model.attention_cap': 30.0,
  'model.chunked': True,
  'model.experts': 0,
  'model.inexact': ('experts',),
  'model.latent': 16,
  'model.recurrent': True,
  'model.sinks': True,
  'model.window': 8,
  'rewards.batched': 'group',
}


def overrides(condition: Condition) -> tuple[str, ...]:
  if condition.op == 'needs':
    return NEEDS[condition.value]
  if (condition.field, condition.value) == ('environment', ('endpoint',)):
    return ENDPOINT
  if (condition.field, condition.value) == ('environment', ('discussion',)):
    return 'environment.fn=discussion', 'mode=split'
  if (condition.field, condition.value) == ('curriculum.hint', ('written',)):
    return ('curriculum.hint.fn=written',)
  if (condition.field, condition.value) == ('learner.attention', ('cudnn',)):
    return ('learner.attention=cudnn',)
  if condition.value == ('solved_by_group',):
    return 'objective.distillation.fn=solved_by_group', 'objective.distillation.prompt_tokens=64'
  if (condition.field, condition.value) == ('replay.reuse', ('contrast_pairs', 'recomposed')):
    return 'replay.reuse.fn=contrast_pairs', 'objective.aggregation.fn=token_mean'
  if condition.value == ('reflected',):
    return 'curriculum.hint.fn=reflected', 'objective.advantage.fn=amplified'
  if (condition.field, condition.value) == ('replay.reuse', ('self_imitation',)):
    return 'replay.reuse.fn=self_imitation', 'objective.advantage.fn=group_centered'
  if (condition.field, condition.value) == ('curriculum.hint', ('self_rolled',)):
    return 'curriculum.hint.fn=self_rolled', 'replay.reuse.fn=cached'
  if (condition.field, condition.value) == ('curriculum.hint', ('corrected',)):
    return ('curriculum.hint.fn=corrected',)
  if (condition.field, condition.value) == ('curriculum.hint', ('none', 'self_rolled')):
    return ('curriculum.hint.fn=prefix',)
  if (condition.field, condition.value) == ('replay.reuse', ('shared',)):
    return 'replay.reuse.fn=shared', 'replay.reuse.folder=runs/shared'
  return () if condition.field in FACTS else EXAMPLES[condition.field, condition.op]


def facts(*conditions: Condition) -> dict:
  known = {c.field: FACTS[c.field] for c in conditions if c.field in FACTS}
  if Condition('model.experts', label='a mixture of experts') in conditions:
    known['model.experts'] = 4
  needs = tuple(c.value for c in conditions if c.op == 'needs')
  return known | ({'objective.needs': needs} if needs else {})


def config(*conditions: Condition):
  """The defaults with what each condition needs besides, then with what meets it."""
  flags = [flag for c in conditions for flag in overrides(c)[1:]]
  flags += [flag for c in conditions for flag in overrides(c)[:1]]
  return loading.load('', [f'--config.{flag}' for flag in flags])


def name(row) -> str:
  return f'{row.a.field}-{row.a.op}-{row.b.field}-{row.b.op}'


@pytest.mark.parametrize('row', ROWS, ids=name)
def test_each_side_alone_is_accepted(row):
  for side in (row.a, row.b):
    alone = config(side)
    assert side.holds(alone, facts(side))
    compatibility.check(alone, facts(side))


@pytest.mark.parametrize('row', ROWS, ids=name)
def test_both_together_are_refused_with_the_reason_and_the_remedy(row):
  sides = (row.a, row.b)
  both = config(*sides, *row.also)
  for version in (both, schema.typed(both)):
    with pytest.raises(UserError) as caught:
      compatibility.check(version, facts(*sides), (row,))
    text = str(caught.value)
    assert text.endswith(f': {row.reason}; {row.remedy}.') and '\n' not in text
    assert ' does not go with ' in text and text.startswith(('config.', 'a model'))
    with pytest.raises(UserError):
      compatibility.check(version, facts(*sides))


def test_no_pair_is_in_the_table_twice():
  pairs = [frozenset([(c.field, c.op, c.value) for c in (row.a, row.b)]) for row in ROWS]
  assert len(set(pairs)) == len(pairs)


@pytest.mark.parametrize('need', NEEDS)
def test_the_examples_of_a_need_have_it(need):
  chosen = loading.load('', [f'--config.{flag}' for flag in NEEDS[need] if 'objective' in flag])
  assert need in objective.method(chosen.objective).needs


def test_conditions_on_unknown_facts_do_not_hold():
  splash = loading.load('', ['--config.learner.attention=splash'])
  compatibility.check(splash)
  with pytest.raises(
    UserError, match='a model with chunked=True: .*; set --config.learner.attention=xla'
  ):
    compatibility.check(splash, {'model.chunked': True})


def test_the_published_table_is_up_to_date():
  published = (ROOT / 'configs' / 'COMPATIBILITY.md').read_text()
  assert published == compatibility.markdown(), (
    'run: python -m jaxrl_llm.config.compatibility > configs/COMPATIBILITY.md'
  )

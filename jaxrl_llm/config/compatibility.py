"""What goes with what: one table of settings that are refused together, with the reason and the remedy.

`python -m jaxrl_llm.config.compatibility` prints the table of configs/COMPATIBILITY.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import ml_collections

from jaxrl_llm.config import (
  centered_scores,
  draft_heads,
  endpoint_settings,
  environment_settings,
  exact_agreement,
  hinted_prompts,
  quantized_base,
  recurrent_models,
  replayed_groups,
  teacher_settings,
)
from jaxrl_llm.config.conditions import Condition, Facts, Row
from jaxrl_llm.config.schema import Config
from jaxrl_llm.config.turn_batching import ROWS as BATCHED_TURNS
from jaxrl_llm.types import UserError

_DEFAULT = 'leave one of them at its default'
_CHOOSE = 'choose one of them'


def _rows(
  some: tuple[Condition, ...],
  others: tuple[Condition, ...],
  reason: str,
  remedy: str = _DEFAULT,
  also: tuple[Condition, ...] = (),
) -> tuple[Row, ...]:
  """Each of `some` with each of `others`."""
  return tuple(Row(a, b, reason, remedy, also) for a in some for b in others)


def _used(section: str, *names: str) -> tuple[Condition, ...]:
  return tuple(Condition(f'{section}.{name}') for name in names)


_ENVIRONMENT = Condition('environment')
_NGRAM = Condition('rollout.ngram.draft')
_WINDOWS = Condition('rollout.windows', 'above', 1)
_TEST_EVERY = Condition('rollout.test_every', 'above', 1)
_CARRY = Condition('rollout.carry_cache')
_DRAFT, _PRUNING, _STOP, _TREE = _used('rollout', 'draft', 'pruning', 'stop', 'tree')
_LENGTH_HEAD = Condition('rollout.length_head')
_EARLY_EXIT = Condition('rollout.early_exit')
_REUSE = Condition('replay.reuse')
_REFLECTED = Condition('curriculum.hint', 'in', ('reflected',))
_WRITTEN = Condition('curriculum.hint', 'in', ('written',))
_REPLAY_EXPERTS = Condition('learner.replay_experts')
_SPLASH = Condition('learner.attention', 'in', ('splash',))
_CUDNN = Condition('learner.attention', 'in', ('cudnn',))
_SEVERAL_SLOTS = (
  Condition('replay.collect', 'in', ('dars',)),
  Condition('curriculum.slots_per_prompt', 'above', 1),
)
_ONE_ROLLOUT = Condition('rollouts', 'below', 2)
_EACH_REWARD = Condition(
  'objective.advantage', 'needs', 'parts', "that needs each reward (such as 'decoupled')"
)
_NEEDS_GREEDY = "that needs a greedy rollout (such as 'greedy_baseline')"
_GREEDY = Condition('objective.advantage', 'needs', 'greedy', _NEEDS_GREEDY)
_DEMONSTRATIONS = Condition('objective.sft_loss', 'needs', 'demo', 'that needs demonstrations')
_AUXILIARY = Condition('objective.auxiliary_model')
_LORA = Condition('lora.rank')
_REFRESHED = Condition('objective.reference', 'in', ('refreshed', 'reincarnated'))

_OWN_LOOP = 'each is a decode loop of its own'
_PARTS_OF_A_GROUP = 'a prompt fills several slots, and this needs the whole group in one slot'

# Advantages that are zero or undefined for a single rollout.
OF_A_GROUP = (
  *('group_normalized', 'group_centered', 'group_whitened', 'leave_one_out', 'batch_normalized'),
  *('mean_relative', 'median_centered', 'shifted', 'log_mean_exp', 'length_weighted', 'adora'),
  *('least_variance', 'equal_treatment', 'hardness_weighted', 'decoupled', 'nudged', 'staged'),
  *('pass_at_k', 'best_margin', 'rescaled', 'greedy_baseline', 'exp_weighted', 'balanced'),
)

_ROLLOUT = (
  *_rows((_PRUNING,), (_STOP, _DRAFT, _TREE, _NGRAM), _OWN_LOOP),
  Row(
    _LENGTH_HEAD, _PRUNING, 'a rollout records one hidden state, and each reads its own', _CHOOSE
  ),
  Row(_LENGTH_HEAD, _TREE, 'a tree has a slot for every row, and no row waits in a queue', _CHOOSE),
  *_rows((_TREE,), (_STOP, _DRAFT, _EARLY_EXIT, _NGRAM, _WINDOWS, _TEST_EVERY), _OWN_LOOP),
  *_rows((_NGRAM,), (_EARLY_EXIT, _WINDOWS, _TEST_EVERY), _OWN_LOOP),
  *_rows(
    (_CARRY,),
    (_PRUNING, _TREE, _DRAFT, _NGRAM),
    'this decode loop does not return the keys and values of unfinished rows',
  ),
  Row(
    _CARRY,
    Condition('rollout.stop', 'in', ('none',)),
    'it carries the cache of unfinished rollouts, and without a stop rule there are none',
    'set --config.rollout.stop.fn to a rule such as groups',
  ),
  Row(
    _TREE,
    _ONE_ROLLOUT,
    'a tree needs rows to branch into',
    'raise --config.rollouts to 2 or more',
  ),
  *_rows(
    (Condition('rollout.lockstep', 'in', (False,)),),
    tuple(Condition(f'mesh.{axis}', 'above', 1) for axis in ('expert', 'decode', 'tensor')),
    'shards of rows that end apart wait forever for each other in the sums over this axis',
    'set --config.rollout.lockstep=True, or that axis to 1',
  ),
  *_rows(
    (Condition('rollout.attention', 'in', ('ragged',)),),
    (
      _NGRAM,
      Condition('model.latent', label='a model with latent attention'),
      Condition('model.chunked', label='a model with chunked attention'),
    ),
    'the kernel takes one query a row, and its keys are its youngest ones',
    'set --config.rollout.attention=xla',
  ),
)

_LEARNER = (
  Row(
    _REPLAY_EXPERTS,
    Condition('model.experts', 'below', 1, 'a model without experts'),
    'it replays the experts of a mixture',
    'set --config.learner.replay_experts=False',
  ),
  *_rows(
    (_REPLAY_EXPERTS,),
    (_PRUNING, _TREE, _DRAFT, _REUSE, _ENVIRONMENT, _NGRAM),
    'it replays the experts of every token, and these tokens come without a record of theirs',
  ),
  Row(
    Condition('learner.quantize'),
    Condition('rollout.weights_dtype', 'in', ('auto',)),
    'the update rounds kernels as sampling does, and sampling rounds none',
    'set --config.rollout.weights_dtype to int8 or float8_e4m3fn',
  ),
  Row(
    _SPLASH,
    Condition('mesh.context', 'above', 1),
    'the kernel needs all tokens of a row on one device',
    'set --config.mesh.context=1, or --config.learner.attention=xla',
  ),
  Row(
    _SPLASH,
    Condition('model.chunked', label='a model with chunked attention'),
    "the kernel's windows slide with each token",
    'set --config.learner.attention=xla',
  ),
  Row(
    _CUDNN,
    Condition('mesh.context', 'above', 1),
    'the kernel needs all tokens of a row on one device',
    'set --config.mesh.context=1, or --config.learner.attention=xla',
  ),
  *_rows(
    (_CUDNN,),
    (
      Condition('dtype', 'in', ('float32',)),
      Condition('model.latent', label='a model with latent attention'),
      Condition('model.sinks', label='a model with sinks'),
      Condition('model.attention_cap', label='a model with a cap on its scores'),
    ),
    'the kernel computes plain scores of bfloat16',
    'set --config.learner.attention=xla',
  ),
  *_rows(
    (Condition('mesh.preset'),),
    (Condition('mesh.data', 'not in', (1,)), Condition('mesh.fsdp', 'not in', (-1,))),
    'the preset sets the sizes of data and fsdp',
  ),
)

_WEIGHTS = (
  Row(
    Condition('steps', 'below', 1),
    Condition('sft.steps', 'below', 1),
    'nothing is trained',
    'raise --config.steps, or --config.sft.steps for a supervised start',
  ),
  Row(
    Condition('lora.init'),
    Condition('lora.rank', 'below', 1),
    'an adapter to start from needs an adapter to train',
    'set --config.lora.rank to that of the adapter, or leave init empty',
  ),
  Row(
    _LORA,
    Condition('sft.steps'),
    'an adapter leaves the loaded weights as they are, and the supervised start would change them',
    'set one of them to 0',
  ),
  Row(
    _LORA,
    _AUXILIARY,
    'an adapter saves the memory of training all weights, which an auxiliary model would take again',
    'set --config.lora.rank=0, or --config.objective.auxiliary_model.fn=none',
  ),
  *_rows(
    (_REFRESHED,),
    (_LORA, _AUXILIARY),
    'this reads the first weights, and a refreshed reference model is not these',
    'set --config.objective.reference.fn=frozen, or leave the other at its default',
  ),
  Row(
    Condition('objective.kl_scale'),
    Condition('objective.kl', 'in', ('none',)),
    'it scales the KL term, and there is none',
    'set --config.objective.kl.fn=k3',
  ),
)

_GROUPS = (
  Row(
    Condition('objective.advantage', 'in', OF_A_GROUP, 'relative to the group'),
    _ONE_ROLLOUT,
    'a group-relative advantage compares rollouts of a prompt',
    'raise --config.rollouts to at least 2',
  ),
  Row(
    Condition('objective.auxiliary_model', 'in', ('preference',)),
    _ONE_ROLLOUT,
    'a preference compares two rollouts of a prompt',
    'raise --config.rollouts to at least 2',
  ),
  Row(
    Condition('replay.reuse', 'not in', ('none', 'mixed_groups'), 'of single rows'),
    _EACH_REWARD,
    'replay reads the sum of the rewards of a rollout, and the advantage each of them',
    _CHOOSE,
  ),
  Row(
    _REUSE,
    _PRUNING,
    'the correctness head of pruning is trained on new rollouts only',
    _CHOOSE,
  ),
  Row(_LENGTH_HEAD, _REUSE, 'the length head is trained on new rollouts only', _CHOOSE),
  Row(
    Condition('learner.passes', 'above', 1),
    Condition('optimizer.outer'),
    'both take several optimizer steps on a minibatch',
    _CHOOSE,
  ),
  Row(*_SEVERAL_SLOTS, 'both give a prompt several slots', _CHOOSE),
  *_rows(
    (_GREEDY,),
    (*_SEVERAL_SLOTS, _PRUNING, _TREE, _NGRAM, _DRAFT)
    + (_STOP, _REUSE, _ENVIRONMENT, _DEMONSTRATIONS),
    'the first row of every group is sampled greedily in one call of the plain decode loop',
  ),
  *_rows(
    _SEVERAL_SLOTS,
    (
      Condition('learner.minibatches', 'above', 1),
      _REUSE,
      Condition('rewards.vote'),
      _STOP,
      _DRAFT,
      _DEMONSTRATIONS,
      _AUXILIARY,
    ),
    _PARTS_OF_A_GROUP,
  ),
  Row(
    Condition('curriculum.allocation', 'not in', ('equal',)),
    Condition('curriculum.slots_per_prompt', 'below', 2),
    'with one slot per prompt there is nothing to allocate',
    'set --config.curriculum.slots_per_prompt to 2 or more, and --config.rollouts to that share of a group',
  ),
)

_POLICY_WRITES = (
  *_rows(
    (_WRITTEN,),
    (Condition('replay.collect'), Condition('curriculum.slots_per_prompt', 'above', 1)),
    'groups of one prompt with several hints would become one group',
  ),
  *_rows(
    (_WRITTEN,),
    (_PRUNING, _LENGTH_HEAD, _AUXILIARY, _EACH_REWARD),
    'hints have a reward that is learned later, and this reads the grade or the length of every rollout',
  ),
  *_rows(
    (_REFLECTED,),
    (
      Condition('objective.advantage', 'in', OF_A_GROUP, 'relative to the group'),
      Condition('objective.zero_variance', 'in', ('mask',)),
    ),
    'reflections and retries with guidance are groups of one row, from which this learns nothing',
    'set --config.objective.advantage.fn=amplified and --config.objective.zero_variance.fn=keep',
  ),
  *_rows(
    (_REFLECTED,),
    (
      Condition('replay.collect'),
      Condition('curriculum.slots_per_prompt', 'above', 1),
      Condition('objective.weigh_rows', 'in', (False,)),
    ),
    'attempts are learned in slots of a later step, where one row may count for the baseline alone',
  ),
)

_GRADED_AGAIN = _rows(
  (Condition('rewards.truncate'), Condition('curriculum.labels')),
  (Condition('rewards.batched', label='a batched reward function'),),
  'some completions are graded again, and a batched reward function would see them without their group',
  "set the former's fn to none, or leave batched empty",
)

ROWS: tuple[Row, ...] = (
  *_ROLLOUT,
  *(*recurrent_models.ROWS, *quantized_base.ROWS, *draft_heads.ROWS),
  *_LEARNER,
  *_WEIGHTS,
  *(*_GROUPS, *replayed_groups.ROWS, *teacher_settings.ROWS, *centered_scores.ROWS),
  *hinted_prompts.ROWS,
  *_POLICY_WRITES,
  *environment_settings.ROWS,
  *_GRADED_AGAIN,
  *(*endpoint_settings.ROWS, *BATCHED_TURNS, *exact_agreement.ROWS),
)


def check(
  config: Config | ml_collections.ConfigDict,
  facts: Facts | None = None,
  rows: tuple[Row, ...] = ROWS,
) -> None:
  """Raises UserError for the first row whose conditions hold, for the config alone and the `facts` known so far."""
  facts = facts or {}
  for row in rows:
    if row.holds(config, facts):
      a, b = row.a.name(config, facts), row.b.name(config, facts)
      raise UserError(f'{a} does not go with {b}: {row.reason}; {row.remedy}.')


def markdown() -> str:
  """The table as configs/COMPATIBILITY.md."""
  return '\n'.join(_lines()) + '\n'


def _lines() -> Iterator[str]:
  yield '# What goes with what'
  yield ''
  yield 'Settings that are refused together, before a model is loaded where the configuration alone decides.'
  yield 'Generated from `jaxrl_llm/config/compatibility.py`: `python -m jaxrl_llm.config.compatibility`.'
  yield ''
  yield '| setting | does not go with | because | remedy |'
  yield '|---|---|---|---|'
  for _, group in itertools.groupby(
    ROWS, key=lambda row: (row.a, row.also, row.reason, row.remedy)
  ):
    rows = list(group)
    first, others = rows[0], ', '.join(row.b.text() for row in rows)
    also = ''.join(f' and {condition.text()}' for condition in first.also)
    yield f'| {first.a.text()}{also} | {others} | {first.reason} | {first.remedy} |'


if __name__ == '__main__':
  print(markdown(), end='')

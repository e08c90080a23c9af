"""Settings that do not go with groups replayed in slots of their own, or resampled: rows of `compatibility.ROWS`."""

from __future__ import annotations

from jaxrl_llm.config.conditions import Condition, Row

_GROUPS = Condition(
  'replay.reuse', 'in', ('mixed_groups', 'self_imitation', 'recomposed', 'shared')
)
_SHARED = Condition('replay.reuse', 'in', ('shared',))
_IMITATION = Condition('replay.reuse', 'in', ('self_imitation',))
_WEIGHED = Condition('replay.reuse', 'in', ('contrast_pairs', 'recomposed'))
ROWS = (
  Row(
    _GROUPS,
    Condition('replay.collect'),
    'both decide which groups fill the slots of a batch',
    'set the fn of one of them to none',
  ),
  Row(
    _GROUPS,
    Condition('objective.sft_loss', 'needs', 'demo', 'that needs demonstrations'),
    'a stored group has no demonstration',
    'set --config.replay.reuse.fn=none',
  ),
  Row(
    _SHARED,
    Condition('rewards.vote'),
    'groups of other runs are graded by their answers, and the vote ignores answers',
    'set the fn of one of them to none',
  ),
  Row(
    _IMITATION,
    Condition('objective.advantage', 'not in', ('group_centered',)),
    'the advantages of replayed rows are differences of rewards, and so must be those beside them',
    'set --config.objective.advantage.fn=group_centered',
  ),
  Row(
    _IMITATION,
    Condition('objective.credit_assignment', 'not in', ('row',)),
    'the advantages of replayed rows are of whole rows',
    'set --config.objective.credit_assignment.fn=row',
  ),
  Row(
    _IMITATION,
    Condition('objective.weigh_rows', 'in', (False,)),
    'the weight of the self-imitation term is that of its rows',
    'leave --config.objective.weigh_rows at True',
  ),
  Row(
    _WEIGHED,
    Condition('objective.aggregation', 'not in', ('token_mean',)),
    'the weights of rows are those of a mean over the tokens of the resampled batch',
    'set --config.objective.aggregation.fn=token_mean',
  ),
  Row(
    _WEIGHED,
    Condition('objective.zero_variance', 'in', ('mask',)),
    'the weights of rows are relative to all tokens of the batch, and leave zero-variance groups out',
    'set --config.objective.zero_variance.fn=keep',
  ),
  Row(
    _WEIGHED,
    Condition('objective.weigh_rows', 'in', (False,)),
    'a row is learned several times, or not at all, by its weight',
    'leave --config.objective.weigh_rows at True',
  ),
)

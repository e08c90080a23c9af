"""Settings that do not go with a draft head: rows of `compatibility.ROWS`."""

from __future__ import annotations

from jaxrl_llm.config.conditions import Condition, Row

_HEAD = Condition('rollout.draft_head')
_CHOOSE = 'choose one of them'
_OWN_LOOP = 'each is a decode loop of its own'
_NO_HEAD = 'set --config.rollout.draft_head.fn=none'


def _rows(others: tuple[Condition, ...], reason: str, remedy: str = _CHOOSE) -> tuple[Row, ...]:
  return tuple(Row(_HEAD, other, reason, remedy) for other in others)


ROWS = (
  *_rows(
    (Condition('rollout.ngram.draft'),),
    'both draft the next tokens of a row, and one draft of a row is verified at a time',
  ),
  *_rows(
    (Condition('rollout.pruning'), Condition('rollout.length_head')),
    'a run trains one head on its rollouts',
  ),
  *_rows(
    (
      Condition('rollout.tree'),
      Condition('rollout.early_exit'),
      Condition('rollout.windows', 'above', 1),
      Condition('rollout.test_every', 'above', 1),
    ),
    _OWN_LOOP,
  ),
  *_rows(
    (Condition('rollout.carry_cache'),),
    'the loop with drafts does not return the keys and values of unfinished rows',
  ),
  *_rows(
    (Condition('rollout.attention', 'in', ('ragged',)),),
    'the kernel takes one query a row, and its keys are its youngest ones',
    'set --config.rollout.attention=xla',
  ),
  *_rows(
    (Condition('model.recurrent', label='a model with recurrent layers'),),
    'a state cannot go back behind rejected tokens',
    _NO_HEAD,
  ),
  *_rows(
    (Condition('learner.replay_experts'),),
    'it replays the experts of every token, and the loop with drafts does not record them',
  ),
  *_rows(
    (Condition('replay.reuse'),),
    'the draft head is trained on new rollouts only',
  ),
  *_rows(
    (Condition('environment'),),
    'a row holds several turns, and this assumes a single completion',
    _NO_HEAD,
  ),
  *_rows(
    (
      Condition(
        'objective.advantage',
        'needs',
        'greedy',
        "that needs a greedy rollout (such as 'greedy_baseline')",
      ),
    ),
    'the first row of every group is sampled greedily in one call of the plain decode loop',
  ),
)

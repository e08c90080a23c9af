"""Settings that do not go with a model of recurrent layers: rows of `compatibility.ROWS`."""

from __future__ import annotations

from jaxrl_llm.config.conditions import Condition, Row

_MODEL = Condition('model.recurrent', label='a model with recurrent layers')
ROWS = (
  Row(
    Condition('rollout.carry_cache'),
    _MODEL,
    'the carried cache has columns, one a token, and a state has none',
    'set --config.rollout.carry_cache=False: unfinished rollouts are then encoded again',
  ),
  Row(
    Condition('rollout.tree'),
    _MODEL,
    'a branch begins at an earlier token, and the state there is not kept',
    'set --config.rollout.tree.fn=none',
  ),
  Row(
    Condition('rollout.ngram.draft'),
    _MODEL,
    'a state cannot go back behind rejected tokens',
    'set --config.rollout.ngram.draft=0',
  ),
  Row(
    Condition('learner.attention', 'in', ('splash', 'cudnn')),
    _MODEL,
    'the kernel is untried between recurrent layers',
    'set --config.learner.attention=xla',
  ),
  Row(
    Condition('rollout.attention', 'in', ('ragged',)),
    _MODEL,
    'the kernel is untried between recurrent layers',
    'set --config.rollout.attention=xla',
  ),
  Row(
    Condition('mesh.context', 'above', 1),
    _MODEL,
    'a state passes from token to token, and this axis divides the tokens of a row',
    'set --config.mesh.context=1',
  ),
)

"""Settings that do not go with `learner.agreement=exact`: rows of `compatibility.ROWS`."""

from __future__ import annotations

from jaxrl_llm.config.conditions import Condition, Row

_EXACT = Condition('learner.agreement', 'in', ('exact',))
_ORDER = 'this adds keys in another order than the update'
_COLUMNS = 'rows go on in columns of another order than those of the update'


def _row(other: Condition, reason: str, remedy: str) -> Row:
  return Row(_EXACT, other, reason, remedy)


ROWS = (
  _row(
    Condition('rollout.attention', 'in', ('ragged',)),
    _ORDER,
    'set --config.rollout.attention=xla',
  ),
  _row(
    Condition('learner.attention', 'in', ('splash', 'cudnn')),
    'this adds keys in another order than sampling',
    'set --config.learner.attention=xla',
  ),
  _row(
    Condition('rollout.cache_dtype', 'not in', ('auto', 'bfloat16')),
    'the update reads keys and values that are rounded to bfloat16',
    'set --config.rollout.cache_dtype=auto',
  ),
  _row(
    Condition('rollout.weights_dtype', 'not in', ('auto', 'bfloat16')),
    'products with scaled kernels are rounded twice',
    'set --config.rollout.weights_dtype=auto',
  ),
  _row(
    Condition('lora.base_dtype', 'not in', ('auto',)),
    'blocks of a quantized kernel are added in an order that depends on the number of rows',
    'set --config.lora.base_dtype=auto',
  ),
  _row(
    Condition('objective.activation_noise'),
    'the update adds noise that sampling does not have',
    'set --config.objective.activation_noise.fn=none',
  ),
  _row(Condition('rollout.windows', 'above', 1), _COLUMNS, 'set --config.rollout.windows=1'),
  *(
    _row(Condition(f'rollout.{name}'), _COLUMNS, f'set --config.rollout.{name}.fn=none')
    for name in ('stop', 'draft', 'draft_head', 'pruning', 'tree')
  ),
  _row(Condition('rollout.ngram.draft'), _COLUMNS, 'set --config.rollout.ngram.draft=0'),
  _row(Condition('environment'), _COLUMNS, 'set --config.environment.fn=none'),
  *(
    _row(
      Condition(f'mesh.{axis}', 'above', 1),
      'sums over this axis are added in an order that depends on the program',
      f'set --config.mesh.{axis}=1',
    )
    for axis in ('context', 'expert', 'decode', 'tensor')
  ),
  _row(
    Condition('model.inexact', label='a model with parts that are not known to be exact'),
    'experts, latents, windows, recurrent layers, sinks, caps, scaled logits and inputs of layers are not compared',
    'set --config.learner.agreement=off',
  ),
)

"""Settings that do not go with config.environment.batching.fn='turns': rows of `compatibility.ROWS`."""

from __future__ import annotations

from jaxrl_llm.config.conditions import Condition, Row

_TURNS = Condition('environment.batching', 'in', ('turns',))
_OWN_LOOP = 'it decodes by a loop of its own, in which each row has a slot and one cache'
_FULL = 'the cached columns are those of full attention, one of keys and one of values a head'


def _row(other: Condition, reason: str, remedy: str) -> Row:
  return Row(_TURNS, other, reason, remedy)


ROWS = (
  _row(
    Condition('environment', 'in', ('none', 'endpoint')),
    'it batches the turns of environments whose steps the trainer makes',
    'set --config.environment.batching.fn=lockstep',
  ),
  _row(
    Condition('environment.rounds', 'above', 0),
    'it has no rounds: episodes are played to their ends in one step',
    'set --config.environment.rounds=0',
  ),
  _row(Condition('rollout.test_every', 'above', 1), _OWN_LOOP, 'set --config.rollout.test_every=1'),
  _row(
    Condition('rollout.attention', 'in', ('ragged',)),
    'the kernel reads a ring whose rows share a column, and here each row has its own',
    'set --config.rollout.attention=auto',
  ),
  _row(
    Condition('rollout.early_exit'),
    'a rule begins anew with every call, and a turn takes several',
    'set --config.rollout.early_exit.fn=none',
  ),
  _row(
    Condition('model.recurrent', label='a model with recurrent layers'),
    'a state takes no padding behind appended tokens',
    'set --config.environment.batching.fn=lockstep',
  ),
  _row(
    Condition('model.window', 'above', 0, 'a model with sliding layers'),
    _FULL,
    'set --config.environment.batching.fn=lockstep',
  ),
  _row(
    Condition('model.latent', label='a model with latent attention'),
    _FULL,
    'set --config.environment.batching.fn=lockstep',
  ),
)

"""Settings that do not go with groups of earlier steps in slots of their own: rows of `compatibility.ROWS`."""

from __future__ import annotations

from jaxrl_llm.config.conditions import Condition, Row

_GROUPS = Condition('replay.reuse', 'in', ('mixed_groups',))
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
)

"""Settings that do not go with hints in prompts: rows of `compatibility.ROWS`."""

from __future__ import annotations

from jaxrl_llm.config.conditions import Condition, Row

_HINT = Condition('curriculum.hint')
_OTHER = 'completions of a hinted prompt do not answer the plain prompt, and this treats both alike'
_DEFAULT = 'leave one of them at its default'
ROWS = (
  *(
    Row(_HINT, other, _OTHER, _DEFAULT)
    for other in (
      Condition('rewards.truncate'),
      Condition('rollout.draft'),
      Condition('objective.sft_loss', 'needs', 'demo', 'that needs demonstrations'),
      Condition('replay.collect', 'in', ('dars',)),
    )
  ),
  Row(
    Condition('curriculum.hint', 'not in', ('none', 'self_rolled')),
    Condition('replay.reuse'),
    _OTHER,
    _DEFAULT,
  ),
  Row(
    Condition('curriculum.hint', 'in', ('self_rolled',)),
    Condition('replay.reuse', 'not in', ('cached',)),
    'completions of hinted prompts are learned from that cache alone',
    'set --config.replay.reuse.fn=cached, or --config.curriculum.hint.fn=none',
  ),
  Row(
    Condition(
      'curriculum.hint',
      'in',
      ('guide', 'rewritten', 'self_rolled', 'corrected', 'reflected', 'written'),
    ),
    Condition('rollout.stop'),
    'the update reads another prompt or none, so that an unfinished rollout cannot be continued',
    _DEFAULT,
  ),
  Row(
    Condition('curriculum.hint', 'in', ('corrected',)),
    Condition('curriculum.slots_per_prompt', 'above', 1),
    'a prompt fills several slots, and this needs the whole group in one slot',
    'set --config.curriculum.slots_per_prompt=1, or --config.curriculum.hint.fn=none',
  ),
  Row(
    Condition('objective.advantage', 'needs', 'contexts', "that needs contexts (such as 'nudged')"),
    Condition('curriculum.hint', 'not in', ('contexts', 'stages')),
    'the advantage compares the strategies or stages of prompts',
    'set --config.curriculum.hint.fn=contexts with its texts',
  ),
)

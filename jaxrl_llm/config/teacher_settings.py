"""Settings that do not go with distillation: rows of `compatibility.ROWS`."""

from __future__ import annotations

from jaxrl_llm.config.conditions import Condition, Row

_SOLVED = Condition('objective.distillation', 'needs', 'solution', 'that reads a solution')
_SPANS = Condition('objective.distillation', 'needs', 'spans', 'across tokenizers')
_STORED = 'a {} group has no tokens for the teacher'
_REMEDY = 'set its fn to none, or --config.objective.distillation.fn=none'
_DIVERGENCE = Condition('objective.divergence')
ROWS = (
  Row(
    Condition('objective.distillation', 'needs', 'teacher', 'by another model'),
    Condition('objective.teacher', 'in', ('',)),
    'distillation needs a teacher',
    'set --config.objective.teacher to a model, named as config.model is',
  ),
  Row(
    Condition('objective.teacher'),
    Condition('objective.distillation', 'in', ('none', 'solved_by_group', 'solved_by_data')),
    'nothing uses the teacher',
    'set --config.objective.distillation.fn=on_policy, or leave the teacher empty',
    also=(Condition('objective.divergence', 'in', ('none',)),),
  ),
  Row(
    _DIVERGENCE,
    Condition('objective.teacher', 'in', ('',)),
    'a divergence needs a teacher',
    'set --config.objective.teacher to a model, named as config.model is',
  ),
  Row(
    _DIVERGENCE,
    Condition('objective.distillation'),
    'the policy would learn from a teacher by its sampled tokens and by the vocabulary',
    'set --config.objective.distillation.fn=none, or --config.objective.divergence.fn=none',
  ),
  Row(
    Condition('objective.distillation', 'in', ('solved_by_group',)),
    Condition('rollouts', 'below', 2),
    'a completion learns from another one of its prompt',
    'raise --config.rollouts to at least 2',
  ),
  *(
    row
    for reader in (_SOLVED, _SPANS)
    for row in (
      Row(
        reader,
        Condition('curriculum.hint'),
        'the policy would be compared with a teacher that reads another prompt without the hint',
        _REMEDY,
      ),
      Row(
        reader,
        Condition('environment'),
        'the teacher reads one completion behind its prompt, and episodes have several turns',
        _REMEDY,
      ),
      Row(reader, Condition('replay.reuse'), _STORED.format('stored'), _REMEDY),
      Row(reader, Condition('replay.collect'), _STORED.format('waiting'), _REMEDY),
    )
  ),
)

"""Parts of a step that do not go together."""

from __future__ import annotations

from typing import Any

from jaxrl_llm.types import ModelConfig, UserError

# Each loop of its own kind, and what it cannot do.
_ALONE = dict(
  pruning=('stop', 'draft', 'tree', 'ngram'),
  tree=('stop', 'draft', 'early_exit', 'ngram', 'windows', 'test_every'),
  ngram=('early_exit', 'windows', 'test_every'),
  carry_cache=('pruning', 'tree', 'draft', 'ngram'),
)


def generation(rollout: Any) -> None:
  """Raises UserError for parts of generation that do not go together. Source: none."""

  def used(part: str) -> str:
    if part == 'ngram':
      return f'ngram.draft={rollout.ngram.draft}' if rollout.ngram.draft else ''
    if part == 'carry_cache':
      return 'carry_cache=True' if rollout.carry_cache else ''
    if part in ('windows', 'test_every'):
      return f'{part}={rollout[part]}' if rollout[part] > 1 else ''
    return f'{part}.fn={rollout[part].fn!r}' if rollout[part].fn != 'none' else ''

  for part, others in _ALONE.items():
    for other in others:
      if used(part) and used(other):
        raise UserError(
          f'config.rollout.{used(part)} does not go with config.rollout.{used(other)}; choose one of them.'
        )
  if rollout.carry_cache and rollout.stop.fn == 'none':
    raise UserError(
      'config.rollout.carry_cache=True hands on what a stop rule leaves unfinished, and '
      "config.rollout.stop.fn='none' leaves nothing; choose a rule such as groups."
    )


def experts(config: Any, model: ModelConfig) -> None:
  """Raises UserError where tokens come into rows that no loop has seen go anywhere. Source: none."""
  if not config.learner.replay_experts:
    return
  if not model.experts:
    raise UserError(
      'config.learner.replay_experts=True sends tokens to the experts of a mixture, and config.model has none; set it '
      'to False.'
    )
  takes = {f'rollout.{part}': config.rollout[part].fn for part in ('pruning', 'tree', 'draft')}
  takes |= {'replay.reuse': config.replay.reuse.fn, 'environment': config.environment.fn}
  takes['rollout.ngram'] = 'none' if not config.rollout.ngram.draft else 'ngram'
  for part in (part for part, fn in takes.items() if fn != 'none'):
    raise UserError(
      f'config.learner.replay_experts=True needs to have seen where every token went, and config.{part} brings '
      'tokens of which nobody has; leave one of them at its default.'
    )

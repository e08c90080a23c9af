"""Parts of a step that do not go together."""

from __future__ import annotations

from typing import Any

from jaxrl_llm.types import ModelConfig, UserError

# Each loop of its own kind, and what it cannot do.
_ALONE = dict(
  prune=('stop', 'draft', 'tree', 'ngram'),
  tree=('stop', 'draft', 'exit', 'ngram', 'windows', 'test_every'),
  ngram=('exit', 'windows', 'test_every'),
  carry_cache=('prune', 'tree', 'draft', 'ngram'),
)


def generation(generate: Any) -> None:
  """Raises UserError for parts of generation that do not go together. Source: none."""

  def used(part: str) -> str:
    if part == 'ngram':
      return f'ngram.draft={generate.ngram.draft}' if generate.ngram.draft else ''
    if part == 'carry_cache':
      return 'carry_cache=True' if generate.carry_cache else ''
    if part in ('windows', 'test_every'):
      return f'{part}={generate[part]}' if generate[part] > 1 else ''
    return f'{part}.fn={generate[part].fn!r}' if generate[part].fn != 'none' else ''

  for part, others in _ALONE.items():
    for other in others:
      if used(part) and used(other):
        raise UserError(
          f'config.generate.{used(part)} does not go with config.generate.{used(other)}; choose one of them.'
        )
  if generate.carry_cache and generate.stop.fn == 'none':
    raise UserError(
      'config.generate.carry_cache=True hands on what a stop rule leaves unfinished, and '
      "config.generate.stop.fn='none' leaves nothing; choose a rule such as groups."
    )


def experts(config: Any, model: ModelConfig) -> None:
  """Raises UserError where tokens come into rows that no loop has seen go anywhere. Source: none."""
  if not config.replay_experts:
    return
  if not model.experts:
    raise UserError(
      'config.replay_experts=True sends tokens to the experts of a mixture, and config.model has none; set it to False.'
    )
  takes = {f'generate.{part}': config.generate[part].fn for part in ('prune', 'tree', 'draft')}
  takes |= {part: config[part].fn for part in ('replay', 'environment')}
  takes['generate.ngram'] = 'none' if not config.generate.ngram.draft else 'ngram'
  for part in (part for part, fn in takes.items() if fn != 'none'):
    raise UserError(
      f'config.replay_experts=True needs to have seen where every token went, and config.{part} brings tokens of which '
      'nobody has; leave one of them at its default.'
    )

"""Settings that do not go with score centering: rows of `compatibility.ROWS`."""

from __future__ import annotations

from jaxrl_llm.config.conditions import Condition, Row

_CENTERED = Condition('objective.score_centering')
# Trust regions whose weight of a token depends on its own ratio and advantage alone.
OF_A_TOKEN = (
  *('none', 'clip', 'dual_clip', 'cap', 'cap_above', 'cap_band', 'one_side', 'two_side', 'ring'),
)
_OFF = 'set --config.objective.score_centering.fn=none, or leave the other at its default'

ROWS = (
  Row(
    _CENTERED,
    Condition('objective.ratio', 'not in', ('one', 'direct')),
    "it weighs the sampler's likeliest tokens, whose log-probs under an old policy are unknown",
    'set --config.objective.ratio.fn=direct, or one',
  ),
  Row(
    _CENTERED,
    Condition('objective.trust_region', 'not in', OF_A_TOKEN),
    "it needs the weight of tokens that were not drawn, and this weight is no function of a token's ratio",
    'set --config.objective.trust_region.fn=none, or cap',
  ),
  *(
    Row(
      _CENTERED,
      Condition(f'objective.{stage}'),
      'the weights of this stage are of drawn tokens, and the mean score needs those of all tokens',
      _OFF,
    )
    for stage in ('importance_correction', 'advantage_modulation', 'token_weighting')
  ),
  Row(
    _CENTERED,
    Condition('objective.divergence'),
    'the loss has one term over the vocabulary',
    'set one of them to none',
  ),
  *(
    Row(
      _CENTERED,
      other,
      'it reads the distribution that each token was drawn from, and these tokens come without a record of theirs',
      _OFF,
    )
    for other in (
      *(Condition(f'rollout.{x}') for x in ('pruning', 'tree', 'draft', 'draft_head')),
      Condition('rollout.ngram.draft'),
      Condition('replay.reuse'),
      Condition('environment'),
    )
  ),
)

"""What the metrics of a step's update are of: rollouts, demonstrations, or nothing."""

from __future__ import annotations

from jaxrl_llm.types import JsonObject

ROLLOUT_TOKENS = 'training/trained_tokens'
DEMONSTRATION_TOKENS = 'training/demonstration_tokens'
_OF_UPDATE = (
  'actor/',
  'critic/advantages/',
  'training/rollout_probs_diff',
  'training/trained',
  'frac_reward_zero_std',
  'length_head/',
  'draft_head/',
)
_WITHOUT_ROLLOUTS = (
  *('actor/sft_loss', 'actor/sft_share', 'actor/grad_norm', 'actor/update_norm'),
  *('actor/lr', 'actor/skipped_updates'),
)


def learned_tokens(row: JsonObject, default: float = 0.0) -> float:
  """Tokens of rollouts and demonstrations that had a gradient; `default` for a row that does not tell."""
  if ROLLOUT_TOKENS not in row:
    return default
  return row[ROLLOUT_TOKENS] + row.get(DEMONSTRATION_TOKENS, 0.0)


def without_idle(row: JsonObject) -> JsonObject:
  """The row without zeros that mean nothing: of an update without rollouts, or without any token.

  The first step has no batch, and some methods learn from demonstrations alone.
  """
  if row.get(ROLLOUT_TOKENS, 1):
    return row
  kept = _WITHOUT_ROLLOUTS if learned_tokens(row) else ()
  return {k: v for k, v in row.items() if k in kept or not k.startswith(_OF_UPDATE)}

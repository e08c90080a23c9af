"""Exit rules on rows: signals of sampled tokens, the rule while decoding, and its replay over a verified draft."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import jax
import jax.numpy as jnp

from jaxrl_llm.rollout import early_exit, sampling
from jaxrl_llm.rollout.decode_records import LoopConstants, LoopState
from jaxrl_llm.types import ABORTED, EXITED, UNFINISHED, Rollout

_EXIT_KEY = 2**31 - 2  # folded into a row's key: exit rules and sampling have separate noise


def token_signals(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Entropy (nats) and p₁ − p₂ of each distribution [..., V] at temperature 1."""
  logp = jax.nn.log_softmax(logits.astype(jnp.float32))
  top = jax.lax.top_k(jnp.exp(logp), 2)[0]
  return -(jnp.exp(logp) * logp).sum(-1), top[..., 0] - top[..., 1]


def exit_uniforms(keys_B: jax.Array, length_B: jax.Array | int) -> jax.Array:
  """One uniform [B] for the newest of `length_B` tokens of each row, keyed by seed, step, prompt, rollout and token."""
  fold = jax.vmap(lambda key: jax.random.fold_in(key, _EXIT_KEY))
  return sampling.uniforms(fold(keys_B), length_B)


def stop_reasons(decision: early_exit.ExitDecision, reason_B: jax.Array) -> jax.Array:
  """Reasons after an exit rule, int8 [B]; a row that has ended already keeps its reason."""
  by_rule_B = jnp.where(decision.exit_S, EXITED, reason_B)
  by_rule_B = jnp.where(decision.abort_S, ABORTED, by_rule_B)
  return jnp.where(reason_B != UNFINISHED, reason_B, by_rule_B).astype(jnp.int8)


def apply_rule(
  constants: LoopConstants, state: LoopState, write_S: jax.Array, logits_SxV: jax.Array
) -> LoopState:
  """Applies the exit rule to the rows `write_S` that just took a token drawn from `logits_SxV`. Row B is dropped."""
  rollout, row_S = state.rollout, jnp.minimum(write_S, len(constants.keys_B) - 1)
  exit_rule, memory_BxM = constants.settings.exit_rule, rollout.memory_BxM
  assert exit_rule is not None and memory_BxM is not None, 'prepare() adds the memory of a rule'
  decision = exit_rule(
    early_exit.RowSignals(
      rollout.tokens_BxT[row_S],
      rollout.length_B[row_S],
      constants.cap_B[row_S],
      *token_signals(logits_SxV),
      exit_uniforms(constants.keys_B[row_S], rollout.length_B[row_S]),
      memory_BxM[row_S],
    )
  )
  reason_S = stop_reasons(decision, rollout.reason_B[row_S])
  reason_B, weight_B, memory_BxM = (
    cast(jax.Array, x) for x in (rollout.reason_B, rollout.weight_B, memory_BxM)
  )
  return state._replace(
    rollout=rollout._replace(
      reason_B=reason_B.at[write_S].set(reason_S, mode='drop'),
      weight_B=weight_B.at[write_S].multiply(decision.weight_S, mode='drop'),
      memory_BxM=memory_BxM.at[write_S].set(decision.memory_SxM, mode='drop'),
    ),
  )


def replay_rule(
  rule: Callable[[early_exit.RowSignals], early_exit.ExitDecision],
  rollout: Rollout,
  entropy_BxT: jax.Array,
  margin_BxT: jax.Array,
  cap_B: jax.Array,
  keys_B: jax.Array,
) -> Rollout:
  """Applies the rule to rows token by token, as if they had been sampled under it: memories, weights, ends.

  `rollout` holds the tokens of a draft, with the reason of each row's last token. The signals are those of the weights
  that verify the draft. A row that exits or is aborted earlier ends there.
  """
  T = rollout.tokens_BxT.shape[1]

  def at_token(t, rows):
    last_B = rows.length_B == t + 1
    here_B = rows.length_B > t
    decision = rule(
      early_exit.RowSignals(
        rows.tokens_BxT,
        jnp.full_like(rows.length_B, t + 1),
        cap_B,
        entropy_BxT[:, t],
        margin_BxT[:, t],
        exit_uniforms(keys_B, t + 1),
        rows.memory_BxM,
      )
    )
    now_B = jnp.where(last_B, rows.reason_B, UNFINISHED)
    reason_B = stop_reasons(decision, now_B)
    ends_B = here_B & (reason_B != UNFINISHED)
    return rows._replace(
      length_B=jnp.where(ends_B, t + 1, rows.length_B),
      reason_B=jnp.where(ends_B, reason_B, rows.reason_B),
      weight_B=jnp.where(here_B, rows.weight_B * decision.weight_S, rows.weight_B),
      memory_BxM=jnp.where(here_B[:, None], decision.memory_SxM, rows.memory_BxM),
    )

  # A rule runs first at a row's second token.
  return jax.lax.fori_loop(1, T, at_token, rollout)

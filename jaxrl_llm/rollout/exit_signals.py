"""Showing rows to the exit rule: the signals of their newest tokens, and those of tokens that a draft brought."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl_llm.rollout import early_exit, sampling
from jaxrl_llm.types import ABORTED, EXITED, UNFINISHED, Rollout

_LOTTERY = 2**31 - 2  # folded into a row's key: an exit rule's noise is none of the sampler's


def token_signals(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Entropy (nats) and p₁ − p₂ of each distribution [..., V] at temperature 1."""
  logp = jax.nn.log_softmax(logits.astype(jnp.float32))
  top = jax.lax.top_k(jnp.exp(logp), 2)[0]
  return -(jnp.exp(logp) * logp).sum(-1), top[..., 0] - top[..., 1]


def lottery(keys_B: jax.Array, length_B: jax.Array | int) -> jax.Array:
  """One uniform for the newest of `length_B` tokens of each row: by seed, step, prompt, rollout and token."""
  fold = jax.vmap(lambda key: jax.random.fold_in(key, _LOTTERY))
  return sampling.uniforms(fold(keys_B), length_B)


def ended(verdict: early_exit.ExitDecision, reason_B: jax.Array) -> jax.Array:
  """Why rows stopped, after a verdict: no rule undoes that a row ended by itself. int8 [B]."""
  by_rule_B = jnp.where(verdict.exit_S, EXITED, reason_B)
  by_rule_B = jnp.where(verdict.abort_S, ABORTED, by_rule_B)
  return jnp.where(reason_B != UNFINISHED, reason_B, by_rule_B).astype(jnp.int8)


def replay_rule(
  rule: Callable,
  rollout: Rollout,
  entropy_BxT: jax.Array,
  margin_BxT: jax.Array,
  cap_B: jax.Array,
  keys_B: jax.Array,
) -> Rollout:
  """Rows as if their tokens had been sampled one by one under the rule: memories, weights, and where rows end.

  `rollout` holds the tokens of a draft, with the reasons that the last of each row gives. Signals are of the weights
  that would have sampled them. A row that exits or is aborted earlier is cut there.
  """
  T = rollout.tokens_BxT.shape[1]

  def look(t, rows):
    last_B = rows.length_B == t + 1
    here_B = rows.length_B > t
    verdict = rule(
      early_exit.RowSignals(
        rows.tokens_BxT,
        jnp.full_like(rows.length_B, t + 1),
        cap_B,
        entropy_BxT[:, t],
        margin_BxT[:, t],
        lottery(keys_B, t + 1),
        rows.memory_BxM,
      )
    )
    now_B = jnp.where(last_B, rows.reason_B, UNFINISHED)
    reason_B = ended(verdict, now_B)
    ends_B = here_B & (reason_B != UNFINISHED)
    return rows._replace(
      length_B=jnp.where(ends_B, t + 1, rows.length_B),
      reason_B=jnp.where(ends_B, reason_B, rows.reason_B),
      weight_B=jnp.where(here_B, rows.weight_B * verdict.weight_S, rows.weight_B),
      memory_BxM=jnp.where(here_B[:, None], verdict.memory_SxM, rows.memory_BxM),
    )

  # The first look is at a row's second token.
  return jax.lax.fori_loop(1, T, look, rollout)

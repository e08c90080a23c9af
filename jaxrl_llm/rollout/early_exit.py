"""Ending a row before its end token or its cap: each function here looks at the rows' newest token and judges.

Named in `config.rollout.early_exit.fn`. A row that exits is graded as it is, like one that its cap cut; one
that is aborted is not learned from. A rule sees a row's own record alone, so that slots and order change
nothing. The first look is at a row's second token. A rule's memory is part of the row (`Rollout.memory_BxM`): a row
that is continued, by the second leg of pruning or in a later step, goes on with it.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

MEMORY_SIZE = 2  # numbers that a rule may keep for a row


class RowSignals(NamedTuple):
  """What a rule may look at, one entry per slot."""

  tokens_SxT: jax.Array  # of the row, the newest included
  length_S: jax.Array
  cap_S: jax.Array
  entropy_S: jax.Array  # nats, of what the newest token was drawn from, temperature not yet applied
  margin_S: jax.Array  # of its two largest probabilities, p₁ − p₂
  uniform_S: jax.Array  # in [0, 1), one for each token of each row
  memory_SxM: jax.Array  # float32, zeros at first


class ExitDecision(NamedTuple):
  """What a rule answers."""

  exit_S: jax.Array
  abort_S: jax.Array
  weight_S: jax.Array  # what the row's weight is multiplied by
  memory_SxM: jax.Array


def none(row: RowSignals) -> ExitDecision:
  """Rows end by themselves or at their cap. Source: none."""
  return _verdict(row)


def repetition(row: RowSignals, *, period: int = 8, times: int = 4) -> ExitDecision:
  """Exit where the last tokens are one passage of at most `period` tokens, `times` times over.

  Passage of p tokens: y[t−i] = y[t−i−p] for all i < (times − 1)·p. Source: none.
  """
  T = row.tokens_SxT.shape[1]
  reach = (times - 1) * period
  back = row.length_S[:, None] - 1 - jnp.arange(reach + period)[None]
  newest_SxR = jnp.take_along_axis(row.tokens_SxT, jnp.clip(back, 0, T - 1), axis=1)
  again = jnp.zeros_like(row.length_S, bool)
  for p in range(1, period + 1):
    n = (times - 1) * p
    same = (newest_SxR[:, :n] == newest_SxR[:, p : p + n]).all(1)
    again |= same & (row.length_S >= times * p)
  return _verdict(row, exit_S=again)


def entropy(row: RowSignals, *, high: float, decay: float = 0.9, least_tokens: int = 8) -> ExitDecision:
  """Exit where the running mean of the entropy (nats) exceeds `high`: the row has come apart.

  h ← decay·h + (1 − decay)·H, divided by 1 − decayᵗ; from `least_tokens` on. Source: none.
  """
  mean_S = decay * row.memory_SxM[:, 0] + (1 - decay) * row.entropy_S
  count_S = row.memory_SxM[:, 1] + 1
  over_S = mean_S / (1 - decay**count_S) > high
  memory = jnp.stack([mean_S, count_S], 1)
  return _verdict(row, exit_S=over_S & (count_S >= least_tokens), memory_SxM=memory)


def text(row: RowSignals, *, text: str, table: jax.Array | None = None) -> ExitDecision:
  """Exit with the token in which `text` is complete: the end of a turn that calls a tool, say '</calc>'.

  `table` comes from `marker.table(…, text)`, made where the tokenizer is known. A row's first token is looked at with
  its second. Source: none.
  """
  states = table.shape[0]
  newest_S = jnp.take_along_axis(row.tokens_SxT, row.length_S[:, None] - 1, axis=1)[:, 0]
  begun_S = jnp.where(row.length_S == 2, table[0, row.tokens_SxT[:, 0]], row.memory_SxM[:, 0])
  state_S = table[begun_S.astype(jnp.int32), newest_S].astype(jnp.float32)
  memory = jnp.stack([state_S, jnp.zeros_like(state_S)], 1)
  return _verdict(row, exit_S=state_S == states - 1, memory_SxM=memory)


def marker(
  row: RowSignals,
  *,
  text: str,
  table: jax.Array | None = None,
  start: float = 0.3,
  deadline: float = 0.8,
  abort: float = 0.95,
  margin: float = 0.9,
  streak: int = 5,
  ignore: float = 0.05,
) -> ExitDecision:
  """Exit soon after a sure answer, abort where none has come: the stop machine of DUET.

  From start·cap tokens on: once the marker is complete, `streak` tokens in a row with p₁ − p₂ > `margin` end the row;
  with probability `ignore` it goes on, and the next sure token ends it by the same odds, so that every length stays
  possible. At deadline·cap tokens a row without marker is aborted with probability `abort`, else it goes on to its own
  end with weight 1 / (1 − abort). `table` comes from `marker.table(…, text)`, made where the tokenizer is known. The
  official 30 % and 80 % are quantiles of recent lengths, shares of the cap here, and its margin is one for each prompt;
  it looks for the marker every eighth token, 150 tokens beyond the 80 %. Source: arXiv:2605.08441 (DUET).
  """
  states = table.shape[0]
  newest_S = jnp.take_along_axis(row.tokens_SxT, row.length_S[:, None] - 1, axis=1)[:, 0]
  # Token 0 comes from the prompt and is not looked at by itself.
  begun_S = jnp.where(row.length_S == 2, table[0, row.tokens_SxT[:, 0]], row.memory_SxM[:, 0])
  state_S = table[begun_S.astype(jnp.int32), newest_S].astype(jnp.int32)
  seen_S = state_S == states - 1
  sure_S = seen_S & (row.margin_S > margin)
  sure_S &= row.length_S >= jnp.ceil(start * row.cap_S)
  due_S = ~seen_S & (row.length_S == jnp.ceil(deadline * row.cap_S))
  lost_S = due_S & (row.uniform_S >= 1 - abort)
  before_S = row.memory_SxM[:, 1]
  spared_S = (before_S < 0) | (due_S & ~lost_S)
  run_S = jnp.where(sure_S & ~spared_S, before_S + 1, 0)
  sure_S = run_S >= streak
  goes_on_S = sure_S & (row.uniform_S < ignore)
  run_S = jnp.where(goes_on_S, streak - 1, run_S)
  run_S = jnp.where(spared_S, -1, run_S).astype(jnp.float32)  # a negative streak: no exit any more
  return ExitDecision(
    exit_S=sure_S & ~goes_on_S,
    abort_S=lost_S,
    weight_S=jnp.where(due_S & ~lost_S, 1 / max(1 - abort, 1e-3), 1.0),
    memory_SxM=jnp.stack([state_S.astype(jnp.float32), run_S], 1),
  )


def _verdict(row: RowSignals, **changes: jax.Array) -> ExitDecision:
  never = jnp.zeros_like(row.length_S, bool)
  ones = jnp.ones_like(row.length_S, jnp.float32)
  return ExitDecision(never, never, ones, row.memory_SxM)._replace(**changes)

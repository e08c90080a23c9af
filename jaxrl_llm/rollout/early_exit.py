"""Exit rules: they end a row before its end token or its cap, by the row's newest token.

The functions are named in `config.rollout.early_exit.fn`. A row that exits is graded like one that the cap truncated;
an aborted row is not learned from. A rule reads only the row itself, so slots and order change nothing. It runs first
at a row's second token. A rule's memory is part of the row (`Rollout.memory_BxM`). A continued row goes on with it,
after pruning or in a later step.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

MEMORY_SIZE = 2  # numbers that a rule may store per row


class RowSignals(NamedTuple):
  """Values that an exit rule reads, one entry per slot."""

  tokens_SxT: jax.Array  # of the row, the newest included
  length_S: jax.Array
  cap_S: jax.Array
  entropy_S: jax.Array  # nats, of the newest token's distribution at temperature 1
  margin_S: jax.Array  # p₁ − p₂ of the same distribution's two largest probabilities
  uniform_S: jax.Array  # in [0, 1), one per token of each row
  memory_SxM: jax.Array  # float32, zeros at first


class ExitDecision(NamedTuple):
  """The result of an exit rule, one entry per slot."""

  exit_S: jax.Array
  abort_S: jax.Array
  weight_S: jax.Array  # factor on the row's weight
  memory_SxM: jax.Array


def none() -> None:
  """No early exit: rows end by an end token or at their cap."""


def repetition(row: RowSignals, *, period: int = 8, times: int = 4) -> ExitDecision:
  """Exit where the last tokens are one passage of at most `period` tokens, repeated `times` times.

  Passage of p tokens: y[t−i] = y[t−i−p] for all i < (times − 1)·p.
  """
  T = row.tokens_SxT.shape[1]
  reach = (times - 1) * period
  back = row.length_S[:, None] - 1 - jnp.arange(reach + period)[None]
  newest_SxR = jnp.take_along_axis(row.tokens_SxT, jnp.clip(back, 0, T - 1), axis=1)
  repeats_S = jnp.zeros_like(row.length_S, bool)
  for p in range(1, period + 1):
    n = (times - 1) * p
    same_S = (newest_SxR[:, :n] == newest_SxR[:, p : p + n]).all(1)
    repeats_S |= same_S & (row.length_S >= times * p)
  return _decision(row, exit_S=repeats_S)


def entropy(
  row: RowSignals, *, high: float, decay: float = 0.9, least_tokens: int = 8
) -> ExitDecision:
  """Exit where the running mean of the entropy (nats) exceeds `high`, a sign of degenerate text.

  h ← decay·h + (1 − decay)·H, divided by 1 − decayᵗ; from `least_tokens` on.
  """
  mean_S = decay * row.memory_SxM[:, 0] + (1 - decay) * row.entropy_S
  count_S = row.memory_SxM[:, 1] + 1
  over_S = mean_S / (1 - decay**count_S) > high
  memory = jnp.stack([mean_S, count_S], 1)
  return _decision(row, exit_S=over_S & (count_S >= least_tokens), memory_SxM=memory)


def text(row: RowSignals, *, text: str, table: jax.Array | None = None) -> ExitDecision:
  """Exit with the token that completes `text`, for example '</calc>' at the end of a tool call.

  `table` is `text_automaton.build_table(…, text)`, built where the tokenizer is known. A row's first token is read
  together with its second.
  """
  table = _required(table)
  states, state_S = table.shape[0], _next_state(row, table).astype(jnp.float32)
  memory = jnp.stack([state_S, jnp.zeros_like(state_S)], 1)
  return _decision(row, exit_S=state_S == states - 1, memory_SxM=memory)


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
  """Exit soon after a confident answer, abort where none has come: the stop machine of DUET.

  From start·cap tokens on, once the marker `text` is complete, `streak` consecutive tokens with p₁ − p₂ > `margin` end
  the row. With probability `ignore` it goes on, and the next confident token ends it by the same odds, so every length
  stays possible. At deadline·cap tokens a row without marker is aborted with probability `abort`; otherwise it runs to
  its end with weight 1 / (1 − abort). `table` is `text_automaton.build_table(…, text)`, built where the tokenizer is
  known.

  Differences from the official code: its 30 % and 80 % are quantiles of recent lengths, here shares of the cap. Its
  margin is one per prompt. It searches for the marker every eighth token, 150 tokens beyond the 80 %.
  arXiv:2605.08441 (DUET).
  """
  table = _required(table)
  states = table.shape[0]
  state_S = _next_state(row, table).astype(jnp.int32)
  complete_S = state_S == states - 1
  sure_S = complete_S & (row.margin_S > margin)
  sure_S &= row.length_S >= jnp.ceil(start * row.cap_S)
  due_S = ~complete_S & (row.length_S == jnp.ceil(deadline * row.cap_S))
  lost_S = due_S & (row.uniform_S >= 1 - abort)
  before_S = row.memory_SxM[:, 1]
  spared_S = (before_S < 0) | (due_S & ~lost_S)
  run_S = jnp.where(sure_S & ~spared_S, before_S + 1, 0)
  sure_S = run_S >= streak
  goes_on_S = sure_S & (row.uniform_S < ignore)
  run_S = jnp.where(goes_on_S, streak - 1, run_S)
  run_S = jnp.where(spared_S, -1, run_S).astype(jnp.float32)  # a negative streak disables the exit
  return ExitDecision(
    exit_S=sure_S & ~goes_on_S,
    abort_S=lost_S,
    weight_S=jnp.where(due_S & ~lost_S, 1 / max(1 - abort, 1e-3), 1.0),
    memory_SxM=jnp.stack([state_S.astype(jnp.float32), run_S], 1),
  )


def _next_state(row: RowSignals, table: jax.Array) -> jax.Array:
  """The automaton's state after the newest token, int16 [S]; memory 0 holds the state before it."""
  newest_S = jnp.take_along_axis(row.tokens_SxT, row.length_S[:, None] - 1, axis=1)[:, 0]
  # The rule does not run at token 0, which is sampled from the prompt, so the second token reads both.
  before_S = jnp.where(row.length_S == 2, table[0, row.tokens_SxT[:, 0]], row.memory_SxM[:, 0])
  return table[before_S.astype(jnp.int32), newest_S]


def _required(table: jax.Array | None) -> jax.Array:
  if table is None:
    raise ValueError('table=None: the rule needs text_automaton.build_table(…, text).')
  return table


def _decision(row: RowSignals, **changes: jax.Array) -> ExitDecision:
  never = jnp.zeros_like(row.length_S, bool)
  ones = jnp.ones_like(row.length_S, jnp.float32)
  return ExitDecision(never, never, ones, row.memory_SxM)._replace(**changes)

"""Multi-turn rollouts without rounds: rows decode while others wait for their environments.

Each call of the decoding program samples for the rows whose turn goes on. Rows whose turn has ended are given to the
workers of their environments; those whose observation has arrived come back with it appended to the next call. With
fewer slots than rows, a row that decodes takes the slot of one that waits, which is then encoded again. Noise is keyed
by row and position, so the order in which environments return changes no sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, SupportsFloat

import jax
import numpy as np

from jaxrl_llm import environments
from jaxrl_llm.learner import compile as programs
from jaxrl_llm.learner import turn_programs
from jaxrl_llm.rollout.turn_decode import CallCounts, CallLimits, TurnCache
from jaxrl_llm.runner.multi_turn import Counts, Episodes, Limits, row_keys
from jaxrl_llm.types import UNFINISHED, Array, Prompts, Rollout, Row, TrainState

if TYPE_CHECKING:
  from jaxrl_llm.runner.context import RunContext

_POLL_S = 0.5  # between two looks at the deadlines of workers, where no row decodes
_PUMP_S = 0.01  # the same while the device decodes


class Slots:
  """The rows whose keys and values are on the device."""

  def __init__(self, slots: int):
    self.row_S = np.arange(slots, dtype=np.int32)

  def give(self, decodes_B: np.ndarray, waits_B: np.ndarray, length_B: np.ndarray) -> int:
    """Gives slots to rows that decode, the first ones first, and returns how many waiting rows lost theirs.

    First those of rows that are over are taken, then those of waiting rows that have the fewest tokens to encode again.
    """
    cost_B = np.where(decodes_B, np.inf, np.where(waits_B, length_B, 0))
    cost_S = cost_B[self.row_S]
    rows = np.setdiff1d(np.flatnonzero(decodes_B), self.row_S)
    taken = np.argsort(cost_S, kind='stable')[: min(len(rows), np.isfinite(cost_S).sum())]
    self.row_S[taken] = rows[: len(taken)]
    return int((cost_S[taken] > 0).sum())


class Decoder:
  """The rows of one step on the device: their caches, and the counts of the calls."""

  def __init__(
    self, turn: turn_programs.TurnPrograms, state: TrainState, prompts: Prompts, cap: Array | int
  ):
    self._turn = turn
    self._arrays = turn.weights(state), state.seed, state.step, prompts
    self._cap = cap
    self._cache: TurnCache | None = None
    self.calls = 0

  def begin(self, rollout: Rollout) -> Rollout:
    """Encode the prompts and sample the first token of every row."""
    rollout, self._cache = self._turn.begin(*self._arrays, rollout, self._cap)
    return rollout

  def advance(
    self, rollout: Rollout, row_S: np.ndarray, limits: CallLimits
  ) -> tuple[Rollout, CallCounts]:
    """Start a call that decodes the rows `row_S`, and return its results before they are there."""
    self.calls += 1
    rollout, self._cache, counts = self._turn.advance(
      *self._arrays, rollout, self._cap, self._cache, row_S.copy(), limits
    )
    return rollout, counts


class Play:
  """Plays the episodes of one step."""

  def __init__(
    self,
    episodes: Episodes,
    prompts: Prompts,
    rows: Sequence[Row],
    rollout: Rollout,
    limits: Limits,
    slots: int = 0,
  ):
    self._episodes, self._prompts, self._rows, self._limits = episodes, prompts, rows, limits
    self._counts = episodes.begin_counts() | {'environment/spilled': 0.0}
    self._rollout = episodes.without_lost(prompts, rollout, self._counts)
    self._start_B = np.array(self._rollout.length_B)  # of the turn that a row samples
    self._waits_B = np.zeros(len(self._start_B), bool)
    self._slots = Slots(slots or len(self._start_B))
    self._key_B = row_keys(prompts, rollout)
    self._row_by_key = {key: b for b, key in enumerate(self._key_B)}

  def run(self, decoder: Decoder, limits: CallLimits) -> tuple[Rollout, Counts]:
    """All episodes to their ends: host arrays and metrics."""
    pool = self._episodes.environments
    before = int(self._rollout.length_B.sum())
    sampled = decoder.begin(self._rollout._replace(turns=None))
    self._take(sampled)
    self._count('generate/tokens', int(self._rollout.length_B.sum()) - before)
    self._count('environment/encoded_tokens', int(np.sum(self._prompts.length_P)))
    self._count('environment/encoded_positions', np.size(self._prompts.tokens_PxL))
    while pool.pending or self._decodes():
      if self._decodes():
        self._count('environment/spilled', self._give_slots())
        begun = self._rollout._replace(turns=None)
        sampled, counts = decoder.advance(begun, self._slots.row_S, limits)
        ready = counts.iterations.is_ready  # pyright: ignore[reportAttributeAccessIssue]
        while pool.running and not ready():
          pool.advance(_PUMP_S)  # a worker that has returned a turn begins the next one
        self._take(sampled)
        self._count('generate/rounds', counts.iterations)
        self._count('generate/tokens', counts.tokens)
        self._count('environment/encoded_tokens', counts.appended)
        self._count('environment/encoded_positions', counts.positions)
      for key, result in pool.collect(0.0 if self._decodes() else _POLL_S):
        self._apply(self._row_by_key[key], result)
    return self._rollout, self._episodes.end_counts(self._rollout, self._counts, decoder.calls)

  def _decodes(self) -> bool:
    return bool((self._rollout.reason_B == UNFINISHED).any())

  def _give_slots(self) -> int:
    decodes_B = np.asarray(self._rollout.reason_B) == UNFINISHED
    return self._slots.give(decodes_B, self._waits_B, np.asarray(self._rollout.length_B))

  def _count(self, name: str, value: SupportsFloat) -> None:
    self._counts[name] += float(value)

  def _take(self, sampled: Rollout) -> None:
    """Marks the turns that ended in a call, and gives them to their environments."""
    before, episodes = self._rollout, self._episodes
    self._rollout = jax.tree.map(np.array, sampled._replace(turns=before.turns))
    decoded_B = before.reason_B == UNFINISHED
    ended = np.flatnonzero(decoded_B & (self._rollout.reason_B != UNFINISHED))
    result_by_row, request_by_row = episodes.end_turns(
      self._prompts, self._rows, self._rollout, self._start_B, ended
    )
    self._waits_B[list(request_by_row)] = True
    over = [b for b in ended if b not in request_by_row and b not in result_by_row]
    episodes.environments.submit(list(request_by_row.values()), [self._key_B[b] for b in over])
    episodes.forget([self._key_B[b] for b in over])
    for b, result in result_by_row.items():
      self._apply(b, result)

  def _apply(self, b: int, result: environments.TurnResult) -> None:
    """Writes the result of an environment step into row b, which then goes on or is over."""
    self._episodes.apply(self._rollout, b, result, self._limits, self._counts)
    self._start_B[b], self._waits_B[b] = self._rollout.length_B[b], False
    if self._rollout.reason_B[b] != UNFINISHED:
      self._episodes.environments.submit(ended=[self._key_B[b]])
      self._episodes.forget([self._key_B[b]])


def compile_call(context: RunContext) -> Callable:
  """Return a function as `multi_turn.compile_call` does, for `config.environment.batching.fn=turns`."""
  spec, episodes = context.spec, context.episodes
  if not isinstance(episodes, Episodes) or episodes.batching is None:
    raise ValueError('the run has no environment whose turns are batched')
  update, turn = programs.compile_update(spec), turn_programs.compile_turns(spec)
  slots = spec.rollout.decode.slots or spec.layout.prompts * spec.rollout.decode.rollouts
  limits = CallLimits(episodes.batching.ready or max(1, slots // 4), episodes.batching.iterations)

  def call(state, batch, prompts, begun, draft, cap):
    state, metrics = update(state, batch)
    bounds = Limits(int(cap), episodes.turns)
    play = Play(episodes, prompts, context.tables.train.rows_of(prompts), begun, bounds, slots)
    rollout, counts = play.run(Decoder(turn, state, prompts, cap), limits)
    return state, rollout, metrics | counts

  return call

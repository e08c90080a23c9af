"""Continuous batching: rows wait for slots, and are admitted between decode windows.

The engine runs in one thread. Others call `submit`, `Row.cancelled` and `stop`, which never block.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import queue
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxrl_llm.models import linear
from jaxrl_llm.serving import programs
from jaxrl_llm.serving.programs import Encoded, EngineSettings, RowSettings, Sampled
from jaxrl_llm.types import Array, ModelConfig, Params

# Why a row ended. ABORTED: the engine stopped, or the row was cancelled.
STOP, LENGTH, ABORTED = 'stop', 'length', 'abort'

Alternatives = list[tuple[int, float]]  # token ids and log-probs, the likeliest first


class Sampling(NamedTuple):
  """How completions of a request are sampled."""

  max_tokens: int
  temperature: float = 1.0  # 0: greedy
  top_p: float = 1.0
  seed: int = 0  # 0 to 2³² − 1


class Token(NamedTuple):
  """One token with its log-probs."""

  id: int
  behavior_logp: float = math.nan  # of the distribution that was sampled from
  logp: float = math.nan  # of the model at temperature 1; only where the row is scored
  top: Sequence[tuple[int, float]] = ()  # likeliest tokens; only where the row is scored


class Delivery(NamedTuple):
  """New tokens of a row, in order."""

  tokens: Sequence[Token]
  end: str = ''  # STOP, LENGTH or ABORTED with the last delivery of a row
  prompt: Sequence[Token] | None = (
    None  # scores of the prompt, in the first delivery; None: not wanted
  )


class Prompt:
  """A prompt that the completions of a request share: it is encoded once."""

  def __init__(self, ids: Sequence[int], number: int = 0, scored: bool = False):
    """`number` of the prompt in its request. `scored`: its own tokens are scored, too."""
    self.ids, self.number, self.scored = tuple(ids), number, scored
    self.rows = 0  # that are still to be admitted
    self.encoded: Encoded | None = None
    self.scores: list[Token] | None = None


@dataclasses.dataclass(eq=False)
class Row:
  """One completion. `deliver` is called in the engine's thread and must not block."""

  prompt: Prompt
  sampling: Sampling
  member: int  # number of the completion of its prompt
  scored: bool  # log-probs of the model and alternatives are wanted
  deliver: Callable[[Delivery], None]
  cancelled: bool = False  # set by any thread: nothing more is delivered, and the slot becomes free
  sampled: int = 0  # tokens so far


class Engine:
  """Slots of a model. Construction compiles all programs."""

  def __init__(self, model: ModelConfig, params: Params, settings: EngineSettings):
    """`params`: float32; they are copied to one device in the type of compute."""
    self.settings, self._model = settings, model
    device = jax.devices()[0]
    self.replace_params(params)
    started = time.monotonic()
    self._programs = programs.compile_all(model, settings, self._params)
    self.compile_s = time.monotonic() - started
    # A fresh executable's outputs are committed to its device; so are the first slots.
    self._slots = jax.device_put(programs.empty_slots(model, settings), device)
    self._rows: list[Row | None] = [None] * settings.slots
    self._waiting: collections.deque[Row] = collections.deque()
    self.sampled = 0  # tokens of all rows so far
    # A SimpleQueue may be written to by signal handlers.
    self._inbox: queue.SimpleQueue[Sequence[Row] | None] = queue.SimpleQueue()

  def replace_params(self, params: Params) -> None:
    """Sample with other weights of the same shapes, without compiling; not while `run` runs."""
    dtype = self.settings.dtype
    self._params = jax.device_put(linear.quantize_params(params, dtype, dtype), jax.devices()[0])

  @property
  def program_count(self) -> int:
    """Compiled programs."""
    return 1 + 3 * len(self.settings.buckets)

  @property
  def cache_bytes(self) -> int:
    """Bytes of the keys and values of all slots."""
    return sum(x.nbytes for x in jax.tree.leaves(self._slots.cache))

  @property
  def busy(self) -> int:
    """Slots in use."""
    return sum(row is not None for row in self._rows)

  @property
  def waiting(self) -> int:
    """Rows without a slot."""
    return len(self._waiting)

  def submit(self, rows: Sequence[Row]) -> None:
    """Queue rows, first in, first out. Each prompt must fit `settings.context` with its max_tokens."""
    for row in rows:
      assert 0 < len(row.prompt.ids) <= self.settings.context - row.sampling.max_tokens
    self._inbox.put(rows)

  def stop(self) -> None:
    """Make `run` return; a signal handler may call it."""
    self._inbox.put(None)

  def run(self) -> None:
    """Decode until `stop`; rows that are left then end as ABORTED."""
    try:
      while self._receive():
        self._release()
        self._admit()
        if self.busy:
          self._decode()
    finally:
      left = [row for row in (*self._rows, *self._waiting) if row is not None]
      self._rows = [None] * self.settings.slots
      self._waiting.clear()
      for row in left:
        if not row.cancelled:
          row.deliver(Delivery((), ABORTED))

  def _receive(self) -> bool:
    """Take new rows, waiting for one where there is nothing else to do. False: `stop` was called."""
    block = not self.busy and not self._waiting
    while True:
      try:
        rows = self._inbox.get(block=block)
      except queue.Empty:
        return True
      if rows is None:
        return False
      for row in rows:
        row.prompt.rows += 1
        self._waiting.append(row)
      block = False

  def _release(self) -> None:
    """Drop cancelled rows from the slots and the queue."""
    self._rows = [None if row is not None and row.cancelled else row for row in self._rows]
    if any(row.cancelled for row in self._waiting):
      self._waiting = collections.deque(row for row in self._waiting if not row.cancelled)

  def _admit(self) -> None:
    """Give free slots to waiting rows, whose first tokens are sampled and delivered."""
    admitted: list[tuple[int, Row, Sampled]] = []
    free = [slot for slot, row in enumerate(self._rows) if row is None]
    while self._waiting and free:
      row = self._waiting.popleft()
      encoded = self._encode(row)
      if row.sampling.max_tokens < 1:
        row.deliver(Delivery((), LENGTH, row.prompt.scores))
        continue
      slot = free.pop(0)
      admit = self._programs.admit[encoded.hidden_1xLxD.shape[1]]
      where = np.int32(len(row.prompt.ids)), np.int32(slot)
      self._slots, first = admit(
        self._slots, encoded.cache, encoded.logits_1xV, *where, _row_settings(row)
      )
      self._rows[slot] = row
      admitted.append((slot, row, first))
    for slot, row, first in admitted:
      sampled = jax.tree.map(lambda x: np.asarray(x)[None], first)
      self._deliver(slot, row, sampled, row.prompt.scores)

  def _encode(self, row: Row) -> Encoded:
    """The encoded prompt of a row; its tokens are scored where that is wanted."""
    prompt = row.prompt
    bucket = next(b for b in self.settings.buckets if b >= len(prompt.ids))
    if prompt.encoded is None:
      tokens_1xL = np.zeros((1, bucket), np.int32)
      tokens_1xL[0, : len(prompt.ids)] = prompt.ids
      prompt.encoded = self._programs.encode[bucket](
        self._params, tokens_1xL, np.int32(len(prompt.ids))
      )
      if prompt.scored and prompt.scores is None:
        prompt.scores = self._score(prompt, prompt.encoded, tokens_1xL)
    encoded = prompt.encoded
    prompt.rows -= 1
    if not prompt.rows:  # the last of its completions: the keys and values need no memory any more
      prompt.encoded = None
    return encoded

  def _score(self, prompt: Prompt, encoded: Encoded, tokens_1xL: np.ndarray) -> list[Token]:
    """The prompt's tokens with their log-probs; the first has none."""
    score = self._programs.score[tokens_1xL.shape[1]]
    scores = score(self._params, encoded.hidden_1xLxD, tokens_1xL)
    logp_L, id_LxN, top_LxN = jax.tree.map(np.asarray, tuple(scores))
    rest = [
      Token(token, math.nan, float(logp_L[j]), _alternatives(id_LxN[j], top_LxN[j]))
      for j, token in enumerate(prompt.ids[1:])
    ]
    return [Token(prompt.ids[0]), *rest]

  def _decode(self) -> None:
    """Run one window, and deliver its tokens."""
    keep_S = np.array([row is not None for row in self._rows])
    self._slots, window = self._programs.decode(self._params, self._slots, keep_S)
    window = jax.tree.map(np.asarray, window)
    for slot, row in enumerate(self._rows):
      if row is not None:
        count = int((window.token[:, slot] >= 0).sum())
        self._deliver(slot, row, jax.tree.map(lambda x: x[:count, slot], window))  # noqa: B023

  def _deliver(
    self, slot: int, row: Row, sampled: Sampled, scores: Sequence[Token] | None = None
  ) -> None:
    """Deliver tokens of a row, and free its slot where it ended."""
    tokens = [_token(sampled, j, row.scored) for j in range(len(sampled.token))]
    row.sampled += len(tokens)
    self.sampled += len(tokens)
    end = ''
    if tokens and tokens[-1].id in self.settings.end_ids:
      end = STOP
    elif row.sampled >= row.sampling.max_tokens:
      end = LENGTH
    if end:
      self._rows[slot] = None
    if not row.cancelled:
      row.deliver(Delivery(tokens, end, scores))


def _row_settings(row: Row) -> RowSettings:
  sampling = row.sampling
  return RowSettings(
    np.uint32(sampling.seed),
    np.int32(row.prompt.number),
    np.int32(row.member),
    np.int32(sampling.max_tokens),
    np.float32(sampling.temperature),
    np.float32(sampling.top_p),
    np.bool_(row.scored),
  )


def _token(sampled: Sampled, j: int, scored: bool) -> Token:
  token, behavior = int(sampled.token[j]), float(sampled.behavior_logp[j])
  if not scored:
    return Token(token, behavior)
  top = _alternatives(sampled.top_id[j], sampled.top_logp[j])
  return Token(token, behavior, float(sampled.logp[j]), top)


def _alternatives(id_N: Array, logp_N: Array) -> Alternatives:
  """Pairs of token and log-prob; a small vocabulary has fewer."""
  return [(int(i), float(x)) for i, x in zip(id_N, logp_N, strict=True) if x > -math.inf]

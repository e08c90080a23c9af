"""Records of the decode loops: settings, inputs, constants and state of a loop, caches carried between calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax

from jaxrl_llm.models import decoder
from jaxrl_llm.rollout import early_exit
from jaxrl_llm.rollout.queue_order import Progress, fifo
from jaxrl_llm.rollout.sampling import NO_FILTER, TokenFilter
from jaxrl_llm.types import Array, ModelConfig, Params, Prompts, Rollout


class Loops(NamedTuple):
  """The chain of decode loops; each of them compiles all layers again."""

  windows: int = 1  # widths of the ring: T / 2ⁿ⁻¹, …, T / 2, T
  halvings: int = 0  # loops that follow with half of the slots each, where completions may be long
  test_every: int = 1  # iterations between two tests of a loop's end


class TokenRecords(NamedTuple):
  """Records of each token besides its log-probability."""

  experts: bool = False  # those it was routed to, for the update to route it alike
  top_tokens: int = 0  # K likeliest tokens of the distribution it was drawn from; 0: none


class DecodeSettings(NamedTuple):
  """Settings that are fixed when decoding is compiled."""

  rollouts: int  # G, completions per prompt
  max_tokens: int  # T
  temperature: float  # 0: greedy
  end_ids: tuple[int, ...]  # any of these ends a row; the end token belongs to the row
  dtype: str  # of compute
  token_filter: TokenFilter = NO_FILTER  # for evaluation; training samples from the whole policy
  slots: int = 0  # S, rows decoded at once; 0: all rows
  queue_order: Callable[[Progress], jax.Array] = fifo
  stop_rule: Callable[[Progress], jax.Array] | None = None  # None: the loop ends with its rows
  # None: rows end by an end token or at their cap
  exit_rule: Callable[[early_exit.RowSignals], early_exit.ExitDecision] | None = None
  cache_dtype: str = 'float32'
  # a kernel in place of XLA's attention over the ring, such as `decode_attention.attend`
  attend: Callable[..., jax.Array] | None = None
  loops: Loops = Loops()
  records: TokenRecords = TokenRecords()
  lockstep: tuple[str, ...] = ()  # mesh axes whose shards iterate until the last of them ends


class CarriedKV(NamedTuple):
  """Keys and values of unfinished rows, for a later call.

  (index, born) identifies a group: the same prompt may be proposed again. The cache of B × T columns stays allocated
  for the whole run, the update included, beside the ring of S × T columns. It is held twice in lag mode, and once
  more while a loop with S < B slots runs.
  """

  index_P: Array  # as in Prompts; −1 before the first call
  born_P: Array
  cached_B: jax.Array  # int32, tokens of a row whose keys and values are stored
  # Token j of a row lies in column j, of a sliding layer with window W in column j modulo W. Zeros from cached_B on.
  cache: decoder.Cache


class DecodeInputs(NamedTuple):
  """Arrays that a decode loop reads, and how far its rows go.

  `params` are cast and laid out for decoding by the caller: no collective over weights runs inside the loop.
  """

  params: Params
  prompts: Prompts
  key: jax.Array  # from the run's seed
  version: Array | int  # optimizer steps taken by `params`
  # Rows to continue (reason UNFINISHED) or to return unchanged (any other reason). None: all rows start at the prompt.
  continued: Rollout | None = None
  # Most tokens of a row, a traced number or one per row [B]. None: T.
  cap: Array | int | None = None
  pause: Array | int | None = None  # rows that hold so many tokens leave the loop UNFINISHED
  member_B: jax.Array | None = None  # which rollout of its prompt a row is; None: b % G
  greedy_B: jax.Array | None = None  # rows that take the likeliest tokens; None: no row
  # In the order of `prompts`. None: continued rows are encoded again.
  carried: CarriedKV | None = None
  prefix_tokens: int = 0  # with which all prompts begin alike, and go on; they are encoded once
  # Tokens of a rollout [P], from the hidden state [P, D] of its prompt's last token, which the rows then record; None:
  # the prompts state what is expected.
  predict_tokens: Callable[[jax.Array], jax.Array] | None = None


class LoopConstants(NamedTuple):
  """Values that a decode loop reads and does not change."""

  model: ModelConfig
  settings: DecodeSettings
  params: Params
  prompts: Prompts
  prompt_cache: decoder.Cache
  keys_B: jax.Array
  cap_B: jax.Array
  pause_B: jax.Array
  version: jax.Array
  started_tokens: jax.Array  # tokens of all rows before the loop
  carried: CarriedKV | None = None
  greedy_B: jax.Array | None = None
  # The prompts' cache and mask [S, L] of slots that no other row takes; None: by the slots' rows.
  slot_prompts: tuple[decoder.Cache, jax.Array] | None = None
  # The hidden state of each prompt's last token, for a draft head; None: the loop is not one of completions.
  prompt_hidden_PxD: jax.Array | None = None


class LoopState(NamedTuple):
  """Values that one decode iteration passes to the next."""

  iterations: jax.Array  # completed
  row_S: jax.Array  # the row that a slot decodes; B: the slot is idle
  index_S: jax.Array  # number of the row's token that enters the model next
  column: jax.Array  # of the ring, written next by all slots; counts on past the ring's width
  waiting_B: jax.Array  # rows without a slot so far
  rollout: Rollout
  cache: decoder.Cache

"""Multi-turn rollouts: one call of the sampling program for each turn, with environment steps on the host in between.

A row is one growing completion. The program samples until the turn ends; the environment gets the text of the turn, and
its observation is appended to the row as token ids, which are masked out of the loss; the row then continues as an
unfinished one. Sampled token ids are never decoded and encoded again. Each row has a live environment of its own, from
its first token until it is over.
"""

from __future__ import annotations

import collections
import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np

from jaxrl_llm import data, environments, rewards
from jaxrl_llm.config import stages
from jaxrl_llm.config.schema import Config
from jaxrl_llm.distributed import sharding
from jaxrl_llm.learner import compile as programs
from jaxrl_llm.models.tokenizer import Tokenizer
from jaxrl_llm.types import (
  EXITED,
  STOPPED,
  TRUNCATED,
  UNFINISHED,
  Array,
  JsonObject,
  Prompts,
  Rollout,
  Row,
  Turns,
)

if TYPE_CHECKING:
  from jaxrl_llm.runner.context import RunContext

_OPENING = '{question}\n\n{observation}'
_COUNTED = ('calls', 'observation_tokens', 'no_room', 'turns_over')
_NO_ROOM = 'what the environment shows first does not fit config.prompt_tokens'
_UNEVEN = 'step() returned a tuple of rewards with another length than the turns so far'
_UNLIKE = 'reset() returned another first observation than for another rollout of the group'
Sample = Callable[[Rollout], tuple[Rollout, JsonObject]]
Counts = dict[str, float]


class Limits(NamedTuple):
  """Bounds of one call of `Episodes.play`."""

  row_tokens: int  # of a row, observations included
  turns: int  # of an episode
  calls: int = 0  # of the sampling program; 0: until every episode is over


class EpisodeRewards:
  """Seeds, texts and rewards of episodes, whatever plays them."""

  def __init__(self, config: Config, tokenizer: Tokenizer):
    self.tokenizer, self.judge, self.seed = tokenizer, config.environment.judge, config.seed
    self.message = ''  # of the first failure in the newest rollout
    self.graded_turn = -1

  def prompts_of(self, prompts: Prompts) -> Prompts:
    """The prompts of the newest rollout, where playing the episodes changed them."""
    return prompts

  def seeded(self, prompts: Prompts, rows: Sequence[Row]) -> Iterator[tuple[Row, int]]:
    """(row, seed) of each prompt, by (config.seed, step of its birth, prompt): a group starts from the same state."""
    for row, born, index in zip(rows, prompts.born_P, prompts.index_P, strict=True):
      seed = np.random.SeedSequence((self.seed, 7, int(born), int(index))).generate_state(1)[0]
      yield row, int(seed) >> 1

  def turn_texts(
    self, tokens_T: np.ndarray, number_T: np.ndarray, calls: bool = False
  ) -> list[str]:
    """The text of each sampled turn of a row, end tokens left out; with `calls`, as calls of tools are read."""
    texts = []
    # A call may begin with a special token.
    keep = dict(skip_special=False) if calls and self.tokenizer.tools else {}
    for turn in range(number_T.max() + 1):
      token_ids = tokens_T[number_T == turn].tolist()
      ends = token_ids and token_ids[-1] in self.tokenizer.end_ids
      texts.append(self.tokenizer.decode(token_ids[:-1] if ends else token_ids, **keep))
    return texts

  def graded_text(self, tokens_T: np.ndarray, number_T: np.ndarray) -> str:
    """The turn of a row that reward functions read: the last one, or the environment's `graded_turn`."""
    texts = self.turn_texts(tokens_T, number_T)
    return texts[min(self.graded_turn, len(texts) - 1)] if texts else ''

  def score(self, turns: Turns, grade: Callable[[], rewards.Scores], parts: int) -> rewards.Scores:
    """Score rows by the environment's rewards alone, or by `grade` with those as the last of `parts` rewards.

    The environment's reward of a row is the sum over its turns. A failure of the environment is the row's outcome.
    """
    reward_N, outcome_N = turns.reward_BxT.sum(1), np.asarray(turns.outcome_B)
    failed_N = outcome_N != rewards.OK
    if self.judge == 'environment':
      parts_NxK, message = np.zeros((len(reward_N), parts), np.float32), ''
      parts_NxK[:, 0] = reward_N
    else:
      scores = grade()
      parts_NxK, message = np.array(scores.parts_BxK), scores.message
      parts_NxK = np.concatenate([parts_NxK, reward_N[:, None]], axis=1).astype(np.float32)
      outcome_N = np.where(failed_N, outcome_N, scores.outcome_B)
    parts_NxK[failed_N] = 0.0
    codes = dict(timeouts=rewards.TIMEOUT, crashes=rewards.CRASH, errors=rewards.ERROR)
    counts = {f'grade/{name}': int((outcome_N == code).sum()) for name, code in codes.items()}
    return rewards.Scores(parts_NxK, outcome_N.astype(np.int8), counts, self.message or message)


class Episodes(EpisodeRewards):
  """Episodes of `config.environment`: opens, plays and scores them."""

  def __init__(self, config: Config, tokenizer: Tokenizer, horizon: Callable[..., int] | None):
    """`horizon`: (step, largest number of turns) → turns in that step; None: the largest.

    Raises UserError for bad settings.
    """
    settings = config.environment
    self.environments = environments.WorkerPool(
      environments.with_call_format(settings, tokenizer, config.data.chat)
    )
    self.turn_template = environments.build_turn_template(
      tokenizer, config.data.chat, settings.role, settings.observation_tokens
    )
    super().__init__(config, tokenizer)
    if self.environments.factory is not None:
      self.graded_turn = self.environments.factory.graded_turn
    # None: lockstep
    self.batching = stages.pick(environments.batching, settings.batching, 'environment.batching')()
    self.data_config, self.max_turns, self.horizon = config.data, settings.turns, horizon
    self.calls = (
      settings.rounds
    )  # of the sampling program in a step; 0: until every episode is over
    self.turns = settings.turns  # of an episode in the current step
    self._max_age = config.rollout.max_age
    # Episodes that could not begin. They fail when their first turn ends: rows without a token are not counted.
    self._failed: dict[environments.EpisodeKey, environments.TurnResult] = {}

  def close(self) -> None:
    """End all episodes and the worker processes."""
    self.environments.close()

  def begin_step(self, step: int) -> None:
    """Set the number of turns that an episode may take in this step. arXiv:2506.07976 (TTI)."""
    self.turns = self.max_turns
    if self.horizon is not None:
      self.turns = max(1, self.horizon(step, self.max_turns))
    # Groups of earlier steps than these are no longer continued.
    self._end([key for key in self.environments.live if key[1] < step - self._max_age])

  def open(self, prompts: Prompts, rows: Sequence[Row], width: int, rollouts: int) -> Prompts:
    """Begin the episodes of each prompt, and append the first observation to it, for `width` tokens at most."""
    requests = [
      environments.TurnRequest(key, row, seed, [])
      for keys, (row, seed) in zip(
        keys_of(prompts, rollouts), self.seeded(prompts, rows), strict=True
      )
      for key in keys
    ]
    opened = list(zip(requests, self.environments.run(requests), strict=True))
    tokens, changed = [], False
    for p, row in enumerate(rows):
      token_ids = np.asarray(prompts.tokens_PxL[p][: prompts.length_P[p]])
      observation = self._first_observation(opened[p * rollouts : (p + 1) * rollouts])
      if observation is not None:
        shown = data.with_question(row, _OPENING, dict(observation=observation))
        shown_ids = data.encode(shown, self.data_config, self.tokenizer)
        if len(shown_ids) <= width:
          token_ids, changed = shown_ids, True
        else:
          self._fail(keys_of(prompts, rollouts)[p], _NO_ROOM)
      tokens.append(token_ids)
    if not changed:
      return prompts
    tokens_PxL, length_P = data.pad_rows(tokens, width)
    return prompts._replace(tokens_PxL=tokens_PxL, length_P=length_P)

  def _first_observation(
    self, opened: Sequence[tuple[environments.TurnRequest, environments.TurnResult]]
  ) -> str | None:
    """The first observation of a group, which is that of the first episode that began."""
    began = []
    for request, result in opened:
      if result.outcome == rewards.OK:
        began.append((request.key, result.first_observation))
      else:
        self._failed[request.key] = result
    if not began:
      return None
    observation = began[0][1]
    self._fail([key for key, other in began if other != observation], _UNLIKE)
    return observation

  def _fail(self, keys: Iterable[environments.EpisodeKey], message: str) -> None:
    self._failed |= {key: environments.TurnResult(rewards.ERROR, message) for key in keys}

  def _end(self, keys: Sequence[environments.EpisodeKey]) -> None:
    """Close the environments of episodes that are over."""
    self.environments.end(keys)
    self.forget(keys)

  def forget(self, keys: Iterable[environments.EpisodeKey]) -> None:
    """Drop the failures of episodes that are over."""
    for key in keys:
      self._failed.pop(key, None)

  def play(
    self, sample: Sample, prompts: Prompts, rows: Sequence[Row], rollout: Rollout, limits: Limits
  ) -> tuple[Rollout, Counts]:
    """Call `sample` (rows to continue → all rows, metrics) until no row is unfinished.

    `rows` [P] are the data rows of the prompts. Returns host arrays and metrics.
    """
    counts = self.begin_counts()
    max_calls = limits.calls or np.inf
    rollout = self.without_lost(prompts, rollout, counts)
    calls = 0
    # At least one call, for its metrics.
    while not calls or ((rollout.reason_B == UNFINISHED).any() and calls < max_calls):
      sampled, metrics = sample(rollout._replace(turns=None))
      for name, value in metrics.items():
        counts[name] += float(value)
      calls += 1
      rollout = self._step_environments(prompts, rows, rollout, sampled, limits, counts)
    return rollout, self.end_counts(rollout, counts, calls)

  def begin_counts(self) -> Counts:
    """The metrics of a rollout before its first call."""
    self.message = ''
    counts: Counts = collections.defaultdict(float)
    return counts | {f'environment/{name}': 0.0 for name in _COUNTED}

  def end_counts(self, rollout: Rollout, counts: Counts, calls: int) -> Counts:
    """The metrics of a rollout after its last call."""
    turns_B = turns_of(rollout).number_BxT.max(1) + 1
    counts |= {'environment/turns': float(turns_B.mean()), 'environment/calls': float(calls)}
    for name, value in self.environments.take_counts().items():
      counts[f'environment/{name}'] += value
    return dict(counts)

  def without_lost(self, prompts: Prompts, rollout: Rollout, counts: Counts) -> Rollout:
    """End the rows whose environment object is gone for good: their episodes are skipped."""
    keys = row_keys(prompts, rollout)
    begun_B = (rollout.reason_B == UNFINISHED) & (rollout.length_B > 0)
    lost_B = begun_B & np.array([self.environments.is_lost(key) for key in keys])
    if not lost_B.any():
      return rollout
    counts['environment/lost'] += float(lost_B.sum())
    turns = turns_of(rollout)
    outcome_B = np.where(lost_B, environments.LOST.outcome, turns.outcome_B)
    return rollout._replace(
      reason_B=np.where(lost_B, STOPPED, rollout.reason_B).astype(rollout.reason_B.dtype),
      turns=turns._replace(outcome_B=outcome_B.astype(turns.outcome_B.dtype)),
    )

  def _step_environments(
    self,
    prompts: Prompts,
    rows: Sequence[Row],
    before: Rollout,
    sampled: Rollout,
    limits: Limits,
    counts: Counts,
  ) -> Rollout:
    """Marks the turns just sampled, steps their environments and appends the observations."""
    # An exit rule starts anew with every turn.
    rollout = jax.tree.map(np.array, sampled._replace(turns=before.turns, memory_BxM=None))
    played = np.flatnonzero(before.reason_B == UNFINISHED)
    result_by_row, request_by_row = self.end_turns(prompts, rows, rollout, before.length_B, played)
    stepped = self.environments.run(list(request_by_row.values()))
    result_by_row |= zip(request_by_row, stepped, strict=True)
    for b in sorted(result_by_row):
      self.apply(rollout, b, result_by_row[b], limits, counts)
    keys = row_keys(prompts, rollout)
    self._end([keys[b] for b in played if rollout.reason_B[b] != UNFINISHED])
    return rollout

  def end_turns(
    self,
    prompts: Prompts,
    rows: Sequence[Row],
    rollout: Rollout,
    start_B: Array,
    ended: Iterable[int],
  ) -> tuple[dict[int, environments.TurnResult], dict[int, environments.TurnRequest]]:
    """Marks turns that are sampled, from token `start_B` on, in place.

    Returns the results of episodes that could not begin, and the requests for the other environments, by row.
    """
    turns, keys = turns_of(rollout), row_keys(prompts, rollout)
    seeded_P, result_by_row, request_by_row = list(self.seeded(prompts, rows)), {}, {}
    for b in map(int, ended):
      turn = slice(start_B[b], rollout.length_B[b])
      turns.state_BxT[b, turn] = state_id(rollout.tokens_BxT[b], turns.number_BxT[b], turn.start)
      turns.number_BxT[b, turn] = turns.number_BxT[b].max() + 1
      if rollout.reason_B[b] not in (STOPPED, EXITED):
        continue
      if keys[b] in self._failed:
        result_by_row[b] = self._failed[keys[b]]
        continue
      row, seed = seeded_P[b * len(rows) // len(keys)]
      texts = self.turn_texts(rollout.tokens_BxT[b], turns.number_BxT[b], calls=True)
      request_by_row[b] = environments.TurnRequest(keys[b], row, seed, texts)
    return result_by_row, request_by_row

  def apply(
    self,
    rollout: Rollout,
    b: int,
    result: environments.TurnResult,
    limits: Limits,
    counts: Counts,
  ) -> None:
    """Writes the result of an environment step into row b, in place."""
    turns, end = turns_of(rollout), rollout.length_B[b]
    number_T, last = turns.number_BxT[b], result.result
    paid = () if last is None else environments.turn_rewards(last, number_T.max() + 1)
    if paid is None:
      result = environments.TurnResult(rewards.ERROR, _UNEVEN)
    rollout.reason_B[b] = STOPPED
    turns.outcome_B[b] = result.outcome
    if result.outcome != rewards.OK:
      self.message = self.message or result.message
      return
    assert last is not None and paid, 'a turn with the outcome OK has a result'
    for turn, reward in enumerate(paid):
      turns.reward_BxT[b, np.flatnonzero(number_T == turn)[-1]] += reward
    if environments.ends_episode(last) or last.observation is None:
      return
    if number_T.max() + 1 >= limits.turns:
      counts['environment/turns_over'] += 1
      return
    token_ids = self.turn_template.ids(last.observation, int(rollout.tokens_BxT[b, end - 1]))
    if end + len(token_ids) >= limits.row_tokens:  # no room for a sampled token behind it
      rollout.reason_B[b] = TRUNCATED
      counts['environment/no_room'] += 1
      return
    observation = slice(end, end + len(token_ids))
    rollout.tokens_BxT[b, observation] = token_ids
    rollout.version_BxT[b, observation] = rollout.version_BxT[b, end - 1]
    rollout.length_B[b], rollout.reason_B[b] = observation.stop, UNFINISHED
    counts['environment/observation_tokens'] += len(token_ids)


def turns_of(rollout: Rollout) -> Turns:
  """The turns of a multi-turn rollout. Raises ValueError for another one."""
  if rollout.turns is None:
    raise ValueError('the rollout has single turns')
  return rollout.turns


def keys_of(prompts: Prompts, rollouts: int) -> list[list[environments.EpisodeKey]]:
  """The keys of the episodes of each prompt."""
  part_P = np.zeros_like(prompts.index_P) if prompts.part_P is None else prompts.part_P
  return [
    [(int(index), int(born), int(part), g) for g in range(rollouts)]
    for index, born, part in zip(prompts.index_P, prompts.born_P, part_P, strict=True)
  ]


def row_keys(prompts: Prompts, rollout: Rollout) -> list[environments.EpisodeKey]:
  """The key of each row's episode."""
  rollouts = len(rollout.reason_B) // len(prompts.index_P)
  return list(itertools.chain.from_iterable(keys_of(prompts, rollouts)))


def state_id(tokens_T: np.ndarray, number_T: np.ndarray, start: int) -> int:
  """A hash of the observation before token `start`: equal observations of a group are the same state."""
  sampled = np.flatnonzero(number_T[:start] >= 0)
  observation = tokens_T[sampled[-1] + 1 if len(sampled) else 0 : start]
  return zlib.crc32(np.asarray(observation, np.int32).tobytes()) >> 1


def compile_call(context: RunContext) -> Callable:
  """Return a function as `programs.compile_split` does, with one call of the sampling program for every turn."""
  spec, episodes = context.spec, context.episodes
  if not isinstance(episodes, Episodes):
    raise ValueError('the run has no environment that answers turns')
  update, generate = programs.compile_update(spec), programs.compile_sample(spec)

  def call(state, batch, prompts, begun, draft, cap):
    state, metrics = update(state, batch)

    def sample(begun):
      rollout, sample_metrics, _ = generate(state, (), prompts, begun, draft, cap)
      return sharding.fetch(rollout), sample_metrics

    limits = Limits(int(cap), episodes.turns, episodes.calls)
    rollout, counts = episodes.play(
      sample, prompts, context.tables.train.rows_of(prompts), begun, limits
    )
    return state, rollout, metrics | counts

  return call

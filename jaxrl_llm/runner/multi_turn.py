"""Multi-turn rollouts: one call of the sampling program for each turn, with environment steps on the host in between.

A row is one growing completion. The program samples until the turn ends; the environment gets the text of the turn, and
its observation is appended to the row as token ids, which are masked out of the loss; the row then continues as an
unfinished one. Sampled token ids are never decoded and encoded again.
"""

from __future__ import annotations

import collections
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np

from jaxrl_llm import data, environments, rewards
from jaxrl_llm.config.schema import Config
from jaxrl_llm.distributed import sharding
from jaxrl_llm.learner import compile as programs
from jaxrl_llm.models.tokenizer import Tokenizer
from jaxrl_llm.types import (
  EXITED,
  STOPPED,
  TRUNCATED,
  UNFINISHED,
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
Sample = Callable[[Rollout], tuple[Rollout, JsonObject]]
Counts = dict[str, float]


class Limits(NamedTuple):
  """Bounds of one call of `Episodes.play`."""

  row_tokens: int  # of a row, observations included
  turns: int  # of an episode
  calls: int = 0  # of the sampling program; 0: until every episode is over


class Episodes:
  """Episodes of `config.environment`: opens, plays and scores them."""

  def __init__(self, config: Config, tokenizer: Tokenizer, horizon: Callable[..., int] | None):
    """`horizon`: (step, largest number of turns) → turns in that step; None: the largest.

    Raises UserError for bad settings.
    """
    settings = config.environment
    self.environments = environments.WorkerPool(settings)
    self.turn_template = environments.build_turn_template(
      tokenizer, config.data.chat, settings.role, settings.observation_tokens
    )
    self.tokenizer, self.data_config, self.seed = tokenizer, config.data, config.seed
    self.judge, self.max_turns, self.horizon = settings.judge, settings.turns, horizon
    self.calls = (
      settings.rounds
    )  # of the sampling program in a step; 0: until every episode is over
    self.turns = settings.turns  # of an episode in the current step
    self.message = ''  # of the first failure in the newest call of `play`
    self._max_age = config.rollout.max_age
    self._unopened: set[tuple[int, int]] = set()

  def close(self) -> None:
    """End the worker processes."""
    self.environments.close()

  def begin_step(self, step: int) -> None:
    """Set the number of turns that an episode may take in this step. arXiv:2506.07976 (TTI)."""
    self.turns = self.max_turns
    if self.horizon is not None:
      self.turns = max(1, self.horizon(step, self.max_turns))
    # Groups of earlier steps than these are no longer continued.
    self._unopened = {group for group in self._unopened if group[1] >= step - self._max_age}

  def open(self, prompts: Prompts, rows: Sequence[Row], width: int) -> Prompts:
    """Append the first observation to each prompt, of `width` tokens at most.

    Episodes whose observation does not fit fail when their first turn ends.
    """
    results = self.environments.run(
      [environments.TurnRequest(row, seed, []) for row, seed in self._seeded(prompts, rows)]
    )
    if all(result.first_observation is None for result in results):
      return prompts
    tokens = []
    for p, (row, result) in enumerate(zip(rows, results, strict=True)):
      token_ids = np.asarray(prompts.tokens_PxL[p][: prompts.length_P[p]])
      if result.first_observation is not None:
        opened = data.with_question(row, _OPENING, dict(observation=result.first_observation))
        opened_ids = data.encode(opened, self.data_config, self.tokenizer)
        if len(opened_ids) > width:
          self._unopened.add(_group_key(prompts, p))
        token_ids = opened_ids if len(opened_ids) <= width else token_ids
      tokens.append(token_ids)
    tokens_PxL, length_P = data.pad_rows(tokens, width)
    return prompts._replace(tokens_PxL=tokens_PxL, length_P=length_P)

  def play(
    self, sample: Sample, prompts: Prompts, rows: Sequence[Row], rollout: Rollout, limits: Limits
  ) -> tuple[Rollout, Counts]:
    """Call `sample` (rows to continue → all rows, metrics) until no row is unfinished.

    `rows` [P] are the data rows of the prompts. Returns host arrays and metrics.
    """
    counts: Counts = collections.defaultdict(float)
    counts |= {f'environment/{name}': 0.0 for name in _COUNTED}
    self.message = ''
    max_calls = limits.calls or np.inf
    while (rollout.reason_B == UNFINISHED).any() and counts['environment/calls'] < max_calls:
      sampled, metrics = sample(rollout._replace(turns=None))
      for name, value in metrics.items():
        counts[name] += float(value)
      counts['environment/calls'] += 1
      rollout = self._step_environments(prompts, rows, rollout, sampled, limits, counts)
    turns_B = turns_of(rollout).number_BxT.max(1) + 1
    counts['environment/turns'] = float(turns_B.mean())
    return rollout, dict(counts)

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
    turns, count_B = turns_of(rollout), turns_of(before).number_BxT.max(1) + 1
    G = len(count_B) // len(rows)
    ended = []
    for b in np.flatnonzero(before.reason_B == UNFINISHED):
      turn = slice(before.length_B[b], rollout.length_B[b])
      turns.state_BxT[b, turn] = _state_id(rollout.tokens_BxT[b], turns.number_BxT[b], turn.start)
      turns.number_BxT[b, turn] = count_B[b]
      if rollout.reason_B[b] in (STOPPED, EXITED):
        ended.append(b)
    seeded_P = list(self._seeded(prompts, rows))
    requests = []
    for b in ended:
      row, seed = seeded_P[b // G]
      texts = self.turn_texts(rollout.tokens_BxT[b], turns.number_BxT[b])
      requests.append(environments.TurnRequest(row, seed, texts))
    for b, result in zip(ended, self.environments.run(requests), strict=True):
      if _group_key(prompts, b // G) in self._unopened:
        problem = 'what the environment shows first does not fit config.prompt_tokens'
        result = environments.TurnResult(rewards.ERROR, problem, [])
      self._apply(rollout, b, result, count_B[b] + 1, limits, counts)
    return rollout

  def _apply(
    self,
    rollout: Rollout,
    b: int,
    result: environments.TurnResult,
    turn_count: int,
    limits: Limits,
    counts: Counts,
  ) -> None:
    """Writes the result of an environment step into row b, in place."""
    turns, end = turns_of(rollout), rollout.length_B[b]
    rollout.reason_B[b] = STOPPED
    turns.outcome_B[b] = result.outcome
    if result.outcome != rewards.OK:
      self.message = self.message or result.message
      return
    last = result.results[-1]
    turns.reward_BxT[b, end - 1] = last.reward
    if environments.ends_episode(last) or last.observation is None:
      return
    if turn_count >= limits.turns:
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

  def turn_texts(self, tokens_T: np.ndarray, number_T: np.ndarray) -> list[str]:
    """The text of each sampled turn of a row, end tokens left out."""
    texts = []
    for turn in range(number_T.max() + 1):
      token_ids = tokens_T[number_T == turn].tolist()
      ends = token_ids and token_ids[-1] in self.tokenizer.end_ids
      texts.append(self.tokenizer.decode(token_ids[:-1] if ends else token_ids))
    return texts

  def _seeded(self, prompts: Prompts, rows: Sequence[Row]) -> Iterator[tuple[Row, int]]:
    """(row, seed) of each prompt, by (config.seed, step of its birth, prompt): a group starts from the same state."""
    for row, born, index in zip(rows, prompts.born_P, prompts.index_P, strict=True):
      seed = np.random.SeedSequence((self.seed, 7, int(born), int(index))).generate_state(1)[0]
      yield row, int(seed) >> 1

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


def turns_of(rollout: Rollout) -> Turns:
  """The turns of a multi-turn rollout. Raises ValueError for another one."""
  if rollout.turns is None:
    raise ValueError('the rollout has single turns')
  return rollout.turns


def _group_key(prompts: Prompts, p: int) -> tuple[int, int]:
  return int(prompts.index_P[p]), int(prompts.born_P[p])


def _state_id(tokens_T: np.ndarray, number_T: np.ndarray, start: int) -> int:
  """A hash of the observation before token `start`: equal observations of a group are the same state."""
  sampled = np.flatnonzero(number_T[:start] >= 0)
  observation = tokens_T[sampled[-1] + 1 if len(sampled) else 0 : start]
  return zlib.crc32(np.asarray(observation, np.int32).tobytes()) >> 1


def compile_call(context: RunContext) -> Callable:
  """Return a function as `programs.compile_split` does, with one call of the sampling program for every turn."""
  spec, episodes = context.spec, context.episodes
  if episodes is None:
    raise ValueError('the run has no environment')
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

"""Rows that an environment answers: a call of the sampling program for every round of turns, the host between them.

A row is one growing completion. The engine samples until it ends its turn; the environment hears the turn's text, and
what it says is appended to the row as ids, which count in no loss; then the row is handed back as one that is
unfinished. No id that was sampled is ever made again from text.
"""

from __future__ import annotations

import collections
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm import data, environments, rewards
from jaxrl_llm import step as steps
from jaxrl_llm.distributed import sharding
from jaxrl_llm.types import (
  EXITED,
  STOPPED,
  TRUNCATED,
  UNFINISHED,
  Prompts,
  Rollout,
  Row,
  Turns,
  UserError,
)

_OPENING = '{question}\n\n{observation}'
# Choices that nothing but an environment's turns gives a meaning to.
_BY_TURN = ('gigpo', 'turn_whitened', 'last_turn_first')
_COUNTED = ('calls', 'observation_tokens', 'no_room', 'turns_over')
Sample = Callable[[Rollout], tuple[Rollout, dict[str, Any]]]


def check(config: Any, method: Any) -> None:
  """Raises UserError where an environment answers and something else takes a row for one reply. Source: none."""
  asks = f'config.environment.fn={config.environment.fn!r}'
  if config.environment.fn == 'none':
    chosen = {
      'objective.credit_assignment': config.objective.credit_assignment.fn,
      'optimizer.outer': config.optimizer.outer.fn,
    }
    for part, fn in chosen.items():
      if fn in _BY_TURN:
        raise UserError(
          f'config.{part}.fn={fn!r} is of turns, and {asks} answers none; choose one.'
        )
    return
  if config.mode != 'split':
    raise UserError(
      f"{asks} answers on the host between two calls of the sampling program; set config.mode='split', not "
      f'{config.mode!r}.'
    )
  if config.rollout.early_exit.fn not in ('none', 'text'):
    raise UserError(
      f'{asks} takes a row that exits for one that ended its turn, and config.rollout.early_exit.fn='
      f"{config.rollout.early_exit.fn!r} ends rows for other reasons; choose 'text' or 'none'."
    )
  takes = {
    'replay.reuse': config.replay.reuse.fn != 'none',
    'replay.collect': config.replay.collect.fn != 'none',
    'rewards.vote': config.rewards.vote.fn != 'none',
    'rewards.truncate': config.rewards.truncate.fn != 'none',
    'curriculum.labels': config.curriculum.labels.fn != 'none',
    'curriculum.hint': config.curriculum.hint.fn != 'none',
  }
  for name in ('stop', 'draft', 'pruning', 'tree'):
    takes[f'rollout.{name}'] = config.rollout[name].fn != 'none'
  takes |= {
    'rollout.ngram.draft': config.rollout.ngram.draft > 0,
    'rollout.windows': config.rollout.windows > 1,
    'objective.advantage': method.needs_parts,
  }
  for name in (name for name, used in takes.items() if used):
    told = f'{asks} makes many turns of a row, and config.{name} takes it for one reply'
    raise UserError(f'{told}; leave one of them at its default.')


class Limits(NamedTuple):
  """Of one call of `Play.finish`."""

  cap: int  # tokens that a row may hold
  turns: int  # of an episode
  rounds: int = 0  # calls of the sampling program; 0: until every episode is over


class Play:
  """Episodes of `config.environment`: opens them, plays them, says what they are worth."""

  def __init__(self, config: Any, tokenizer: Any, horizon: Callable[..., int]):
    """`horizon`: (step, most turns) → turns in that step. Raises UserError for bad settings. Source: none."""
    told = config.environment
    self.stage = environments.WorkerPool(told)
    self.seam = environments.build_turn_template(
      tokenizer, config.data.chat, told.role, told.observation_tokens
    )
    self.tokenizer, self.settings, self.seed = tokenizer, config.data, config.seed
    self.judge, self.most, self.horizon = told.judge, told.turns, horizon
    self.rounds = told.rounds  # calls of a step; 0: until every episode is over
    self.turns = told.turns  # that an episode may take now
    self.message = ''  # the first failure of the newest call, in words
    self._max_age = config.rollout.max_age
    self._unopened: set[tuple[int, int]] = set()

  def at(self, step: int) -> None:
    """Begins a step: sets how many turns an episode may take in it. Source: arXiv:2506.07976 (TTI)."""
    self.turns = max(1, self.horizon(step, self.most))
    # Groups born earlier are no longer continued.
    self._unopened = {name for name in self._unopened if name[1] >= step - self._max_age}

  def opened(self, prompts: Prompts, rows: Sequence[Row], width: int) -> Prompts:
    """The prompts, each followed by what its environment shows first; one without room for it fails its episodes.

    Source: none.
    """
    heard = self.stage.run(
      [environments.TurnRequest(row, s, []) for row, s in self._asked(prompts, rows)]
    )
    if all(one.opening is None for one in heard):
      return prompts
    tokens, P = [], len(rows)
    for p in range(P):
      told = np.asarray(prompts.tokens_PxL[p][: prompts.length_P[p]])
      if heard[p].opening is not None:
        longer = data.with_question(rows[p], _OPENING, dict(observation=heard[p].opening))
        longer = data.encode(longer, self.settings, self.tokenizer)
        if len(longer) > width:
          self._unopened.add(_name(prompts, p))
        told = longer if len(longer) <= width else told
      tokens.append(told)
    tokens_PxL, length_P = data.padded(tokens, width)
    return prompts._replace(tokens_PxL=tokens_PxL, length_P=length_P)

  def finish(
    self, sample: Sample, prompts: Prompts, rows: Sequence[Row], rollout: Rollout, limits: Limits
  ) -> tuple[Rollout, dict[str, float]]:
    """Calls `sample` (rows to continue → all rows, numbers for the log) until no row is unfinished.

    `rows` are of the prompts. Returns host arrays, and numbers for the log. Source: none.
    """
    told: dict[str, float] = collections.defaultdict(float)
    told |= {f'environment/{name}': 0.0 for name in _COUNTED}
    self.message = ''
    most = limits.rounds or np.inf
    while (rollout.reason_B == UNFINISHED).any() and told['environment/calls'] < most:
      sampled, numbers = sample(rollout._replace(turns=None))
      for name, value in numbers.items():
        told[name] += float(value)
      told['environment/calls'] += 1
      rollout = self._answered(prompts, rows, rollout, sampled, limits, told)
    count_B = rollout.turns.number_BxT.max(1) + 1
    told['environment/turns'] = float(count_B.mean())
    return rollout, dict(told)

  def _answered(self, prompts, rows, before: Rollout, sampled: Rollout, limits, told) -> Rollout:
    """What was sampled, with every turn marked and answered: rows that go on are longer by the answer."""
    # An exit rule begins anew with every turn.
    rollout = jax.tree.map(np.array, sampled._replace(turns=before.turns, memory_BxM=None))
    turns, count_B = rollout.turns, before.turns.number_BxT.max(1) + 1
    G = len(count_B) // len(rows)
    ended = []
    for b in np.flatnonzero(before.reason_B == UNFINISHED):
      own = slice(before.length_B[b], rollout.length_B[b])
      turns.state_BxT[b, own] = _state(rollout.tokens_BxT[b], turns.number_BxT[b], own.start)
      turns.number_BxT[b, own] = count_B[b]
      if rollout.reason_B[b] in (STOPPED, EXITED):
        ended.append(b)
    of_P = list(self._asked(prompts, rows))
    asked = [
      environments.TurnRequest(*of_P[b // G], self.texts(rollout.tokens_BxT[b], turns.number_BxT[b]))
      for b in ended
    ]
    for b, heard in zip(ended, self.stage.run(asked), strict=True):
      if _name(prompts, b // G) in self._unopened:
        why = 'what the environment shows first does not fit config.prompt_tokens'
        heard = environments.TurnResult(rewards.ERROR, why, [])
      self._lay(rollout, b, heard, count_B[b] + 1, limits, told)
    return rollout

  def _lay(self, rollout: Rollout, b: int, heard, count: int, limits: Limits, told) -> None:
    """Writes one answer into its row."""
    turns, end = rollout.turns, rollout.length_B[b]
    rollout.reason_B[b] = STOPPED
    turns.outcome_B[b] = heard.outcome
    if heard.outcome != rewards.OK:
      self.message = self.message or heard.message
      return
    result = heard.results[-1]
    turns.reward_BxT[b, end - 1] = result.reward
    if environments.ends_episode(result):
      return
    if count >= limits.turns:
      told['environment/turns_over'] += 1
      return
    ids = self.seam.ids(result.observation, int(rollout.tokens_BxT[b, end - 1]))
    if end + len(ids) >= limits.cap:  # no room for a word after it
      rollout.reason_B[b] = TRUNCATED
      told['environment/no_room'] += 1
      return
    given = slice(end, end + len(ids))
    rollout.tokens_BxT[b, given] = ids
    rollout.version_BxT[b, given] = rollout.version_BxT[b, end - 1]
    rollout.length_B[b], rollout.reason_B[b] = given.stop, UNFINISHED
    told['environment/observation_tokens'] += len(ids)

  def texts(self, tokens_T: np.ndarray, number_T: np.ndarray) -> list[str]:
    """The text of each turn of a row, end tokens left out. Source: none."""
    found = []
    for turn in range(number_T.max() + 1):
      ids = tokens_T[number_T == turn].tolist()
      ends = ids and ids[-1] in self.tokenizer.end_ids
      found.append(self.tokenizer.decode(ids[:-1] if ends else ids))
    return found

  def _asked(self, prompts: Prompts, rows: Sequence[Row]):
    """(row, seed) of each prompt: a group shares its start. By (config.seed, step of its birth, prompt)."""
    for row, born, index in zip(rows, prompts.born_P, prompts.index_P, strict=True):
      seed = np.random.SeedSequence((self.seed, 7, int(born), int(index))).generate_state(1)[0]
      yield row, int(seed) >> 1

  def scores(
    self, turns: Turns, graded: Callable[[], rewards.Scores], parts: int
  ) -> rewards.Scores:  # fmt: skip
    """What rows are worth: by the environment alone, or as `graded` says with the environment's rewards beside.

    The reward of a row is the sum of what its turns were paid. Where the environment failed, that is the outcome.
    Source: none.
    """
    paid_N, outcome_N = turns.reward_BxT.sum(1), np.asarray(turns.outcome_B)
    failed_N = outcome_N != rewards.OK
    if self.judge == 'environment':
      parts_NxK, message = np.zeros((len(paid_N), parts), np.float32), ''
      parts_NxK[:, 0] = paid_N
    else:
      scores = graded()
      parts_NxK, message = np.array(scores.parts_BxK), scores.message
      parts_NxK = np.concatenate([parts_NxK, paid_N[:, None]], axis=1).astype(np.float32)
      outcome_N = np.where(failed_N, outcome_N, scores.outcome_B)
    parts_NxK[failed_N] = 0.0
    counts = {
      f'grade/{name}': int((outcome_N == code).sum())
      for name, code in dict(
        timeouts=rewards.TIMEOUT, crashes=rewards.CRASH, errors=rewards.ERROR
      ).items()
    }
    return rewards.Scores(parts_NxK, outcome_N.astype(np.int8), counts, self.message or message)


def _name(prompts: Prompts, p: int) -> tuple[int, int]:
  return int(prompts.index_P[p]), int(prompts.born_P[p])


def _state(tokens_T: np.ndarray, number_T: np.ndarray, start: int) -> int:
  """Names what was given just before token `start`: rows of a group that saw the same begin from the same state."""
  said = np.flatnonzero(number_T[:start] >= 0)
  given = tokens_T[said[-1] + 1 if len(said) else 0 : start]
  return zlib.crc32(np.asarray(given, np.int32).tobytes()) >> 1


def compile_call(parts: Any) -> Callable:
  """What `steps.compile_split` returns, with a call of the sampling half for every round. Source: none."""
  program, play = parts.program, parts.play
  learn, draw = steps.compile_update(program), steps.compile_sample(program)

  def call(state, batch, prompts, begun, draft, cap):
    state, metrics = learn(state, batch)

    def sample(begun):
      rollout, told, _ = draw(state, (), prompts, begun, draft, cap)
      return sharding.fetch(rollout), told

    rows = [parts.tables.train.rows[i] for i in prompts.index_P]
    limits = Limits(int(cap), play.turns, play.rounds)
    rollout, told = play.finish(sample, prompts, rows, begun, limits)
    return state, rollout, metrics | told

  return call

"""Rows and their live environments: which are closed, replayed or lost, between steps and where a run is resumed."""

from __future__ import annotations

import collections

import numpy as np
import pytest

from jaxrl_llm import rewards
from jaxrl_llm.config import loading as configs
from jaxrl_llm.config import schema
from jaxrl_llm.learner import empty_records
from jaxrl_llm.models import tokenizer
from jaxrl_llm.runner import multi_turn
from jaxrl_llm.types import STOPPED, TRUNCATED, UNFINISHED, Prompts, Rollout, Row

P, G, T = 2, 2, 400
B = P * G
CHARACTERS = tokenizer.characters('abcdefghijklmnopqrstuvwxyzN -?0123456789\n')
ROWS = [Row(str(p), '?', (), '', 'test', {}) for p in range(P)]
LIMITS = multi_turn.Limits(row_tokens=T, turns=9, calls=1)


@pytest.fixture
def begin(tmp_path):
  """A function that makes the episodes of a run, with environments in a worker; they are closed after the test."""
  made = []

  def make(fn='recorded', **changes):
    c = configs.default()
    c.data.chat, c.rollout.max_age = False, 2
    c.environment.update(dict(fn=f'tests.environments.recorded:{fn}', workers=1, deadline_s=20.0))
    c.environment.update(dict(log=str(tmp_path / 'calls'), judge='environment') | changes)
    made.append(multi_turn.Episodes(schema.typed(c), CHARACTERS, None))
    return made[-1]

  yield make
  for one in made:
    one.close()


def calls(tmp_path, call):
  lines = (tmp_path / 'calls').read_text().splitlines()
  return collections.Counter(line.split()[0] for line in lines if line.split()[1] == call)


def prompts(born=0, first=0):
  index_P = np.arange(first, first + P, dtype=np.int32)
  return Prompts(
    np.ones((P, 8), np.int32), np.full(P, 8, np.int32), index_P, np.full(P, born), np.zeros(P)
  )


def empty():
  zeros = lambda kind: np.zeros((B, T), kind)  # noqa: E731
  return Rollout(
    tokens_BxT=zeros(np.int32), logp_BxT=zeros(np.float32), length_B=np.zeros(B, np.int32),
    reason_B=np.full(B, UNFINISHED, np.int8), version_BxT=zeros(np.int32),
    weight_B=np.ones(B, np.float32), feature_BxF=np.zeros((B, 0), np.float32),
    turns=empty_records.empty_turns(B, T),
  )  # fmt: skip


def saying(*texts, reason=STOPPED):
  """A program that samples these turns, one for each row."""

  def sample(begun):
    rollout = Rollout(*(None if x is None else np.array(x) for x in begun))
    for b in np.flatnonzero(begun.reason_B == UNFINISHED):
      ids = [*CHARACTERS.encode(texts[b % len(texts)]), *CHARACTERS.end_ids]
      turn = slice(begun.length_B[b], begun.length_B[b] + len(ids))
      rollout.tokens_BxT[b, turn], rollout.length_B[b] = ids, turn.stop
      rollout.reason_B[b] = reason
    return rollout, {}

  return sample


def test_episodes_live_over_steps_and_are_closed_once_when_they_are_over(begin, tmp_path):
  episodes, first = begin(), prompts()
  episodes.begin_step(0)
  first = episodes.open(first, ROWS, 8, G)
  rollout = empty()
  for step in range(2):
    rollout, counts = episodes.play(saying('go'), first, ROWS, rollout, LIMITS)
    episodes.begin_step(step + 1)
    assert (rollout.reason_B == UNFINISHED).all() and counts['environment/replayed'] == 0
  assert calls(tmp_path, 'step') == {'0': 2 * G, '1': 2 * G} and not calls(tmp_path, 'close')
  # Three ways to end: an error; the last turn that is allowed; an observation without room.
  limits = LIMITS._replace(turns=3)
  rollout, _ = episodes.play(saying('raise', 'go', 'go'), first, ROWS, rollout, limits)
  assert rollout.turns.outcome_B.tolist() == [rewards.ERROR, 0, 0, rewards.ERROR]
  assert calls(tmp_path, 'close') == {'0': G, '1': G} and not episodes.environments.live
  later = episodes.open(prompts(born=1, first=7), ROWS, 8, G)
  rollout, _ = episodes.play(saying('go'), later, ROWS, empty(), LIMITS._replace(row_tokens=9))
  assert (rollout.reason_B == TRUNCATED).all()
  assert calls(tmp_path, 'close') == {'0': 2 * G, '1': 2 * G} and not episodes.environments.live
  # A turn that never ends; and rows that are no longer continued.
  third = episodes.open(prompts(born=2, first=9), ROWS, 8, G)
  endless = saying('go', reason=TRUNCATED)
  assert episodes.play(endless, third, ROWS, empty(), LIMITS)[0].turns.outcome_B.tolist() == [0] * B
  assert calls(tmp_path, 'close') == {'0': 3 * G, '1': 3 * G}
  episodes.open(prompts(born=3, first=11), ROWS, 8, G)
  episodes.begin_step(5)
  assert calls(tmp_path, 'close') == {'0': 3 * G, '1': 3 * G}
  episodes.begin_step(6)
  assert calls(tmp_path, 'close') == {'0': 4 * G, '1': 4 * G} == calls(tmp_path, 'reset')


@pytest.mark.parametrize('fn', ['recorded', 'unreplayable'])
def test_a_resumed_run_replays_unfinished_episodes_or_drops_and_counts_them(fn, begin, tmp_path):
  before = begin(fn)
  opened = before.open(prompts(), ROWS, 8, G)
  rollout, _ = before.play(saying('go'), opened, ROWS, empty(), LIMITS)
  before.close()
  assert calls(tmp_path, 'close') == {'0': G, '1': G}
  after, sampled = begin(fn), []

  def sample(begun):
    sampled.append((begun.reason_B == UNFINISHED).sum())
    return saying('go')(begun)

  rollout, counts = after.play(sample, opened, ROWS, rollout, LIMITS)
  if fn == 'recorded':
    rows = zip(rollout.tokens_BxT, rollout.length_B, strict=True)
    texts = [CHARACTERS.decode(tokens_T[:n].tolist()) for tokens_T, n in rows]
    assert all(text.endswith(' 2 None') for text in texts)
    assert (counts['environment/replayed'], counts['environment/lost'], sampled) == (B, 0, [B])
    assert calls(tmp_path, 'step') == {'0': 3 * G, '1': 3 * G}
    assert (rollout.turns.outcome_B == rewards.OK).all()
  else:
    assert (counts['environment/replayed'], counts['environment/lost'], sampled) == (0, B, [0])
    assert (rollout.turns.outcome_B == rewards.SKIP).all() and (rollout.reason_B == STOPPED).all()
    assert calls(tmp_path, 'step') == {'0': G, '1': G}
    scores = after.score(rollout.turns, lambda: None, 1)
    policy = rewards.FailurePolicy(dict(failed=dict(crash='score', error='score', stop_steps=1)))
    assert policy.apply(scores)[1].all()  # dropped
    policy.observe(scores.outcome_B, scores.message)
    policy.check()  # the run goes on


def test_a_group_whose_rollouts_do_not_start_alike_fails_where_they_differ(begin):
  episodes = begin('differing')
  opened = episodes.open(prompts(), ROWS, 60, G)
  rollout, _ = episodes.play(saying('go'), opened, ROWS, empty(), LIMITS)
  assert rollout.turns.outcome_B.tolist() == [rewards.OK, rewards.ERROR] * P
  assert 'another first observation' in episodes.message

"""Hostile completions and rows for the grader `gym`: none of their code runs, and later scores are correct."""

from __future__ import annotations

import pytest

from jaxrl_llm import rewards
from jaxrl_llm.rewards import verifiers
from jaxrl_llm.rewards.code_execution import sandbox
from jaxrl_llm.types import Row
from tests.rewards.gym import gym_attacks
from tests.rewards.gym.gym_attacks import COMPLETIONS, HEAVY, OF_COMPLETIONS, OF_SYMPY, read, row_of

reasoning_gym = pytest.importorskip('reasoning_gym')


@pytest.fixture(scope='module', params=['sandbox', 'bare'])
def pool(request):
  """Workers on a machine with a sandbox, and on one without, where a mark would be visible."""
  if request.param == 'sandbox' and sandbox.unavailable_reason():
    pytest.skip(sandbox.unavailable_reason())
  with pytest.MonkeyPatch.context() as patch:
    if request.param == 'bare':
      patch.setenv('PATH', '/no_such_folder')
      sandbox.unavailable_reason.cache_clear()
    with rewards.Pool(dict(fn='gym', workers=1, deadline_s=60.0, cpu_s=60.0)) as workers:
      workers.bare = request.param == 'bare'
      yield workers
  sandbox.unavailable_reason.cache_clear()


def graded(pool: rewards.Pool, pairs: list[tuple[Row, str]]) -> rewards.Scores:
  return pool.score([row for row, _ in pairs], [text for _, text in pairs])


@pytest.mark.parametrize('task', OF_COMPLETIONS)
def test_no_completion_runs_and_later_scores_are_unchanged(task, pool, tmp_path):
  if pool.bare and task in OF_SYMPY:
    return  # see test_scorers.py
  mark = tmp_path / 'mark'
  right = [(row, row.answer) for row in (row_of(task, index) for index in range(4))]
  before = graded(pool, right)
  attacked = row_of(task)
  pairs, attack_at = [], {}
  for name, completion in COMPLETIONS.items():
    attack_at[len(pairs)] = name
    pairs.append((attacked, gym_attacks.filled(completion, task, str(mark))))
    if len(attack_at) % 8 == 0:
      pairs += [right[0], (attacked, 'wrong')]
  scores = graded(pool, pairs)
  assert not mark.exists()
  assert (scores.outcome_B == rewards.OK).all(), scores.message
  for at, score in enumerate(scores.reward_B):
    is_right = pairs[at][1] == attacked.answer
    assert score == before.reward_B[0] == 1 if is_right else score < 0.1, attack_at.get(at, 'later')
  after = graded(pool, right)
  assert after.reward_B.tolist() == before.reward_B.tolist()


@pytest.mark.parametrize('task', OF_COMPLETIONS)
def test_completions_that_would_need_much_time_or_memory_are_wrong(task, pool):
  if pool.bare and task in OF_SYMPY:
    return
  right = row_of(task)
  scores = graded(pool, [(right, text) for text in HEAVY.values()] + [(right, right.answer)])
  bad = [name for name, code in zip(HEAVY, scores.outcome_B, strict=False) if code != rewards.OK]
  assert not bad, scores.message
  assert scores.reward_B[:-1].max() < 0.1
  assert scores.reward_B[-1] == 1


def test_no_field_of_a_row_runs(pool, tmp_path):
  mark = tmp_path / 'mark'
  good = row_of('number_sorting')
  rows = gym_attacks.hostile_rows(str(mark))
  pairs = []
  for entry, completion in rows.values():
    row = read(entry | dict(answer=entry['answer'] or '?'))
    pairs += [(row, completion), (good, good.answer)]
  scores = graded(pool, pairs)
  assert not mark.exists()
  for index, name in enumerate(rows):
    assert scores.outcome_B[2 * index] in (rewards.OK, rewards.ERROR), (name, scores.message)
    assert scores.reward_B[2 * index + 1] == 1, name


def test_a_file_does_not_choose_the_settings_of_a_scorer(tmp_path):
  """spell_backward reads the file that its settings name."""
  path = tmp_path / 'words.jsonl'
  path.write_text('')
  settings = dict(data_file=str(path))
  gym = dict(name='spell_backward', settings=settings, answer='cba')
  row = read(
    dict(question='abc', answer='cba', gym=gym, metadata=dict(source_dataset='spell_backward'))
  )
  assert row.extra['gym'] == dict(name='spell_backward', settings={}, answer='cba')
  assert verifiers.gym('cba', row) == 1
  without = read(dict(question='abc', answer='cba', gym=gym))
  assert 'gym' not in without.extra
  with pytest.raises(ValueError, match='does not come from reasoning-gym'):
    verifiers.gym('cba', without)

"""From rows to tables, and two evaluations against each other: on rows written by hand."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest

from jaxrl_llm.evaluation import compare, estimate, tally
from jaxrl_llm.types import UserError

# (source, level, greedy score, sampled scores, their answers, their trust)
PROMPTS = (
  ('b', 'length=10', 1.0, (1, 0, 0, 1), ('7', '8', '8', '7'), (0.9, 0.4, 0.4, 0.9)),
  ('b', 'length=9', 0.0, (0, 0, 0, 0), ('1', '2', '3', None), (0.5, 0.5, 0.5, 0.5)),
  ('b', 'length=9', 0.0, (1, 0, 0, 0), ('5', '6', None, None), (0.9, 0.1, 0.5, 0.5)),
  ('a', '', 1.0, (1, 1, 1, 1), ('x', 'x', 'x', 'x'), (0.5, 0.5, 0.5, 0.5)),
)


def rows(prompts=PROMPTS, votes: bool = True) -> list[dict]:
  made = []
  for kind in ('greedy', 'sampled'):
    for i, (source, level, greedy, scores, answers, trust) in enumerate(prompts):
      row = dict(kind=kind, id=f'id{i}', source=source, level=level)
      if kind == 'greedy':
        row |= dict(score=[greedy])
      else:
        row |= dict(score=list(map(float, scores)))
        row |= dict(answer=list(answers), trust=list(trust)) if votes else {}
      made.append(row)
  return made


def evaluation(prompts=PROMPTS, **changes) -> dict:
  grader = dict(fn='exact', right=1.0, parts=[])
  contents = dict(version=compare.VERSION, model='m', step=0, grader=grader, rows=rows(prompts))
  return contents | dict(settings=dict(samples=4, temperature=1.0)) | changes


def test_every_measure_of_every_prompt():
  found = tally.values(rows(), 1.0)
  np.testing.assert_allclose(found.plain['greedy'], [1, 0, 0, 1])
  np.testing.assert_allclose(found.plain['mean@4'], [0.5, 0, 0.25, 1])
  np.testing.assert_allclose(found.plain['best@4'], [1, 0, 1, 1])
  np.testing.assert_allclose(found.curves['pass'][2], [5 / 6, 0, 1 / 2, 1])
  np.testing.assert_allclose(
    found.curves['maj'][4], [0.5, 0, 0.5, 1]
  )  # ties share, None has no vote
  np.testing.assert_allclose(found.curves['vote'][4], [1, 0, 1, 1])
  for curve in found.curves.values():
    assert list(curve) == [1, 2, 4]
    np.testing.assert_allclose(curve[1], found.plain['mean@4'])
  assert found.exact == dict(maj=[True] * 3, vote=[True] * 3)


def test_what_is_not_told_is_not_counted():
  assert list(tally.values(rows(votes=False), 1.0).curves) == ['pass']
  greedy = [row for row in rows() if row['kind'] == 'greedy']
  assert list(tally.values(greedy, 1.0).plain) == ['greedy']
  (first, *_) = tally.groups(greedy, 1.0)
  assert first['curves'] == {} and 'k' not in tally.table([first])


def test_right_is_a_score_and_means_are_of_scores():
  rewards = [('a', '', 0.5, (0.5, 0.2), ('x', 'y'), (0.5, 0.5))]
  found = tally.values(rows(rewards), 0.5)
  assert found.plain['greedy'] == [0.5] and found.plain['mean@2'] == [0.35]
  assert found.curves['pass'][1] == [0.5] and found.curves['pass'][2] == [1.0]
  assert tally.values(rows(rewards), 1.0).curves['pass'][2] == [0.0]


def test_groups_are_all_then_sources_with_their_levels_in_order():
  records = tally.groups(rows(), 1.0)
  assert [(g['source'], g['level'], g['prompts']) for g in records] == [
    *(('all', '', 4), ('a', '', 1), ('b', '', 3), ('b', 'length=9', 2), ('b', 'length=10', 1))
  ]
  want = estimate.interval(np.array([1.0, 0.0, 0.0]))
  assert records[2]['measures']['greedy'] == want._asdict()
  curve = records[0]['curves']['pass']
  assert curve['k'] == [1, 2, 4] and curve['exact'] == [True] * 3
  np.testing.assert_allclose(curve['mean'], [1.75 / 4, (5 / 6 + 0.5 + 1) / 4, 3 / 4])
  for name in ('pass', 'maj', 'vote'):
    assert records[0]['measures'][f'{name}@4']['mean'] == records[0]['curves'][name]['mean'][-1]
  assert json.loads(json.dumps(records)) == records


def test_metrics_keep_their_names():
  found = tally.metrics(tally.groups(rows(), 1.0))
  measures = ('greedy', 'mean@4', 'best@4', 'pass@4', 'maj@4', 'vote@4')
  assert list(found) == [f'val-core/{s}/acc/{m}' for s in ('a', 'b', 'all') for m in measures]
  assert found['val-core/b/acc/greedy'] == pytest.approx(1 / 3)


def test_the_table_is_aligned_and_says_what_the_groups_say():
  text = tally.table(tally.groups(rows(), 1.0))
  lines, curve = (part.splitlines() for part in text.split('\n\n'))
  assert lines[0].split()[:4] == ['source', 'level', 'prompts', 'greedy']
  assert [line.split()[0] for line in lines[2:]] == ['a', 'b', 'b', 'b', 'all']
  assert '50.0 [15.0, 85.0]' in lines[-1]
  assert len({line.index(']') for line in lines[2:]}) == 1
  assert curve[0].split() == ['k', 'pass@k', 'maj@k', 'vote@k']
  assert [line.split()[0] for line in curve[2:]] == ['1', '2', '4']
  assert 'best@4' not in text  # it is pass@4
  assert 'best@4' in tally.table(tally.groups(rows(), 2.0))  # nothing passes, and the best is 1


def test_one_source_is_said_once():
  records = tally.groups(rows(PROMPTS[:3]), 1.0)
  lines = tally.table(records).splitlines()[2:5]
  assert [line.split()[:2] for line in lines[:2]] == [['b', 'length=9'], ['b', 'length=10']]
  assert lines[2].split()[0] == 'all'
  ours = evaluation(PROMPTS[:3])
  assert {d['source'] for d in compare.differences(ours, ours)} == {'all'}
  assert len(tally.groups(rows(PROMPTS[1:3]), 1.0)) == 2  # one level is none


def shuffled(evaluated: dict) -> dict:
  order = [2, 0, 3, 1]
  kinds = [evaluated['rows'][:4], evaluated['rows'][4:]]
  return evaluated | dict(rows=[kind[i] for kind in kinds for i in order])


def test_differences_are_ours_less_theirs_prompt_by_prompt():
  worse = [(s, lev, 0.0, (0, 0, 0, sc[3]), a, t) for s, lev, _, sc, a, t in PROMPTS]
  ours, theirs = evaluation(), shuffled(evaluation(worse))
  found = {(d['source'], d['measure']): d for d in compare.differences(ours, theirs)}
  pair = np.array([1.0, 0, 0, 1]), np.zeros(4)
  greedy = found['all', 'greedy']
  for name, value in estimate.difference(*pair)._asdict().items():
    assert greedy[name] == pytest.approx(value)
  assert (greedy['ours'], greedy['theirs'], greedy['prompts']) == (0.5, 0.0, 4)
  assert found['b', 'mean@4']['mean'] == pytest.approx((0.25 + 0 + 0.25) / 3)
  assert found['a', 'greedy']['low'] is None
  assert {'pass@1', 'pass@2', 'maj@2'} <= {m for _, m in found} and ('all', 'maj@1') not in found
  assert compare.differences(shuffled(ours), theirs) == compare.differences(ours, theirs)
  # In another order the same prompts do not differ, at any measure.
  assert all(d['mean'] == 0 and d['p'] == 1 for d in compare.differences(ours, shuffled(ours)))


def test_other_numbers_of_samples_share_what_is_of_as_many():
  fewer = [(s, lev, g, sc[:2], a[:2], t[:2]) for s, lev, g, sc, a, t in PROMPTS]
  theirs = evaluation(fewer, settings=dict(samples=2, temperature=1.0))
  names = {d['measure'] for d in compare.differences(evaluation(), theirs)}
  assert names == {'greedy', 'pass@1', 'pass@2', 'maj@2', 'vote@2'}
  assert 'other than there: samples: 2 -> 4' in compare.table(evaluation(), theirs)


def test_questions_that_come_twice_are_told_apart():
  ours, theirs = evaluation(), evaluation()
  for contents in (ours, theirs):
    for row in contents['rows']:
      row['id'] = 'same' if row['source'] == 'b' else row['id']
  assert all(d['mean'] == 0 for d in compare.differences(ours, theirs))
  theirs['rows'][0]['id'] = 'other'
  with pytest.raises(UserError, match='of 4 there and 4 here 3 are the same'):
    compare.differences(ours, theirs)


def test_other_graders_and_other_prompts_are_one_sentence():
  theirs = evaluation(grader=dict(fn='number', right=1.0, parts=[]))
  with pytest.raises(UserError, match=r"another grader \(fn: 'number' there, 'exact' here\)"):
    compare.differences(evaluation(), theirs)
  fewer = copy.deepcopy(evaluation())
  fewer['rows'] = [row for row in fewer['rows'] if row['id'] != 'id3']
  with pytest.raises(UserError, match='other prompts: of 3 there and 4 here 3 are the same'):
    compare.differences(evaluation(), fewer)


@pytest.mark.parametrize(
  'text, why',
  [
    (None, 'cannot be read'),
    ('{"step"', 'cannot be read'),
    ('[]', 'is no evaluation of version 1 (None)'),
    ('{"step": 3, "metrics": {}}', 'is no evaluation of version 1 (None)'),
    ('{"version": 2}', 'is no evaluation of version 1 (2)'),
  ],
)
def test_a_file_that_is_none_is_told(tmp_path, text, why):
  path = tmp_path / 'evaluation.json'
  if text is not None:
    path.write_text(text)
  with pytest.raises(UserError) as error:
    compare.load(str(path))
  assert why in str(error.value) and f'--against={path}' in str(error.value)


def test_the_table_of_differences_has_signs_intervals_and_p():
  better = [(s, lev, 1.0, sc, a, t) for s, lev, _, sc, a, t in PROMPTS]
  text = compare.table(evaluation(), evaluation(better, model='n'))
  greedy = next(line for line in text.splitlines() if ' greedy' in line)
  assert greedy.split()[:5] == ['all', 'greedy', '4', '100.0', '50.0'] and '-50.0 [' in greedy
  assert greedy.split()[-1] == '0.5' and 'model: n -> m' in text

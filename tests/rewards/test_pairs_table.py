"""The text graders on labeled pairs with provenance, tests/rewards/pairs/, whose README has the conventions."""

from __future__ import annotations

import json

import pytest

from tests.rewards.pairs import score

_FIELDS = {'class', 'answer', 'reply', 'label', 'provenance', 'split'}
_MORE = {'settings', 'row', 'theirs', 'note'}

# What misses the target. The pairs stay unread, so a grader is not corrected by them.
_SHORT = {
  ('number', 'held_out'): 'accepts 1 of 22 wrong replies: negated',
  ('math_verify', 'held_out'): 'rejects 4 of 102 right replies: interval, prose, ratio',
  (
    'multiple_choice',
    'held_out',
  ): 'accepts 2 of 63 wrong replies: alternatives, negated; rejects 3 of 68 right ones',
}


def _import(grader: str) -> None:
  if grader == 'math_verify':
    pytest.importorskip('math_verify')
  if grader == 'json_schema':
    pytest.importorskip('jsonschema')


@pytest.mark.parametrize(
  'grader, split',
  [
    pytest.param(
      grader,
      split,
      marks=[pytest.mark.xfail(strict=True, reason=_SHORT[grader, split])]
      if (grader, split) in _SHORT
      else [],
    )
    for grader in score.GRADERS
    for split in score.SPLITS
  ],
)
def test_no_wrong_reply_is_accepted_and_few_right_ones_are_rejected(grader, split):
  _import(grader)
  counts = score.total(score.tally(grader, score.pairs(grader, split)))
  # Compared as numbers: a message must not show pairs that are held out.
  assert (counts.false_accepts, counts.errors) == (0, 0)
  assert counts.false_rejects <= score.MOST_REJECTED * counts.right


@pytest.mark.parametrize('split', score.SPLITS)
@pytest.mark.parametrize('grader', score.GRADERS)
def test_every_pair_is_whole(grader, split):
  pairs = score.pairs(grader, split)
  assert len({score.digest(grader, pair) for pair in pairs}) == len(pairs)
  for pair in pairs:
    assert pair.keys() >= _FIELDS and pair.keys() <= _FIELDS | _MORE
    assert pair['label'] in (0, 1) and pair['split'] == split
    assert ('theirs' in pair) == ('note' in pair) and pair.get('theirs') != pair['label']


def test_each_reply_is_on_the_side_that_its_hash_says():
  found = {
    split: [p for g in score.GRADERS for p in score.pairs(g, split)] for split in score.SPLITS
  }
  held_out = score.held_out(pair for pairs in found.values() for pair in pairs)
  assert {pair['reply'] for pair in found['held_out']} == held_out
  assert not held_out & {pair['reply'] for pair in found['open']}


def test_the_table_is_large_and_has_labels_from_outside():
  every = [pair for g in score.GRADERS for split in score.SPLITS for pair in score.pairs(g, split)]
  outside = [pair for pair in every if pair['provenance'] != 'ours']
  assert len(every) >= 440 and len(outside) >= 220
  assert all('@' in pair['provenance'] and '::' in pair['provenance'] for pair in outside)
  share = sum(pair['split'] == 'held_out' for pair in every) / len(every)
  assert 0.3 < share < 0.37


def test_a_wrong_label_is_noticed():
  rows = score.pairs('countdown', 'open')
  flipped = json.loads(json.dumps(rows))
  for row in flipped:
    row['label'] = 1 - row['label']
  plain, turned = (score.total(score.tally('countdown', found)) for found in (rows, flipped))
  assert (plain.right, plain.wrong) == (turned.wrong, turned.right)
  assert turned.false_accepts == plain.right - plain.false_rejects
  assert turned.false_rejects == plain.wrong - plain.false_accepts

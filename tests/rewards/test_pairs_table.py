"""The text graders on labeled pairs with provenance, tests/rewards/pairs/, whose README has the conventions."""

from __future__ import annotations

import json

import pytest

from tests.rewards.pairs import score

_FIELDS = {'class', 'answer', 'reply', 'label', 'provenance', 'split'}
_MORE = {'settings', 'row', 'theirs', 'note'}

# What misses the target. The pairs stay unread, so a grader is not corrected by them.
_SHORT = {
  ('numeric', 'held_out'): 'accepts 1 of 207 wrong replies: expression',
  ('math_verify', 'held_out'): 'accepts 1 of 158 wrong replies: equation',
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
    assert pair['label'] in (0, 1) and pair['split'] == score.SPLITS[split].name.replace(
      'pairs', 'open'
    )
    assert ('theirs' in pair) == ('note' in pair) and pair.get('theirs') != pair['label']


def test_no_held_out_reply_is_open():
  found = {
    split: {pair['reply'] for grader in score.GRADERS for pair in score.pairs(grader, split)}
    for split in score.SPLITS
  }
  assert not found['held_out'] & found['open']


def test_the_table_is_large_and_has_labels_from_outside():
  every = [pair for g in score.GRADERS for split in score.SPLITS for pair in score.pairs(g, split)]
  outside = [pair for pair in every if pair['provenance'] != 'ours']
  assert len(every) >= 440 and len(outside) >= 220
  assert all('@' in pair['provenance'] and '::' in pair['provenance'] for pair in outside)


def test_a_wrong_label_is_noticed():
  rows = score.pairs('countdown', 'open')
  flipped = json.loads(json.dumps(rows))
  for row in flipped:
    row['label'] = 1 - row['label']
  plain, turned = (score.total(score.tally('countdown', found)) for found in (rows, flipped))
  assert (plain.right, plain.wrong) == (turned.wrong, turned.right)
  assert turned.false_accepts == plain.right - plain.false_rejects
  assert turned.false_rejects == plain.wrong - plain.false_accepts

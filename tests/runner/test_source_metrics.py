"""Metrics by the source of rows, against V-Triune's own code."""

from __future__ import annotations

import json
import pathlib
import types

import numpy as np
import pytest

from jaxrl_llm import rewards
from jaxrl_llm.runner import source_metrics
from jaxrl_llm.types import STOPPED, TRUNCATED, Batch, Prompts, Rollout, Row, Turns

GOLDEN = json.loads(pathlib.Path(__file__).with_name('source_metrics_golden.json').read_text())
DATA = GOLDEN['inputs']
B, T = len(DATA['length']), 6
SOURCES = ['chart', 'math', 'count']
# Name in the official code, with {} for the source → ours.
NAMES = {
  'response_length_{}/mean_length': 'length',
  'response_length_{}/length_clip_ratio': 'clip_ratio',
  'response_length_{}/mean_correct_length': 'length_right',
  'response_length_{}/mean_wrong_length': 'length_wrong',
  'reflection_ratios_{}/reflection_ratio': 'reflection',
  'reflection_ratios_{}/correct_ratio_in_reflection_texts': 'right_reflecting',
  'reflection_ratios_{}/correct_ratio_in_no_reflection_texts': 'right_direct',
  'rews_accuracy_reward/{}': 'right',
  'rews_format_reward/{}': 'score/format',
}


def graded(parts: int = 2, dropped=(), turns=None):
  """The golden's completions as a graded step; its longest ones were cut off."""
  length_B = np.array(DATA['length'], np.int32)
  length_B[list(dropped)] = 0
  zeros = np.zeros((B, T), np.int32)
  reason_B = np.where(length_B == T, TRUNCATED, STOPPED).astype(np.int8)
  rollout = Rollout(
    zeros, zeros.astype(np.float32), length_B, reason_B, zeros, np.ones(B, np.float32),
    np.zeros((B, 0), np.float32), turns=turns,
  )  # fmt: skip
  part_BxK = np.array([DATA['right'], DATA['format']], np.float32).T[:, :parts]
  prompts = Prompts(zeros, length_B, length_B, length_B, np.zeros(B, np.float32))
  names = ('right', 'format')[:parts]
  grading = types.SimpleNamespace(rewards=[rewards.Part(name, 1.0, None) for name in names])
  scores = types.SimpleNamespace(
    context=types.SimpleNamespace(grading=grading), part_BxK=part_BxK, logged_texts=DATA['text']
  )
  batch = Batch(prompts, rollout, part_BxK.sum(1), part_BxK[:, 0])
  rows = [Row(str(b), 'q', (), 'a', source, {}) for b, source in enumerate(DATA['source'])]
  return types.SimpleNamespace(batch=batch, rows=rows, scores=scores)


def test_metrics_of_a_source_are_those_of_the_official_code():
  found = source_metrics.metrics(graded(), SOURCES)
  missing = []
  for source in SOURCES:
    for theirs, ours in NAMES.items():
      name, key = f'source/{source}/{ours}', theirs.format(source)
      if name not in found:  # of no completion: not a number there, or 0
        assert GOLDEN['outputs'].get(key, 0.0) == 0.0
        missing.append(name)
        continue
      assert found[name] == pytest.approx(GOLDEN['outputs'][key], rel=1e-6), name
  assert missing == ['source/count/length_wrong']  # all of them are right


def test_rewards_are_summed_and_rollouts_counted():
  found = source_metrics.metrics(graded(), SOURCES)
  assert found['source/math/rollouts'] == DATA['source'].count('math')
  for source in SOURCES:
    parts = found[f'source/{source}/score/right'] + found[f'source/{source}/score/format']
    assert found[f'source/{source}/score'] == pytest.approx(parts)
  single = source_metrics.metrics(graded(parts=1), SOURCES)
  assert 'source/math/score' in single and 'source/math/score/right' not in single


def test_what_is_not_learned_from_does_not_count():
  at = [b for b, source in enumerate(DATA['source']) if source == 'math']
  found = source_metrics.metrics(graded(dropped=at[1:]), SOURCES)
  assert found['source/math/rollouts'] == 1
  assert found['source/math/length'] == DATA['length'][at[0]]
  gone = source_metrics.metrics(graded(dropped=at), SOURCES)
  assert not any(name.startswith('source/math/') for name in gone) and 'source/chart/right' in gone


def test_lengths_are_of_sampled_tokens():
  number_BxT = np.where(np.arange(T) < 2, 0, -1)[None].repeat(B, 0)  # the others were observed
  unread = np.zeros(B, np.float32)
  found = source_metrics.metrics(graded(turns=Turns(number_BxT, *[unread] * 3)), SOURCES)
  assert found['source/math/length'] == found['source/chart/length'] == 2


def test_of_many_sources_the_largest_are_logged():
  many = [str(i) for i in range(31)] + SOURCES
  found = {name.split('/')[1] for name in source_metrics.metrics(graded(), many)}
  assert found == {'chart'}
